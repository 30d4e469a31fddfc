"""Data-parallel training under mpirun and srun, for arrays of any library.

import ringtrain as hvd

hvd.init()
hvd.broadcast_parameters(parameters, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer)
"""

# ruff: noqa: F403, F405 - what checks types knows the names from face.py

import importlib
import typing
import warnings

from ringtrain.job import lifecycle as _lifecycle
from ringtrain.runner import installed as _copies
from ringtrain.version import __version__ as __version__

if typing.TYPE_CHECKING:
    from ringtrain import elastic as elastic
    from ringtrain.face import *
    from ringtrain.runner.function import run as run
    from ringtrain.training.diloco import DiLoCo as DiLoCo
    from ringtrain.training.optimizer import DistributedOptimizer as DistributedOptimizer
    from ringtrain.training.replicas import check_replicas as check_replicas
    from ringtrain.training.speed_sampler import SpeedSampler as SpeedSampler

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DeadlockError",
    "DiLoCo",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "NonFiniteError",
    "NotInitializedError",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "RemoteError",
    "ReplicaError",
    "RingtrainError",
    "ShutDownError",
    "SpeedSampler",
    "StalledError",
    "StepOrderError",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_parameters",
    "ccl_built",
    "check_replicas",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "empty",
    "exit_preempted",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_alltoall",
    "grouped_alltoall_async",
    "grouped_broadcast",
    "grouped_broadcast_",
    "grouped_broadcast_async",
    "grouped_broadcast_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "new_group",
    "poll",
    "preempted",
    "rank",
    "recv",
    "recv_async",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "send",
    "send_async",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "time_limit",
]
# Of the others users import what they want.
_MODULES = {"arrays", "elastic", "errors", "ops", "timeline"}
# Names that few ranks use and that are slow to import; all others are in face.py.
_HOMES = {
    "DiLoCo": "ringtrain.training.diloco",
    "DistributedOptimizer": "ringtrain.training.optimizer",
    "SpeedSampler": "ringtrain.training.speed_sampler",
    "check_replicas": "ringtrain.training.replicas",
    "run": "ringtrain.runner.function",
}


def _load() -> object:
    return importlib.import_module("ringtrain.face")


def __getattr__(name: str) -> object:
    # Launchers such as ringrun do not need NumPy and the like, and ranks do not need the launchers.
    if name in _MODULES:  # alone: `from ringtrain import ops` in a module that face.py is loading asks for it, too
        return importlib.import_module(f"ringtrain.{name}")
    if name not in __all__:
        raise importlib.import_module("ringtrain.errors").missing(__name__, name, __all__)
    home = importlib.import_module(_HOMES[name]) if name in _HOMES else _load()
    value = globals()[name] = getattr(home, name)
    return value


def load_ipython_extension(shell: object) -> None:
    """IPython calls it for `%load_ext ringtrain`, which gives the notebook the cell magic `%%ringtrain -np 4`."""
    importlib.import_module("ringtrain.runner.notebook").register(shell)


def load_torch_backend() -> None:
    """PyTorch calls it when it is imported, for the backend "ringtrain" of torch.distributed."""
    try:
        _copies.offer_torch_backend()
    except Exception as error:  # would end the import of PyTorch, also in scripts that do not use ringtrain
        warnings.warn(
            f'this PyTorch does not take the backend "ringtrain" ({error!r}); import ringtrain.torch.distributed',
            stacklevel=1,
        )


def __dir__() -> list[str]:
    """Lists the public names, which completion shows, and none of the modules that importing them has left here."""
    return sorted({*__all__, "elastic", *(name for name in globals() if name.startswith("__"))})


_copies.explain_missing_core()
_lifecycle.load_with(_load)
