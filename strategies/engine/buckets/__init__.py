"""What a bucket is, and who holds its memory."""
