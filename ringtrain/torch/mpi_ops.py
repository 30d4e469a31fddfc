"""What `ringtrain.torch` has under the name of Horovod's module, `horovod.torch.mpi_ops`: `hvd.mpi_ops.Sum`."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    package = importlib.import_module("ringtrain.torch")
    if name == "__all__" or name in package.__all__:
        return getattr(package, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
