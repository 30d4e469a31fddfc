"""`horovod.runner`: starting jobs from Python, and small parts of Horovod's launcher that other code imports."""

from ringtrain.runner.function import run

__all__ = ["run"]
