"""`python -m ringtrain.horovod train.py ARGS`: as `python train.py ARGS`, with ringtrain for Horovod."""

from __future__ import annotations

import os
import re
import sys

from ringtrain.runner import installed

_HELP = f"""\
usage: python -m ringtrain.horovod [python's options] (train.py | -m MODULE | -c COMMAND) [ARGUMENTS]

Run a script, a module or a command as python does, with `import horovod` finding ringtrain:
  python -m ringtrain.horovod train.py --epochs 3
  python -m ringtrain.horovod -m package.train --epochs 3

Where a Horovod is installed, {installed.REPLACE_VARIABLE}=1 has ringtrain take its place."""


def main() -> None:
    """Become the Python that was asked for: nothing of the script can see that there was another one before."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(_HELP)
        sys.exit(0 if words else 2)
    os.environ["PYTHONPATH"] = installed.with_folder(os.environ.get("PYTHONPATH"))
    os.execv(sys.executable, [sys.executable, *_own_options(), *words])


def _own_options() -> list[str]:
    """Returns what was between `python` and `-m ringtrain.horovod`, which may also end a word, as in -um."""
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]
    if options[-1] == "ringtrain.horovod":
        options.pop()
    options[-1] = re.sub(r"m(ringtrain\.horovod)?$", "", options[-1])
    return options[:-1] if options[-1] == "-" else options


if __name__ == "__main__":
    main()
