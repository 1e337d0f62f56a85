"""Degrees of a job over many ranks: pipeline stages, tensor and data parallelism, and what goes with them.

``chain.py`` has the exact problem on a chain of unlike layers, ``search.py`` the search over uniform degrees that
``launch/plan.py --search`` prints.
"""
