"""The trainer: from one config file to a finished run."""

if __name__ != "deepstow.trainer":  # a second copy of each module otherwise
    raise ImportError("import deepstow.trainer")
