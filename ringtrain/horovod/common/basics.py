"""`horovod.common.basics`: the calls about the job as methods of one object, as libraries have it."""

from __future__ import annotations

from typing import Any

from ringtrain import ops, timeline, world


class HorovodBasics:
    """What `hvd` has of the job and of the reductions.

    Args:
        pkg_path, args: which library to load, in Horovod. There is one only, so they do not matter.
    """

    Average, Sum, Adasum = ops.Average, ops.Sum, ops.Adasum
    Min, Max, Product = ops.Min, ops.Max, ops.Product

    init = staticmethod(world.init)
    shutdown = staticmethod(world.shutdown)
    is_initialized = staticmethod(world.is_initialized)
    start_timeline = staticmethod(timeline.start_timeline)
    stop_timeline = staticmethod(timeline.stop_timeline)
    size = staticmethod(world.size)
    local_size = staticmethod(world.local_size)
    cross_size = staticmethod(world.cross_size)
    rank = staticmethod(world.rank)
    local_rank = staticmethod(world.local_rank)
    cross_rank = staticmethod(world.cross_rank)
    is_homogeneous = staticmethod(world.is_homogeneous)
    mpi_threads_supported = staticmethod(world.mpi_threads_supported)
    mpi_enabled = staticmethod(world.mpi_enabled)
    mpi_built = staticmethod(world.mpi_built)
    gloo_enabled = staticmethod(world.gloo_enabled)
    gloo_built = staticmethod(world.gloo_built)
    nccl_built = staticmethod(world.nccl_built)
    ddl_built = staticmethod(world.ddl_built)
    ccl_built = staticmethod(world.ccl_built)
    cuda_built = staticmethod(world.cuda_built)
    rocm_built = staticmethod(world.rocm_built)

    def __init__(self, pkg_path: str = "", *args: Any):
        pass
