"""Using and measuring a trained model: search, perplexity and BLEU, translation and export."""
