"""Checks of an operation's arguments that a rank can make alone, for all array libraries."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

import ringtrain._core as _core
from ringtrain._core import OpKind, ReduceOp
from ringtrain.engine.compression import Compression, PowerSGD, QuantizingCompressor
from ringtrain.engine.process_sets import ProcessSet
from ringtrain.errors import AdasumError, ranges_of

_FOR_COMPLEX = (ReduceOp.Sum, ReduceOp.Average)


def require_usable(process_set: ProcessSet, name: str | None, title: str) -> int:
    """The number of the process set.

    Args:
        name: of the operation.
        title: of the operation, for messages.

    Raises:
        TypeError: the name, or the process set, is something else.
        ValueError: the process set is not registered, or the name is one of ringtrain's own.
    """
    require_process_set(process_set, title)
    if process_set.process_set_id is None:
        raise ValueError(f"{title}: {process_set} is not registered; see add_process_set")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{title}: the name of an operation is a str or None, not {name!r}{as_keyword(name)}")
    if name and name.startswith("<"):
        raise ValueError(f'{title}: names that begin with "<" are for ringtrain itself')
    return process_set.process_set_id


def require_process_set(process_set: Any, title: str) -> None:
    """Raises TypeError for anything but a ProcessSet."""
    if not isinstance(process_set, ProcessSet):
        remedy = "pass what add_process_set returned"
        if isinstance(process_set, (list, tuple, range)):
            remedy = f"call add_process_set({process_set!r}) once on all ranks and pass what it returns"
        raise TypeError(f"{title}: process_set must be a ProcessSet, not {process_set!r}; {remedy}")


def require_root(root: Any, process_set: ProcessSet, title: str) -> int:
    """The rank `root`. Raises TypeError for anything but an integer, ValueError unless it is in the process set."""
    ranks = process_set.ranks or []
    try:
        rank = operator.index(root)
    except TypeError:
        raise TypeError(f"{title}: root_rank must be an integer in {ranges_of(ranks)}, not {root!r}") from None
    if rank not in ranks:
        raise ValueError(f"{title}: root_rank {rank} is not one of the ranks {ranges_of(ranks)}")
    return rank


def require_priority(priority: Any, title: str) -> int:
    """The priority. Raises TypeError for anything but an integer, and ValueError unless it fits into 32 bits."""
    try:
        number = operator.index(priority)
    except TypeError:
        raise TypeError(f"{title}: priority must be an integer, not {priority!r}") from None
    if not is_priority(number):
        raise ValueError(f"{title}: priority must be from -2**31 to 2**31 - 1, not {priority}")
    return number


def is_priority(number: int) -> bool:
    """Whether the core takes it for a priority."""
    return -(1 << 31) <= number < 1 << 31


def require_predivide_factor(factor: Any) -> float:
    """The factor as a float. Raises TypeError for anything but a number, and ValueError unless it is positive."""
    number = require_factor(factor, "gradient_predivide_factor")
    if not number > 0:
        raise ValueError(f"gradient_predivide_factor must be positive, but is {factor}")
    return number


def require_passes(backward_passes_per_step: Any) -> None:
    """Raises TypeError for anything but an integer, and ValueError unless it is at least 1."""
    if not isinstance(backward_passes_per_step, (int, np.integer)):
        raise TypeError(f"backward_passes_per_step must be an integer, not {backward_passes_per_step!r}")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, but is {backward_passes_per_step}")


def require_op(op: Any) -> None:
    """Raises TypeError, with the op to write instead, for anything but a ReduceOp."""
    if not isinstance(op, ReduceOp):
        known = isinstance(op, str) and op.lower() in _OPS_IN_WORDS
        remedy = as_keyword(op) if known else ""
        raise TypeError(f"op must be one of Average, Sum, Min, Max, Product and Adasum, not {op!r}{remedy}")


def require_average(average: Any) -> None:
    """Raises TypeError, with the keyword to write instead, for anything but a bool."""
    if not isinstance(average, (bool, np.bool_)):
        raise TypeError(
            f"average, the second argument, must be True, False or None, not {average!r}{as_keyword(average)}"
        )


def as_keyword(misplaced: Any) -> str:
    """The end of a message about an argument that was passed in the place of another one."""
    if isinstance(misplaced, ReduceOp):
        return f"; write op={misplaced.name}"
    if isinstance(misplaced, ProcessSet):
        return "; write process_set=..."
    if isinstance(misplaced, str) and misplaced.lower() in _OPS_IN_WORDS:
        return f"; write op={_OPS_IN_WORDS[misplaced.lower()].name}"
    return f"; write name={misplaced!r}" if isinstance(misplaced, str) else ""


_OPS_IN_WORDS = {
    **{op.name.lower(): op for op in (ReduceOp.Sum, ReduceOp.Average, ReduceOp.Min, ReduceOp.Max, ReduceOp.Product)},
    "mean": ReduceOp.Average,
    "avg": ReduceOp.Average,
    "adasum": ReduceOp.Adasum,
}


def require_compressor(compression: Any) -> None:
    """Raises TypeError for what does not compress and decompress arrays."""
    if compression is Compression.none or (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        return
    if isinstance(compression, PowerSGD):
        raise TypeError(f"{compression!r} is for a DistributedOptimizer, which keeps its state, not for one operation")
    known = isinstance(compression, str) and compression in ("none", "fp16", "bf16")
    remedy = f"; write compression=Compression.{compression}" if known else ""
    raise TypeError(f"compression must be a Compressor, such as Compression.fp16, not {compression!r}{remedy}")


def require_factor(factor: Any, title: str) -> float:
    """The factor as a float. Raises TypeError for anything but a number, ValueError for one that is out of range."""
    try:
        if not isinstance(factor, (str, bytes)):
            return float(factor)
    except OverflowError:
        raise ValueError(f"{title} must be a number that a float can hold") from None
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{title} must be a number, not {factor!r}")


def require_weight(weight: Any, op: ReduceOp, title: str) -> float:
    """The weight as a float. Raises as `require_factor`; ValueError unless it is finite, not negative and for Average.

    Args:
        op: of the operation, or of all operations of an optimizer.
        title: of either, for messages.
    """
    if op is not ReduceOp.Average:
        raise ValueError(f"{title}: weight is for op=Average, not for op={op.name}; leave it out")
    number = require_factor(weight, f"{title}: weight")
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(
            f"{title}: weight must be a finite number that is not negative, not {weight}; give the number of samples "
            "of this rank"
        )
    return number


def require_weighable(dtype: str, shown: Any, title: str) -> None:
    """Raises ValueError unless numbers of this dtype have an average by weight. Arguments: as `require_reducible`."""
    if "float" not in dtype and not dtype.startswith("complex"):
        raise ValueError(f"{title}: weight is for floats, not for {shown}; convert to float")


def require_reducible(op: ReduceOp, dtype: str, shown: Any, title: str) -> None:
    """Raises ValueError where numbers of this dtype have no such reduction; of Adasum an AdasumError, which is one.

    Args:
        dtype: by the name that NumPy has for it; `shown` is how its library writes it.
    """
    if dtype.startswith("complex"):
        if op not in _FOR_COMPLEX:
            kind: type[ValueError] = AdasumError if op is ReduceOp.Adasum else ValueError
            raise kind(
                f"{title}: op={op.name} is for real numbers, not for {shown}; use op=Sum or Average, or send the real "
                "and the imaginary parts"
            )
    elif "float" not in dtype and not have(op, dtype == "bool"):
        if op is ReduceOp.Adasum:
            raise AdasumError(f"{title}: Adasum is for floats, not for {shown}; use op=Sum, or convert to float")
        raise ValueError(f"{title}: {op.name} is for numbers, not for {shown}; use op=Sum, or convert to float")


def require_scatterable(op: ReduceOp, dimensions: int, title: str) -> None:
    """Raises ValueError where a reducescatter has no such reduction, or the array has no rows."""
    if op is ReduceOp.Adasum:
        raise AdasumError(
            f"{title}: reducescatter does not support Adasum; use allreduce and take the rows of this rank"
        )
    if dimensions == 0:
        raise ValueError(f"{title}: cannot scatter a 0-d tensor; it has no first dimension")


def have(op: ReduceOp, is_bool: bool) -> bool:
    """Whether integers, or bool, have this reduction. Their average is truncated towards zero, as in Horovod."""
    return op is not ReduceOp.Adasum and (op is not ReduceOp.Average or not is_bool)


def require_quantizable(
    quantization: QuantizingCompressor,
    kind: OpKind,
    op: ReduceOp,
    name: str | None,
    dtypes: Sequence[str],
    process_set: ProcessSet,
) -> None:
    """Raises ValueError where an operation cannot travel in codes between the hosts.

    Args:
        dtypes: of its tensors, by the names that NumPy has for them.
    """
    # Every host adds up the codes of all the others, which with more hosts takes as long as sums in full.
    most_hosts = 16
    title = kind.name.lower()
    what = f'{title} "{name}": {quantization!r}' if name else f"{title}: {quantization!r}"
    if kind != OpKind.ALLREDUCE:
        raise ValueError(f"{what} is for allreduce; use Compression.fp16")
    if op not in _FOR_COMPLEX:
        raise ValueError(f"{what} is for op=Sum and op=Average, not for op={op.name}")
    if not name:
        raise ValueError(f"{what} needs a name, under which it keeps what it leaves out: give one")
    for dtype in dtypes:
        if dtype != "float32":
            raise ValueError(f"{what} is for float32, not for {dtype}; use Compression.fp16 or none for this tensor")
    hosts = _core.node_count(process_set.ranks or [])
    if hosts == 1 and not quantization.is_forced:
        raise ValueError(
            f"{what} sends codes between hosts, but all ranks of the process set are on one, where it would take time "
            "and change values for nothing; use Compression.none, or give force=True to try it"
        )
    if hosts > most_hosts:
        raise ValueError(
            f"{what} is for {most_hosts} hosts at most, not {hosts}: each adds up the codes of all; "
            "use Compression.fp16"
        )
