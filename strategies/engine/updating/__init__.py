"""From a gradient to the updated weight."""
