"""What a trained model is worth and does: search, perplexity and BLEU, translation, export."""
