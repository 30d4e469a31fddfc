"""Runs as a script, with the command of a rank: becomes the wrapper of that rank.

Python compiles a script at each start, and keeps what it has compiled of a module.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import rank_wrapper  # type: ignore[import-not-found, unused-ignore]

    sys.exit(rank_wrapper.main(sys.argv[1:]))
