"""MPI through mpi4py: each tensor by itself, and Horovod's scheme, which packs them into a fusion buffer."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

import ringtrain._core as _core
from ringtrain.bench.arithmetic import scaling
from ringtrain.bench.ranks import Job
from ringtrain.bench.rounds import Array, Competitor, Distribution
from ringtrain.job import libmpi

_FUSION_MB = (1, 2, 64)


def open_peer(job: Job) -> MpiPeer:
    return MpiPeer()


class MpiPeer:
    """MPI_COMM_WORLD's collectives, blocking, in place."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD.Dup()

    def collective(self, kind: str) -> list[Competitor]:
        return [Competitor("mpi", lambda tensors: self._collective(kind, tensors[0]))]

    def step(self) -> list[Competitor]:
        fused = [
            Competitor(f"mpi, {megabytes} MB fusion", functools.partial(self._step, buffer_bytes=megabytes << 20))
            for megabytes in _FUSION_MB
        ]
        return [Competitor("mpi, per tensor", functools.partial(self._step, buffer_bytes=0)), *fused]

    def training(self) -> list[Distribution]:
        return []

    def close(self) -> None:
        self._comm.Free()

    def _collective(self, kind: str, array: Array) -> Callable[[], Array]:
        comm, buffer, op = self._comm, _buffer(array), sum_of(array.dtype)
        shares = {"allgather": array.size * comm.size, "reducescatter": array.size // comm.size}
        is_in_place = kind in ("allreduce", "broadcast")
        result = array if is_in_place else np.empty(shares.get(kind, array.size), array.dtype)
        received = _buffer(result)
        calls: dict[str, Callable[[], None]] = {
            "allreduce": lambda: comm.Allreduce(MPI.IN_PLACE, buffer, op),
            "allgather": lambda: comm.Allgather(buffer, received),
            "broadcast": lambda: comm.Bcast(buffer, 0),
            "alltoall": lambda: comm.Alltoall(buffer, received),
            "reducescatter": lambda: comm.Reduce_scatter_block(buffer, received, op),
        }
        call = calls[kind]

        def run() -> Array:
            call()
            return result

        return run

    def _step(self, tensors: Sequence[Array], buffer_bytes: int) -> Callable[[], Sequence[Array]]:
        """Gradients in backward order. Arrays that share no buffer are reduced in place, as in Horovod."""
        comm, op, factor = self._comm, sum_of(tensors[0].dtype), 1.0 / self._comm.size
        memory = np.empty(buffer_bytes // tensors[0].itemsize, tensors[0].dtype)
        passes: list[Callable[[], Any]] = []
        for members in _fused(tensors[::-1], memory.size):
            if len(members) == 1:
                passes += [_reducing(comm, _buffer(members[0]), op), scaling(members[0], members[0], factor)]
                continue
            pairs = list(zip(_laid_out(members, memory), members, strict=True))
            passes += [_copying(view, member) for view, member in pairs]
            passes.append(_reducing(comm, _buffer(memory[: sum(member.size for member in members)]), op))
            passes += [scaling(member, view, factor) for view, member in pairs]

        def run() -> Sequence[Array]:
            for one_pass in passes:
                one_pass()
            return tensors

        return run


def _reducing(comm: Any, buffer: Any, op: Any) -> Callable[[], None]:
    return lambda: comm.Allreduce(MPI.IN_PLACE, buffer, op)


def _copying(destination: Array, source: Array) -> Callable[[], None]:
    return lambda: np.copyto(destination, source)


def _fused(tensors: Sequence[Array], capacity: int) -> Iterator[list[Array]]:
    """Neighbours that fit into a buffer of `capacity` values together."""
    members: list[Array] = []
    for tensor in tensors:
        if members and sum(member.size for member in members) + tensor.size > capacity:
            yield members
            members = []
        members.append(tensor)
    yield members


def _laid_out(members: Sequence[Array], memory: Array) -> list[Array]:
    ends = np.cumsum([member.size for member in members])
    return [memory[end - member.size : end].reshape(member.shape) for end, member in zip(ends, members, strict=True)]


def _buffer(array: Array) -> Any:
    """Returns the array as mpi4py takes it; 16-bit floats as integers, which only `sum_of` reads as floats."""
    if array.dtype.name in ("float16", "bfloat16"):
        return [array.view(np.uint16), MPI.UINT16_T]
    return [array, MPI.Datatype.fromcode(array.dtype.char)]


@functools.cache
def sum_of(dtype: np.dtype[Any]) -> Any:
    """MPI.SUM, or for 16-bit floats an operation around ringtrain's own kernels, so that MPI sums them as fast."""
    function = _core.mpi_sum(_core.DTYPES[dtype.name])
    if function == 0:
        return MPI.SUM
    handle = ctypes.c_uint32() if MPI._sizeof(MPI.Op) == 4 else ctypes.c_uint64()
    library = ctypes.CDLL(libmpi.loaded_library())
    is_commutative = 1
    code = library.MPI_Op_create(ctypes.c_void_p(function), is_commutative, ctypes.byref(handle))
    if code != MPI.SUCCESS:
        raise MPI.Exception(code)
    return MPI.Op.fromhandle(handle.value)
