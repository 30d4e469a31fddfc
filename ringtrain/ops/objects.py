"""Broadcast and gather what is more than one array: Python objects and trees of parameters.

After Horovod's functions of the same names (horovod/torch/functions.py, horovod/tensorflow/functions.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

import ringtrain.ops as ops
import ringtrain.pickling as pickling
from ringtrain.arrays.adapter import adapter_for
from ringtrain.engine.handles import wait_for_all
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.job.session import rank as own_rank


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a picklable object from one rank to all ranks of a process set. Lambdas and local classes need cloudpickle.

    Args:
        obj: the object to send; looked at only on root_rank.
        root_rank: the sender, as a rank of the world.
        session: ignored; here so that Horovod calls run unchanged.
        name: the same on all ranks; needed only when threads of one process broadcast at the same time.
        process_set: the ranks that take part.

    Returns:
        On root_rank obj itself, elsewhere an equal object.

    Raises:
        RuntimeError: root_rank could not pickle its object (there, the pickling error itself is raised).

    Examples:
        >>> settings = {"learning_rate": 0.1} if hvd.rank() == 0 else None
        >>> hvd.broadcast_object(settings)
        {'learning_rate': 0.1}
    """
    if own_rank() == root_rank:
        _send_object(obj, root_rank, name, process_set)
        return obj
    return _receive_object(root_rank, name, process_set)


_NOT_PICKLED = -1


def _send_object(obj: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> None:
    try:
        content = np.frombuffer(bytearray(pickling.dumps(obj)), dtype=np.uint8)
    except Exception:
        ops.broadcast(np.array([_NOT_PICKLED]), root_rank, name=part_of(name, "length"), process_set=process_set)
        raise
    ops.broadcast(np.array([content.size]), root_rank, name=part_of(name, "length"), process_set=process_set)
    ops.broadcast_(content, root_rank, name=part_of(name, "content"), process_set=process_set)


def _receive_object(root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
    unknown = np.array([0])
    length = int(ops.broadcast(unknown, root_rank, name=part_of(name, "length"), process_set=process_set)[0])
    if length == _NOT_PICKLED:
        raise RuntimeError(f"broadcast_object: rank {root_rank} could not pickle its object; its own error says why")
    content = np.empty(length, dtype=np.uint8)
    ops.broadcast_(content, root_rank, name=part_of(name, "content"), process_set=process_set)
    return pickle.loads(content.data)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function of one object that broadcasts it; the arguments are those of `broadcast_object`."""

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Collect one picklable object of every rank on every rank.

    Args:
        obj: this rank's object; may be of another type and size on each rank.
        session: ignored; here so that Horovod calls run unchanged.
        name: the same on all ranks; needed only when threads of one process gather at the same time.
        process_set: the ranks that take part.

    Returns:
        The objects in the order of the ranks; this rank's own one is a copy too.

    Raises:
        RuntimeError: some ranks, which it names, could not pickle their object; raised on all ranks.

    Examples:
        >>> hvd.allgather_object({"rank": hvd.rank()})  # on two ranks
        [{'rank': 0}, {'rank': 1}]
    """
    pickling_error = None
    try:
        content = np.frombuffer(pickling.dumps(obj), dtype=np.uint8)
    except Exception as error:
        # The other ranks wait for this one. No pickle is empty, so an empty one can tell them.
        content, pickling_error = np.empty(0, dtype=np.uint8), error
    lengths = ops.allgather(np.array([content.size]), name=part_of(name, "length"), process_set=process_set)
    contents = ops.allgather(content, name=part_of(name, "content"), process_set=process_set)
    failed = [rank for rank, length in zip(process_set.ranks or [], lengths, strict=True) if length == 0]
    if failed:
        message = f"allgather_object: ranks {failed} could not pickle their object"
        raise RuntimeError(message) from pickling_error
    ends = np.cumsum(lengths)
    return [pickle.loads(contents[end - length : end].data) for length, end in zip(lengths, ends, strict=True)]


def part_of(name: str | None, part: str) -> str | None:
    """The name of one of the operations that a named call is made of."""
    # Unnamed, every op is numbered by ops. The type of obj would be no name: it may differ between the ranks.
    return None if name is None else f"{name}.{part}"


def broadcast_parameters(
    params: Any,
    root_rank: int = 0,
    prefix: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite the parameters of every rank with those of one rank, in place.

    Call it after building or loading a model, so that all ranks start from the same one. One operation carries
    all arrays, after a comparison of their names, dtypes and shapes.

    Args:
        params: arrays in a dict, list or tuple, nested as you like, or a list of (name, array) pairs, or an iterator
            over either. Dtypes and shapes as on root_rank; 0-d arrays too.
        root_rank: the rank of the world that has the right values.
        prefix: put before all names; needed only when threads of one process broadcast at the same time.
        process_set: the ranks that take part.

    Raises:
        TypeError: something in params is not an array that can be overwritten; the message says where it is.
        ValueError: two arrays have the same path, such as those of the keys 1 and "1".
        MismatchError: the ranks have different dtypes or shapes under one name.

    Examples:
        >>> weights = {"layer": np.full(2, float(hvd.rank()))}
        >>> hvd.broadcast_parameters(weights, root_rank=1)
        >>> weights["layer"].tolist()
        [1.0, 1.0]
    """
    arrays = by_path(params, "broadcast_parameters")
    for path, array in arrays.items():
        _check_is_overwritable(array, path)
    name = prefix or "parameters"
    named = {f"{name}.{path}" if path else name: array for path, array in arrays.items()}
    broadcast_arrays(named, root_rank, name, process_set)


def broadcast_arrays(arrays: Mapping[str, Any], root_rank: int, name: str, process_set: ProcessSet) -> None:
    """Overwrite arrays of every rank with those of one rank.

    If all ranks have the same names, dtypes and shapes, one operation carries all arrays of host memory, and one those
    of a GPU. Otherwise each array is an operation of its own name, so that errors say which one is different.

    Args:
        arrays: by their full names, in any order.
        root_rank: the rank of the world that has the right values.
        name: of the operation that carries them together.
        process_set: the ranks that take part.

    Raises:
        TypeError, ValueError: as `ringtrain.ops.broadcast_`.
        RingtrainError: the first failure, after all operations have ended.
    """
    by_device: dict[int, dict[str, Any]] = {}
    for key in sorted(arrays):
        array = arrays[key]
        by_device.setdefault(adapter_for(array).device(array), {})[key] = array
    in_order = sorted(by_device.items())  # host memory is -1; a GPU may have another number on another rank
    kinds = [(device < 0, _kinds_of(group)) for device, group in in_order]
    if _is_same_on_all_ranks(kinds, root_rank, name, process_set):
        handles = [
            ops.grouped_broadcast_async_(
                list(group.values()), root_rank, name=f"{name}.<{number}>" if number else name, process_set=process_set
            )
            for number, (_, group) in enumerate(in_order)
        ]
    else:
        handles = [
            ops.broadcast_async_(array, root_rank, name=key, process_set=process_set) for key, array in arrays.items()
        ]
    wait_for_all(handles)


def _kinds_of(arrays: Mapping[str, Any]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each array."""
    dtypes: dict[Any, str] = {}  # the name of a dtype of NumPy takes 2 us
    kinds = []
    for key, array in arrays.items():
        dtype = dtypes.get(array.dtype)
        if dtype is None:
            dtype = dtypes[array.dtype] = adapter_for(array).dtype_name(array)
        kinds.append((key, dtype, tuple(array.shape)))
    return kinds


def _is_same_on_all_ranks(description: Any, root_rank: int, name: str, process_set: ProcessSet) -> bool:
    """Returns whether all ranks broadcast the same from the same root; they call it together.

    False on a rank that cannot take part, and where a rank has joined: a broadcast raises the error for that.
    """
    is_usable = isinstance(process_set, ProcessSet) and process_set.size() and process_set.included()
    ranks = process_set.ranks if is_usable else None
    if not ranks or root_rank not in ranks:
        return False
    if len(ranks) == 1:
        return True
    digests = np.zeros(len(ranks), np.int64)
    digests[process_set.rank()] = own = short_digest(repr((description, ranks.index(root_rank))).encode())
    ops.allreduce_(digests, op=ops.Sum, name=f"{name}.<kinds>", process_set=process_set)
    return bool((digests == own).all())


def short_digest(content: bytes) -> int:
    """A positive number of 62 bits: joined ranks have 0, and the sum of one such number with zeros is itself."""
    import hashlib  # slow, and few ranks need it

    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 2 or 1


def by_path(params: Any, caller: str) -> dict[str, Any]:
    """Return the arrays of a tree by their paths, such as "encoder.0.weight". Errors begin with the caller's name."""
    arrays: dict[str, Any] = {}
    for path, array in _leaves(params, ""):
        if path in arrays:
            raise ValueError(f'{caller}: two parameters have the path "{path}"')
        if not _is_array(array):
            raise _not_an_array(array, path, caller)
        arrays[path] = array
    return arrays


def _not_an_array(thing: Any, path: str, caller: str) -> TypeError:
    kind = type(thing).__name__
    if hasattr(thing, "param_groups"):
        remedy = "of an optimizer send the state, by broadcast_optimizer_state(optimizer, root_rank)"
    elif hasattr(thing, "state_dict"):
        remedy = f"write {caller}(model.state_dict(), ...)"
    elif getattr(thing, "__name__", "") in ("state_dict", "parameters", "named_parameters"):
        remedy = f"call it, as in {caller}(model.{thing.__name__}(), ...)"
    elif path:
        remedy = "put a number into a 0-d array, or send the whole object with broadcast_object"
    else:
        remedy = "it takes arrays in a dict, list or tuple, such as model.state_dict()"
    what = f'params["{path}"] is {kind}, not an array' if path else f"this is {kind}, not arrays"
    return TypeError(f"{caller}: {what}; {remedy}")


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Iterator):
        tree = list(tree)
    if isinstance(tree, Mapping):
        children = list(tree.items())
    elif isinstance(tree, (list, tuple)):
        children = list(tree) if _is_named_pairs(tree) else list(enumerate(tree))
    else:
        yield path, tree
        return
    for key, child in children:
        yield from _leaves(child, f"{path}.{key}" if path else str(key))


def _is_named_pairs(items: list[Any] | tuple[Any, ...]) -> bool:
    return all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in items)


def _is_array(array: Any) -> bool:
    return hasattr(array, "dtype") and hasattr(array, "shape") and not isinstance(array, np.generic)


def _check_is_overwritable(array: Any, path: str) -> None:
    if not getattr(getattr(array, "flags", None), "writeable", True):
        raise TypeError(f'broadcast_parameters: params["{path}"] is a read-only array; pass a copy that can be written')
