"""`python -m ringtrain.run` is `ringrun`. It can only be run: imported, it would hide the function `ringtrain.run`."""

import sys

if __name__ != "__main__":
    raise ImportError("ringtrain.run is a function, not a module: write `from ringtrain import run`")

from ringtrain.runner.command import main

sys.exit(main())
