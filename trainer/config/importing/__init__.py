"""From the config of another framework to one of ours, with a list of what could not be carried over."""
