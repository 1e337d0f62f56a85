"""State dicts and files of training state."""
