"""`horovod.runner`: starting a function on several ranks from Python."""

from ringtrain.run import run

__all__ = ["run"]
