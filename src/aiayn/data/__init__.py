"""From parallel text to updates: downloads, tokenizers, the encoded corpus, the sentences of each update."""
