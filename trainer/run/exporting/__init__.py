"""What a run leaves: its export, what is made of that, and its upload."""
