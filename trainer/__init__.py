"""The trainer: from one config file to a finished run."""
