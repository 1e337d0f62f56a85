"""Random tests draw the same examples on every run, so that what passes here passes elsewhere."""

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.load_profile("same")
