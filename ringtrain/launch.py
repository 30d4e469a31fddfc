"""`python -m ringtrain.launch` is `ringlaunch`: workers, servers and a scheduler, as MXNet's launch.py starts them."""

from __future__ import annotations

import sys

from ringtrain.runner.launch_command import main

if __name__ == "__main__":
    sys.exit(main())
