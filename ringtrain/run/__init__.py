"""Starting jobs: the command `ringrun`, and `ringtrain.run(function, num_proc=4)`.

Importing `ringtrain` gives the attribute `run` to the function. Modules of this package are imported by name all the
same, as in `from ringtrain.run.hosts import Host`.
"""

from ringtrain.run.function import run

__all__ = ["run"]
