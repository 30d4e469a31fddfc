"""What a rank can see by itself of an operation's arguments, for all libraries of arrays alike."""

from __future__ import annotations

from typing import Any

from ringtrain._core import ReduceOp
from ringtrain.failure.ranks_in_words import ranges_of
from ringtrain.process_sets import ProcessSet

_FOR_COMPLEX = (ReduceOp.Sum, ReduceOp.Average)


def require_usable(process_set: ProcessSet, name: str | None, title: str) -> int:
    """The number of the process set.

    Args:
        name: of the operation.
        title: of the operation, for messages.

    Raises:
        ValueError: the process set is not registered, or the name is one of ringtrain's own.
    """
    if process_set.process_set_id is None:
        raise ValueError(f"{title}: {process_set} is not registered; see add_process_set")
    if name and name.startswith("<"):
        raise ValueError(f'{title}: names that begin with "<" are for ringtrain itself')
    return process_set.process_set_id


def require_root(root: int, process_set: ProcessSet, title: str) -> None:
    """Raises ValueError unless the rank `root` is in the process set."""
    ranks = process_set.ranks or []
    if root not in ranks:
        raise ValueError(f"{title}: root_rank {root} is not one of the ranks {ranges_of(ranks)}")


def require_reducible(op: ReduceOp, dtype: str, shown: Any, title: str) -> None:
    """Raises ValueError where numbers of this dtype have no such reduction.

    Args:
        dtype: by the name that NumPy has for it; `shown` is how its library writes it.
    """
    if dtype.startswith("complex"):
        if op not in _FOR_COMPLEX:
            raise ValueError(
                f"{title}: op={op.name} is for real numbers, not for {shown}; use op=Sum or Average, or send the real "
                "and the imaginary parts"
            )
    elif "float" not in dtype and not have(op, dtype == "bool"):
        takes = "floats" if op is ReduceOp.Adasum else "numbers"
        raise ValueError(f"{title}: {op.name} is for {takes}, not for {shown}; use op=Sum, or convert to float")


def have(op: ReduceOp, is_bool: bool) -> bool:
    """Whether integers, or bool, have this reduction. Their average is truncated towards zero, as in Horovod."""
    return op is not ReduceOp.Adasum and (op is not ReduceOp.Average or not is_bool)
