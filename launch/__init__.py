"""Entry points: argv in, exit code out. Thin."""

if __name__ != "deepstow.launch":  # a second copy of each module otherwise
    raise ImportError("import deepstow.launch")
