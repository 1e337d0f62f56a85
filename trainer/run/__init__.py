"""A run: everything around Hugging Face's Trainer, in one written order."""
