"""The same state on every rank: of an optimizer, and Python objects.

After Horovod's functions of the same names (horovod/torch/functions.py).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from ringtrain import objects, ops, world
from ringtrain.process_sets import ProcessSet, global_process_set


def broadcast_parameters(
    params: Any, root_rank: int = 0, *, prefix: str | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """As `ringtrain.broadcast_parameters`, with the arguments of `horovod.torch.broadcast_parameters`.

    `params` is such as model.state_dict(), model.named_parameters() or model.parameters().
    """
    objects.broadcast_parameters(params, root_rank, prefix, process_set=process_set)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Any = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give the optimizer of every rank the state and the options of one rank's. Mirrors Horovod's function.

    Works for every optimizer with `state_dict` and `load_state_dict`, also where some ranks have no state yet. All
    tensors travel in one message.

    Args:
        optimizer: of the same class, over the same parameters on all ranks; a distributed one too.
        root_rank: the rank of the world that has the right state.
        model: ignored; here so that Horovod calls run unchanged.
        process_set: the ranks that take part.

    Raises:
        ValueError: the optimizer of root_rank has other parameter groups than this one.
        RuntimeError: root_rank could not pickle an option (there, the pickling error itself is raised).
    """
    if world.rank() != root_rank:
        state = _receive(root_rank, process_set)
        _put_options_in_place(state, optimizer)
        optimizer.load_state_dict(state)
    else:
        _send(optimizer.state_dict(), root_rank, process_set)


class _Pickler(pickle.Pickler):
    """Leaves the tensors out, and collects them."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        self.tensors.append(obj.detach().cpu().contiguous())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Puts the tensors in."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def _put_options_in_place(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Tensors among the options, such as a learning rate on the GPU, go where this rank's own ones are.

    load_state_dict does so for the state of the parameters only.
    """
    for options, own in zip(state["param_groups"], optimizer.param_groups, strict=False):
        for name, value in options.items():
            if torch.is_tensor(value) and torch.is_tensor(own.get(name)):
                options[name] = value.to(own[name].device)


_ALIGNMENT = 16  # bytes; of every tensor in the message
_SMALL = 4096  # bytes


def _send(state: dict[str, Any], root_rank: int, process_set: ProcessSet) -> None:
    skeleton = io.BytesIO()
    pickler = _Pickler(skeleton)
    pickling_error = None
    try:
        pickler.dump(state)
    except Exception as error:
        pickling_error = error
    kinds = [(tensor.dtype, tensor.shape) for tensor in pickler.tensors]
    description = None if pickling_error else (skeleton.getvalue(), kinds)
    objects.broadcast_object(description, root_rank, process_set=process_set)
    if pickling_error is not None:
        raise pickling_error
    content, places = _layout(kinds)
    for tensor, place in zip(pickler.tensors, places, strict=True):
        place.copy_(tensor)
    ops.broadcast_(content, root_rank, process_set=process_set)


def _receive(root_rank: int, process_set: ProcessSet) -> dict[str, Any]:
    description = objects.broadcast_object(None, root_rank, process_set=process_set)
    if description is None:
        raise RuntimeError(f"broadcast_optimizer_state: rank {root_rank} could not pickle its state")
    skeleton, kinds = description
    content, places = _layout(kinds)
    ops.broadcast_(content, root_rank, process_set=process_set)
    # An optimizer on a GPU keeps its counts of steps as they are, on the host, and with one all of the message.
    tensors = [place.clone() if place.nbytes <= _SMALL else place for place in places]
    state: dict[str, Any] = _Unpickler(io.BytesIO(skeleton), tensors).load()
    return state


def _layout(kinds: list[tuple[torch.dtype, torch.Size]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One message for tensors of these dtypes and shapes, and the place of each in it."""
    lengths = [dtype.itemsize * shape.numel() for dtype, shape in kinds]
    padded = [-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths]
    content = torch.zeros(sum(padded), dtype=torch.uint8, device="cpu")
    places = [
        room[:length].view(dtype).view(shape)
        for room, length, (dtype, shape) in zip(torch.split(content, padded), lengths, kinds, strict=True)
    ]
    return content, places


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """As `ringtrain.broadcast_object`, with the arguments of `horovod.torch.broadcast_object`.

    CUDA tensors within it come to the GPU of the same number as on root_rank: send them from the CPU.
    """
    return objects.broadcast_object(obj, root_rank, name=name, process_set=process_set)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """As `ringtrain.broadcast_object_fn`, with the arguments of `horovod.torch.broadcast_object_fn`."""
    return objects.broadcast_object_fn(root_rank, name=name, process_set=process_set)


def allgather_object(obj: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set) -> list[Any]:
    """As `ringtrain.allgather_object`, with the arguments of `horovod.torch.allgather_object`."""
    return objects.allgather_object(obj, name=name, process_set=process_set)
