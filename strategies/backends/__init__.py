"""Libraries that can train instead of the memory engine; one file for each, with all that is particular to it."""
