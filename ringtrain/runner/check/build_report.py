"""What `ringrun --check-build` prints: which of the things that Horovod is built with are there."""

from __future__ import annotations

from importlib.util import find_spec

import ringtrain._core as _core
from ringtrain.job import gpus
from ringtrain.runner.launchers.mpi_library import MpiNotFound, probe
from ringtrain.version import __version__


def build_report() -> str:
    """In the shape that `horovodrun --check-build` has."""
    mpi = _has_mpi()
    topics = {
        "Available Frameworks": {"TensorFlow": False, "PyTorch": find_spec("torch") is not None, "MXNet": False},
        "Available Controllers": {"MPI": mpi, "Gloo": False},
        "Available Tensor Operations": {"NCCL": _has_nccl(), "DDL": False, "CCL": False, "MPI": mpi, "Gloo": False},
    }
    lines = [f"ringtrain v{__version__}:"]
    for topic, names in topics.items():
        lines += ["", f"{topic}:", *(f"    [{'X' if is_there else ' '}] {name}" for name, is_there in names.items())]
    without = "" if mpi else " Without MPI, ringtrain's own sockets connect the ranks: network=sockets."
    return "\n".join([*lines, "", f"Nothing is built for these; `python -m ringtrain.doctor` says more.{without}"])


def _has_mpi() -> bool:
    try:
        probe()
    except MpiNotFound:
        return False
    return True


def _has_nccl() -> bool:
    """As `nccl_built()`, which counts no NCCL without a GPU."""
    if _core.gpu_count() == 0:
        return False
    try:
        return _core.nccl_version(gpus.nccl_candidates())[0] > 0
    except _core.RingtrainError:
        return False
