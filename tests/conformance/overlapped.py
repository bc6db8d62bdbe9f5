"""Runs a training script as it is, but for `overlap=True` in `prepare`.

python overlapped.py SCRIPT ARGUMENTS...
"""

import runpy
import sys
from functools import partialmethod

import psworker

if __name__ == "__main__":
    prepare = partialmethod(psworker.Connection.prepare, overlap=True)
    psworker.Connection.prepare = prepare  # type: ignore[method-assign, assignment]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
