"""Memory: the arenas, and what is known of the accelerator."""
