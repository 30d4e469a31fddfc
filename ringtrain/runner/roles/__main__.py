"""Runs the starter of a job with servers, by the path of its folder, as that of other jobs (start/__main__.py)."""

import sys
from pathlib import Path

# ringtrain's own folder comes last, since it may hold other packages
sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parents[3])]

if __name__ == "__main__":
    from ringtrain.runner.roles.main import main

    sys.exit(main())
