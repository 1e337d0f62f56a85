"""The machine: what it has and how fast it is, probed, measured or named."""
