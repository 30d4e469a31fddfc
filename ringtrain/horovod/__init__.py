"""Horovod's names for ringtrain, so that what imports Horovod runs as it is: scripts, and libraries that they use.

This package is the module `horovod` from the moment at which it is imported: `import ringtrain.horovod` in the first
line of a script, `python -m ringtrain.horovod train.py` or `ringrun --horovod python train.py` without any change.
`horovod.torch` is `ringtrain.torch`, the same module, which is not imported before somebody asks for it.
"""

from ringtrain.horovod import finder
from ringtrain.runner.function import run as run

# Of the Horovod whose names, arguments and behaviour these are.
__version__ = "0.28.1"

finder.install(__name__)
