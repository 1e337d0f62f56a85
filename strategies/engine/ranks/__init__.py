"""What ranks exchange and share."""
