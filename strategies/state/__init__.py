"""Training state on disk, in one format for all strategies and any number of ranks."""
