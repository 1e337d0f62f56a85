"""What is called at each step of a run: reports, trackers, checks, and callbacks that a config names."""
