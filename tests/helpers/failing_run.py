"""A run of ``launch/train.py`` in which a file operation fails: a script for the server of ranks (``failing.py``).

The first argument says which, as JSON; the others are those of the command.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

import datasets.config

from deepstow.launch import train

if __name__ == "__main__":
    case = json.loads(sys.argv.pop(1))
    os.environ["HOME"] = case["home"]
    datasets.config.HF_DATASETS_CACHE = Path(case["home"], "datasets")  # read when it was imported
    words = [case["roots"], case["log"], case["kind"], case["path"]]
    begun = ctypes.CDLL(None).failing_begin(
        *(word.encode() for word in words), case["number"], case["error"], case["for_good"]
    )
    assert begun
    sys.exit(train.main())
