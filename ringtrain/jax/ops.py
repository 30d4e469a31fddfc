"""The operations on JAX arrays and pytrees of them, inside and outside of jit, with derivatives and vmap.

Common to all: `x` is an array or a pytree of arrays, whose operations are on their way together. The ranks match them
by `name` and the path of each array in the tree, such as "gradients.encoder.0.weight", and need not have them in the
same order. Without a name they are matched by the line of the script and their order there: within the program that is
compiled, or outside of jit within the job.

Outside of jit an operation is carried out before the call returns. Inside jit it is part of the compiled program; what
goes wrong then is a jax.errors.JaxRuntimeError, or a ValueError if JAX raises it from the call itself; `errors` makes
the exceptions of ringtrain of both.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

import ringtrain._core as _core
from ringtrain import ops
from ringtrain._core import OpKind, ReduceOp
from ringtrain.engine.compression import AnyCompressor, Compression, QuantizingCompressor
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.engine.requirements import (
    as_keyword,
    require_compressor,
    require_factor,
    require_priority,
    require_quantizable,
    require_reducible,
    require_root,
    require_scatterable,
    require_usable,
    require_weighable,
    require_weight,
)
from ringtrain.failure import call_place
from ringtrain.jax.messages import sendrecv
from ringtrain.jax.primitives import (
    How,
    Names,
    allgather_p,
    allreduce_p,
    alltoall_p,
    barrier_p,
    broadcast_p,
    reducescatter_p,
)
from ringtrain.jax.trees import Carried, Tree, carried, is_key
from ringtrain.ops import Average, Sum

Arrays = TypeVar("Arrays")


def allreduce(
    x: Arrays,
    op: ReduceOp | None = None,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: AnyCompressor = Compression.none,
    priority: int = 0,
    weight: Any = None,
) -> Arrays:
    """Reduce an array, or each array of a pytree, over the ranks.

    Differentiable for Sum and Average: the gradient is reduced in the same way.

    Args:
        x: the same shapes and dtypes on all ranks.
        op: Average (the default; not for bool), Sum, Min, Max, Product or Adasum.
        name: what the ranks match it by.
        prescale_factor: multiplies the arrays before the reduction.
        postscale_factor: multiplies the results. Integers are truncated.
        process_set: the ranks that take part, all of which call it.
        compression: how the arrays travel: Compression.fp16, bf16, or a Compressor whose functions JAX can trace;
            two_bit and one_bit, of float32 with a name, under which the core keeps what the codes leave out. Then the
            gradient of the operation travels in full.
        priority: what is ready at the same time is done in descending order of it; of a pytree the first leaf has it,
            and each one after it one less.
        weight: of this rank in an average of floats, such as its number of samples; a number, or an array of shape ()
            that inside jit changes from call to call. As for `ringtrain.allreduce`, but inside jit a weight that is
            negative, NaN or infinite is a MismatchError on all ranks. Not differentiated.

    Returns:
        A pytree as x, bit for bit the same on all ranks.

    Raises:
        NotInitializedError: before init().
        ValueError: this rank is not in the process set, or an argument is out of its range.
        TypeError: of an object or a dtype that cannot be sent.
        RingtrainError: outside of jit: the ranks disagree (MismatchError), or one is lost, fails or does not come.
    """
    tree = Tree.of(x)
    op = _op_of(op, "allreduce")
    first = require_priority(priority, "allreduce")
    quantization = compression if isinstance(compression, QuantizingCompressor) else None
    require_compressor(compression)
    how = How(
        _checked(process_set, name, "allreduce"),
        op,
        require_factor(prescale_factor, "prescale_factor"),
        require_factor(postscale_factor, "postscale_factor"),
        priorities=tuple(first - place for place in range(len(tree.leaves))),
        quantization=quantization,
        is_weighted=weight is not None,
    )
    title = f"allreduce with op={op.name}"
    leaves = [carried(leaf, title, op is Sum) for leaf in tree.leaves]
    for leaf in leaves:
        require_reducible(op, leaf.array.dtype.name, leaf.array.dtype, title)
        if weight is not None:
            require_weighable(leaf.array.dtype.name, leaf.array.dtype, title)
    for leaf, path in zip(leaves, tree.paths, strict=True):
        if quantization is not None:
            part = None if name is None else name + path
            require_quantizable(quantization, OpKind.ALLREDUCE, op, part, [leaf.array.dtype.name], process_set)
    compressed = [compression.compress(leaf.array) for leaf in leaves]
    operands = [array for array, _ in compressed]
    if weight is not None:
        operands.append(_checked_weight(weight, op, title))
    results = allreduce_p.bind(*operands, names=_names(name, tree), how=how) if leaves else []
    whole = [
        leaf.back(compression.decompress(result, context))
        for leaf, result, (_, context) in zip(leaves, results, compressed, strict=True)
    ]
    return _as(x, tree.with_leaves(whole))


def grouped_allreduce(
    tensors: Sequence[Any],
    op: ReduceOp | None = None,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: AnyCompressor = Compression.none,
    priority: int = 0,
    weight: Any = None,
) -> list[Any]:
    """`allreduce` of a list, under Horovod's name."""
    factors = (prescale_factor, postscale_factor)
    return allreduce(
        *(list(tensors), op, name, *factors, process_set), compression=compression, priority=priority, weight=weight
    )


def _checked_weight(weight: Any, op: ReduceOp, title: str) -> jax.Array:
    """One float. Raises as `require_weight`; of a traced weight only the shape and the op are known."""
    if not isinstance(weight, jax.core.Tracer):
        weight = require_weight(weight, op, title)
    elif op is not Average:
        require_weight(0, op, title)
    array = jnp.asarray(weight)
    if array.shape:
        raise ValueError(f"{title}: weight must have the shape (), not {array.shape}")
    return jax.lax.stop_gradient(array.astype(jnp.float64 if array.dtype == jnp.float64 else jnp.float32))


def reducescatter(
    x: Arrays,
    op: ReduceOp | None = None,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    weight: Any = None,
) -> Arrays:
    """Reduce arrays over the ranks and give each rank some of the rows.

    Differentiable for Sum and Average: the gradients of the rows are gathered.

    Args:
        x: the same shapes and dtypes on all ranks, at least 1-d. Inside jit the number of ranks divides the first
            dimension; outside the first ranks get one row more.
        op, name, prescale_factor, postscale_factor, process_set, weight: as for `allreduce`, without Adasum.

    Raises:
        ValueError: inside jit, the rows cannot be split evenly; and as `allreduce`.
    """
    tree = Tree.of(x)
    op = _op_of(op, "reducescatter")
    factors = (
        require_factor(prescale_factor, "prescale_factor"),
        require_factor(postscale_factor, "postscale_factor"),
    )
    how = How(_checked(process_set, name, "reducescatter"), op, *factors, is_weighted=weight is not None)
    leaves = [carried(leaf, "reducescatter", op is Sum) for leaf in tree.leaves]
    for leaf in leaves:
        require_reducible(op, leaf.array.dtype.name, leaf.array.dtype, "reducescatter")
        if weight is not None:
            require_weighable(leaf.array.dtype.name, leaf.array.dtype, "reducescatter")
        require_scatterable(op, leaf.ndim, "reducescatter")
        if _is_traced(leaf) and leaf.array.shape[0] % how.size:
            raise ValueError(
                f"reducescatter: inside jit {leaf.array.shape[0]} rows cannot be split over {how.size} ranks: the "
                "program is the same on all of them. Pad the array, or call it outside of jit"
            )
    weights = [] if weight is None else [_checked_weight(weight, op, "reducescatter")]
    return _as(x, _bound(reducescatter_p, tree, leaves, name, how, weights))


def allgather(x: Arrays, name: str | None = None, process_set: ProcessSet = global_process_set) -> Arrays:
    """Concatenate the arrays of all ranks along the first dimension, on every rank.

    Differentiable where all ranks have as many rows: each rank gets the average of the gradients of its own rows.

    Args:
        x: the same dtypes and shapes on all ranks; outside of jit the first dimensions may differ. A number is a row.
        name, process_set: as for `allreduce`.
    """
    tree = Tree.of(x)
    how = How(_checked(process_set, name, "allgather"))
    leaves = [carried(_with_rows(leaf), "allgather", True, is_moved=True) for leaf in tree.leaves]
    return _as(x, _bound(allgather_p, tree, leaves, name, how))


def broadcast(
    x: Arrays, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Arrays:
    """Give all ranks the arrays of one of them.

    Differentiable: the average of the gradients goes to the root, zeros to the others.

    Args:
        x: the same shapes and dtypes on all ranks; keys of a random generator, too.
        root_rank: whose values all get; a rank of the job, also for a process set.
        name, process_set: as for `allreduce`.

    Raises:
        ValueError: root_rank is not in the process set; and as `allreduce`.
    """
    tree = Tree.of(x)
    checked = _checked(process_set, name, "broadcast")
    how = How(checked, root=require_root(root_rank, checked, "broadcast"))
    leaves = [carried(leaf, "broadcast", True, is_moved=True) for leaf in tree.leaves]
    return _as(x, _bound(broadcast_p, tree, leaves, name, how))


def alltoall(
    x: Any,
    splits: Sequence[int] | Any = None,
    received_splits: Sequence[int] | Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    capacity: int | None = None,
) -> Any:
    """Send some rows to each rank and receive some from each.

    Differentiable: the gradients travel back.

    Args:
        x: arrays of the same dtypes on all ranks, and the same shapes but for the first dimension.
        splits: how many rows go to each rank; as many to each if None.
        received_splits: how many come from each. Inside jit they are given if `splits` are, as numbers that do not
            depend on traced values; outside they are not needed.
        name, process_set: as for `allreduce`.
        capacity: how many rows may go from one rank to another, the same on all ranks. Then `splits` may be traced, and
            `received_splits` are not given. So many rows travel between each two ranks, the last ones zeros.

    Returns:
        The rows that came, by the order of the ranks; a pair of them and `received_splits` where `splits` are given.
        With a capacity there are as many rows as could have come, with zeros behind those that came; rows beyond the
        capacity stay away, and inside jit `received_splits` alone tells.

    Raises:
        ValueError: splits that do not add up, or are above the capacity; inside jit the one without the other.
    """
    tree = Tree.of(x)
    checked = _checked(process_set, name, "alltoall")
    leaves = [carried(_with_rows(leaf), "alltoall", True, is_moved=True) for leaf in tree.leaves]
    if capacity is not None:
        return _padded_alltoall(tree, leaves, splits, received_splits, operator.index(capacity), name, checked)
    if splits is not None and received_splits is None:
        return _alltoall_at_once(tree, leaves, splits, name, checked)
    if splits is None and received_splits is not None:
        raise ValueError("alltoall: received_splits need splits beside them")
    size = checked.size() or 1
    rows = leaves[0].array.shape[0] if leaves else 0
    sent = _even(rows, size) if splits is None else _numbers(splits, size)
    received = sent if splits is None else _numbers(received_splits, size)
    for leaf in leaves:
        if leaf.array.shape[0] != sum(sent):
            raise ValueError(
                f"alltoall: splits {list(sent)} do not add up to the {leaf.array.shape[0]} rows of an array"
            )
    result = _bound(alltoall_p, tree, leaves, name, How(checked, sent=sent, received=received))
    return result if splits is None else (result, np.array(received, np.int32))


def gather(x: Arrays, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Arrays:
    """Concatenate the arrays of all ranks along the first dimension, on one rank.

    Differentiable: each rank gets the gradient of its own rows from the root.

    Args:
        x: the same dtypes and shapes on all ranks. A number is a row.
        root_rank: that gets them; a rank of the job, also for a process set.
        name, process_set: as for `allreduce`.

    Returns:
        On the root the rows by the order of the ranks; on the other ranks arrays without rows, so that all ranks can
        run the same program.

    Raises:
        ValueError: root_rank is not in the process set; and as `allreduce`.
    """
    checked, place = _checked_root(process_set, name, root_rank, "gather")

    def splits(rows: int, size: int, is_root: bool) -> tuple[list[int], list[int]]:
        return [rows * (rank == place) for rank in range(size)], [rows * is_root] * size

    return _as(x, _by_root(x, name, checked, place, "gather", splits))


def scatter(x: Arrays, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Arrays:
    """Give each rank some of the rows of one rank, as many to each.

    Differentiable: the root gets the gradients of all rows; the other ranks get zeros.

    Args:
        x: the same dtypes and shapes on all ranks; only the values of the root matter. The number of ranks divides the
            first dimension.
        root_rank: whose rows they are; a rank of the job, also for a process set.
        name, process_set: as for `allreduce`.

    Raises:
        ValueError: the rows cannot be split evenly, or root_rank is not in the process set; and as `allreduce`.
    """
    checked, place = _checked_root(process_set, name, root_rank, "scatter")

    def splits(rows: int, size: int, is_root: bool) -> tuple[list[int], list[int]]:
        if rows % size:
            raise ValueError(f"scatter: {rows} rows cannot be split evenly over {size} ranks")
        return [rows // size * is_root] * size, [rows // size * (rank == place) for rank in range(size)]

    return _as(x, _by_root(x, name, checked, place, "scatter", splits))


def reduce(
    x: Arrays,
    root_rank: int,
    op: ReduceOp | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Arrays:
    """Reduce arrays over the ranks, for one rank. It takes as long as `allreduce`.

    Differentiable for Sum and Average: all ranks get the gradient of the root.

    Args:
        x, op, name, process_set: as for `allreduce`.
        root_rank: that gets the results; a rank of the job, also for a process set.

    Returns:
        On the root the results, on the other ranks x itself.

    Raises:
        ValueError: root_rank is not in the process set; and as `allreduce`.
    """
    checked, place = _checked_root(process_set, name, root_rank, "reduce")
    reduced = allreduce(x, op, name, process_set=checked)
    is_root = jnp.full((), checked.rank() == place)  # a choice that JAX does not see through, as for a broadcast
    return _as(x, jax.tree_util.tree_map(lambda result, own: jnp.where(is_root, result, own), reduced, x))


_COMBINED = {
    ReduceOp.Sum: jnp.add,
    ReduceOp.Product: jnp.multiply,
    ReduceOp.Min: jnp.minimum,
    ReduceOp.Max: jnp.maximum,
}


def scan(x: Arrays, op: ReduceOp = Sum, process_set: ProcessSet = global_process_set) -> Arrays:
    """Reduce the arrays of all ranks up to this one and its own, such as to a prefix sum over the ranks.

    Differentiable for every op. All ranks call it in the same order, as messages carry it out, with tag 0: log2 of the
    number of ranks one after the other.

    Args:
        x: the same shapes and dtypes on all ranks.
        op: Sum, Product, Min or Max. Floats are summed in another order than by one rank after the other.
        process_set: the ranks that take part, by their order there.

    Raises:
        ValueError: another op; and as `send`.
    """
    if _op_of(op, "scan") not in _COMBINED:
        raise ValueError(f"scan: op must be Sum, Product, Min or Max, not {op.name}")
    combine, checked = _COMBINED[op], _checked(process_set, None, "scan")
    ranks, place, distance = checked.ranks or [], checked.rank() or 0, 1
    while distance < len(ranks):
        source = ranks[place - distance] if place >= distance else None
        dest = ranks[place + distance] if place + distance < len(ranks) else None
        before = sendrecv(x, x, source, dest, process_set=checked)
        x = before if source is None else jax.tree_util.tree_map(combine, before, x)
        distance *= 2
    return x


def barrier(process_set: ProcessSet = global_process_set, *, timeout_s: float | None = None) -> None:
    """Wait until all ranks have come here. Outside of jit; what JAX has been told to compute may go on meanwhile."""
    ops.barrier(process_set, timeout_s=timeout_s)


def barrier_on(x: Arrays, name: str | None = None, process_set: ProcessSet = global_process_set) -> Arrays:
    """The arrays themselves, once all ranks have theirs: a barrier that has a place in a compiled program."""
    tree = Tree.of(x)
    how = How(_checked(process_set, name, "barrier_on"))
    leaves = [jax.numpy.asarray(leaf) for leaf in tree.leaves]
    if not leaves:
        raise ValueError("barrier_on: there is no array that could wait; give one")
    return _as(x, tree.with_leaves(barrier_p.bind(*leaves, names=_names(name, tree), how=how)))


def _bound(
    primitive: Primitive,
    tree: Tree,
    leaves: Sequence[Carried],
    name: str | None,
    how: How,
    weight: Sequence[jax.Array] = (),
) -> Any:
    if not leaves:
        return tree.with_leaves([])
    results = primitive.bind(*(leaf.array for leaf in leaves), *weight, names=_names(name, tree), how=how)
    return tree.with_leaves([leaf.back(result) for leaf, result in zip(leaves, results, strict=True)])


_Splits = Callable[[int, int, bool], tuple[list[int], list[int]]]


def _by_root(x: Any, name: str | None, process_set: ProcessSet, root: int, title: str, splits: _Splits) -> Any:
    """An alltoall in which only the rows to or from the root move. `splits`: those sent and received, of so many."""
    tree = Tree.of(x)
    size, is_root = process_set.size() or 1, process_set.rank() == root
    results = []
    for leaf, path in zip(tree.leaves, tree.paths, strict=True):
        one = carried(_with_rows(leaf), title, True, is_moved=True)
        sent, received = splits(one.array.shape[0], size, is_root)
        how = How(process_set, sent=tuple(sent), received=tuple(received))
        names = Names(name, call_place(), (path,))
        (result,) = alltoall_p.bind(one.array[: sum(sent)], names=names, how=how)
        results.append(one.back(result))
    return tree.with_leaves(results)


def _checked_root(process_set: ProcessSet, name: str | None, root_rank: Any, title: str) -> tuple[ProcessSet, int]:
    """The process set, and the place of the root in it."""
    checked = _checked(process_set, name, title)
    return checked, (checked.ranks or []).index(require_root(root_rank, checked, title))


def _names(name: str | None, tree: Tree) -> Names:
    return Names(name, call_place(), tree.paths)


def _as(given: Arrays, result: Any) -> Arrays:
    """The type for type checkers: a pytree of the same structure."""
    whole: Arrays = result
    return whole


def _checked(process_set: ProcessSet, name: str | None, title: str) -> ProcessSet:
    _core.require_initialized()
    require_usable(process_set, name, title if name is None else f'{title} "{name}"')
    if not process_set.included():
        raise ValueError(f"{title}: this rank does not belong to {process_set}")
    return process_set


def _op_of(op: ReduceOp | None, title: str) -> ReduceOp:
    """Average where there is none. Raises TypeError for anything else, such as Horovod's `average`."""
    if op is None:
        return Average
    if isinstance(op, ReduceOp):
        return op
    remedy = f"; write op={'Average' if op else 'Sum'}" if isinstance(op, bool) else as_keyword(op)
    raise TypeError(
        f"{title}: op, the second argument, must be one of Average, Sum, Min, Max, Product and Adasum, "
        f"not {op!r}{remedy}"
    )


def _with_rows(leaf: Any) -> Any:
    """A number, or a key of a random generator, as a row."""
    is_number = isinstance(leaf, (bool, int, float, complex)) or (hasattr(leaf, "dtype") and np.ndim(leaf) == 0)
    return leaf if not is_number else (leaf if is_key(leaf) else jnp.asarray(leaf)).reshape(1)


def _is_traced(leaf: Carried) -> bool:
    return isinstance(leaf.array, jax.core.Tracer)


def _even(rows: int, size: int) -> tuple[int, ...]:
    if rows % size:
        raise ValueError(f"alltoall: {rows} rows cannot be split evenly over {size} ranks; give splits")
    return (rows // size,) * size


def _numbers(splits: Any, size: int) -> tuple[int, ...]:
    if isinstance(splits, jax.core.Tracer):
        raise ValueError("alltoall: inside jit splits must be numbers that are known when the program is compiled")
    numbers = tuple(int(number) for number in np.asarray(splits))
    if len(numbers) != size or min(numbers) < 0:
        raise ValueError(f"alltoall: splits must be {size} numbers from 0 on, one for each rank, not {list(numbers)}")
    return numbers


def _padded_alltoall(
    tree: Tree,
    leaves: Sequence[Carried],
    splits: Any,
    received_splits: Any,
    capacity: int,
    name: str | None,
    process_set: ProcessSet,
) -> tuple[Any, Any]:
    size = process_set.size() or 1
    if splits is None or received_splits is not None:
        raise ValueError("alltoall: a capacity needs splits, and no received_splits")
    if capacity < 0:
        raise ValueError(f"alltoall: capacity must be 0 or more, not {capacity}")
    if not isinstance(splits, jax.core.Tracer) and max(sent := _numbers(splits, size)) > capacity:
        raise ValueError(f"alltoall: splits {list(sent)} are above the capacity of {capacity} rows")
    counts = jnp.asarray(splits).astype(jnp.int32)
    if counts.shape != (size,):
        raise ValueError(f"alltoall: splits must be {size} numbers, one for each rank, not {list(counts.shape)}")
    numbers = jnp.arange(capacity, dtype=jnp.int32)
    sent_counts = jnp.minimum(counts, capacity)
    begins = jnp.cumsum(counts) - counts
    is_sent = numbers < sent_counts[:, None]  # of each rank and each of its places
    how = How(process_set, sent=(1,) * size, received=(1,) * size)
    (received,) = alltoall_p.bind(sent_counts, names=Names(name, call_place(), (".splits",)), how=how)
    first_those_that_came = jnp.argsort((numbers >= received[:, None]).reshape(-1), stable=True)
    how = how._replace(sent=(capacity,) * size, received=(capacity,) * size)
    results = []
    for leaf, path in zip(leaves, tree.paths, strict=True):
        rows = leaf.array.shape[0]
        source = jnp.where(is_sent, begins[:, None] + numbers, rows).reshape(-1)  # behind the rows there are zeros
        padded = jnp.concatenate([leaf.array, jnp.zeros((1, *leaf.array.shape[1:]), leaf.array.dtype)])
        names = Names(name, call_place(), (path,))
        (came,) = alltoall_p.bind(jnp.take(padded, source, axis=0, mode="clip"), names=names, how=how)
        results.append(leaf.back(jnp.take(came, first_those_that_came, axis=0)))
    return tree.with_leaves(results), received


def _alltoall_at_once(
    tree: Tree, leaves: Sequence[Carried], splits: Any, name: str | None, process_set: ProcessSet
) -> tuple[Any, Any]:
    if isinstance(splits, jax.core.Tracer) or any(_is_traced(leaf) for leaf in leaves):
        raise ValueError(
            "alltoall: inside jit, or under grad, splits need received_splits: how many rows come from each"
        )
    pairs = [
        ops.alltoall(leaf.array, splits, None if name is None else name + path, process_set)
        for leaf, path in zip(leaves, tree.paths, strict=True)
    ]
    rows = [leaf.back(result) for leaf, (result, _) in zip(leaves, pairs, strict=True)]
    return tree.with_leaves(rows), pairs[0][1] if pairs else None
