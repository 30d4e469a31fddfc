"""`horovod.runner.launch`: the command `horovodrun`, which is `ringrun --horovod`."""

from __future__ import annotations

import sys

from ringtrain.runner.command import main_of_horovodrun


def run_commandline() -> None:
    """Runs horovodrun with the arguments of this process. Raises SystemExit with its exit code."""
    sys.exit(main_of_horovodrun())


if __name__ == "__main__":
    run_commandline()
