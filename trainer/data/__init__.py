"""The data: from the config's ``data`` section to batches."""
