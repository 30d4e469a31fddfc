"""`python -m ringtrain.mxnet train.py ARGS`: as `python train.py ARGS`, on ringtrain's ranks and stores."""

from __future__ import annotations

import os
import runpy
import sys

from ringtrain.mxnet.stores import replace_kvstore
from ringtrain.runner import installed

_HELP = """\
usage: python -m ringtrain.mxnet (train.py | -m MODULE) [ARGUMENTS]

Run a script of MXNet or of horovod.mxnet as it is: `import horovod.mxnet` finds ringtrain, and the distributed stores
of MXNet's KVStore are ringtrain's. A process whose DMLC_ROLE is server or scheduler is one of ringtrain's."""


def main() -> None:
    """Run what was asked for in this process."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help") or words == ["-m"]:
        print(_HELP)
        sys.exit(0 if words and words != ["-m"] else 2)
    sys.path.append(installed.HOROVOD_FOLDER)
    os.environ["PYTHONPATH"] = installed.with_folder(os.environ.get("PYTHONPATH"))
    replace_kvstore()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
