"""Other forms of the trained model, one file each. Nothing heavy is imported before one is made."""
