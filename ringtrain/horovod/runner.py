"""`horovod.runner`: starting a function on several ranks from Python."""

from ringtrain.runner.function import run

__all__ = ["run"]
