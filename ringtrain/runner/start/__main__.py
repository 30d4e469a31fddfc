"""Runs a starter. By the path of its folder, not by `-m`: no file of the current folder can then hide a module."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # ringtrain's own folder comes last, since it may hold other packages
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parents[3])]

    from ringtrain.runner.start.main import main

    sys.exit(main())
