"""The names of `ringtrain.torch` in Horovod's module, `horovod.torch.mpi_ops`, such as `Sum`.

The operations of `ringtrain.torch` are differentiable themselves; the classes are for code that calls `apply` of those
that make them so in Horovod, with its arguments in its order.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ringtrain.torch import ops


class HorovodAllreduce:
    """`allreduce`."""

    @staticmethod
    def apply(
        tensor: torch.Tensor,
        average: bool | None,
        name: str | None,
        op: Any,
        prescale_factor: float,
        postscale_factor: float,
        process_set: Any,
    ) -> torch.Tensor:
        how: dict[str, Any] = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
        return ops.allreduce(tensor, average, name, op=op, process_set=process_set, **how)


class HorovodGroupedAllreduce:
    """`grouped_allreduce`; the tensors come last."""

    @staticmethod
    def apply(
        average: bool | None,
        name: str | None,
        op: Any,
        prescale_factor: float,
        postscale_factor: float,
        process_set: Any,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        how: dict[str, Any] = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
        return tuple(ops.grouped_allreduce(tensors, average, name, op=op, process_set=process_set, **how))


class HorovodAllgather:
    """`allgather`."""

    @staticmethod
    def apply(tensor: torch.Tensor, name: str | None, process_set: Any) -> torch.Tensor:
        return ops.allgather(tensor, name, process_set)


class HorovodGroupedAllgather:
    """`grouped_allgather`; the tensors come last."""

    @staticmethod
    def apply(name: str | None, process_set: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(ops.grouped_allgather(tensors, name, process_set))


class HorovodBroadcast:
    """`broadcast`."""

    @staticmethod
    def apply(tensor: torch.Tensor, root_rank: int, name: str | None, process_set: Any) -> torch.Tensor:
        return ops.broadcast(tensor, root_rank, name, process_set)


class HorovodAlltoall:
    """`alltoall`."""

    @staticmethod
    def apply(tensor: torch.Tensor, splits: Any, name: str | None, process_set: Any) -> Any:
        return ops.alltoall(tensor, splits, name, process_set)


class HorovodReducescatter:
    """`reducescatter`."""

    @staticmethod
    def apply(
        tensor: torch.Tensor,
        name: str | None,
        op: Any,
        process_set: Any,
        prescale_factor: float,
        postscale_factor: float,
    ) -> torch.Tensor:
        how: dict[str, Any] = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
        return ops.reducescatter(tensor, name=name, op=op, process_set=process_set, **how)


class HorovodGroupedReducescatter:
    """`grouped_reducescatter`; the tensors come last."""

    @staticmethod
    def apply(
        name: str | None,
        op: Any,
        process_set: Any,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        how: dict[str, Any] = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
        return tuple(ops.grouped_reducescatter(tensors, name=name, op=op, process_set=process_set, **how))


def __getattr__(name: str) -> Any:
    package = importlib.import_module("ringtrain.torch")
    if name == "__all__" or name in package.__all__:
        return getattr(package, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
