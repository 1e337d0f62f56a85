"""The config: text in, a checked ``RunConfig`` or every error at once out."""
