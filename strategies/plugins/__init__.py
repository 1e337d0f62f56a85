"""Ways of exchanging that the core does not name: fewer bytes, fewer steps, chunks, phases. Each is a file or two."""
