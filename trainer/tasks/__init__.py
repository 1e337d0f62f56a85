"""What can be learned: a description of each task, which data, planning and the run ask."""
