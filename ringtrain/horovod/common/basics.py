"""`horovod.common.basics`: the calls about the job as methods of one object, as libraries have it."""

from __future__ import annotations

from typing import Any

from ringtrain import ops
from ringtrain.job import session
from ringtrain.timeline import recording


class HorovodBasics:
    """The names of `hvd` for the job and the reductions.

    Args:
        pkg_path, args: which library to load, in Horovod. There is one only, so they do not matter.
    """

    Average, Sum, Adasum = ops.Average, ops.Sum, ops.Adasum
    Min, Max, Product = ops.Min, ops.Max, ops.Product

    init = staticmethod(session.init)
    shutdown = staticmethod(session.shutdown)
    is_initialized = staticmethod(session.is_initialized)
    start_timeline = staticmethod(recording.start_timeline)
    stop_timeline = staticmethod(recording.stop_timeline)
    size = staticmethod(session.size)
    local_size = staticmethod(session.local_size)
    cross_size = staticmethod(session.cross_size)
    rank = staticmethod(session.rank)
    local_rank = staticmethod(session.local_rank)
    cross_rank = staticmethod(session.cross_rank)
    is_homogeneous = staticmethod(session.is_homogeneous)
    mpi_threads_supported = staticmethod(session.mpi_threads_supported)
    mpi_enabled = staticmethod(session.mpi_enabled)
    mpi_built = staticmethod(session.mpi_built)
    gloo_enabled = staticmethod(session.gloo_enabled)
    gloo_built = staticmethod(session.gloo_built)
    nccl_built = staticmethod(session.nccl_built)
    ddl_built = staticmethod(session.ddl_built)
    ccl_built = staticmethod(session.ccl_built)
    cuda_built = staticmethod(session.cuda_built)
    rocm_built = staticmethod(session.rocm_built)

    def __init__(self, pkg_path: str = "", *args: Any):
        pass
