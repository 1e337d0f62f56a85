"""Trainers of tasks, in files that are imported only where one trains."""
