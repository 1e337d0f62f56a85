"""The model: built, counted, shrunk."""
