"""The run: one written order of effects around Hugging Face's Trainer."""
