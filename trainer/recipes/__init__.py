"""What a run may do with its model besides training it: a folder or file for each, found by the registry."""
