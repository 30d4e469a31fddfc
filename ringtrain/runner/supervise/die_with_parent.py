"""Runs as a script: becomes the command that it is given, which gets a signal when the process that started it ends.

In a process of its own, since subprocess advises against code between fork and exec where there are threads, as in a
notebook. Needs nothing but Python itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, last_signal: int, command: list[str]) -> None:
    """Returns only if the process `parent` has ended by now. Raises OSError if the command cannot be started."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, last_signal)
    if os.getppid() == parent:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and so would the command
            signal.signal(number, signal.SIG_DFL)
        os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
