"""Makes parameters, optimizer states and Python objects the same on all ranks. Mirrors `horovod.torch.functions`."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ringtrain import ops
from ringtrain.arrays.torch import check_has_elements
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.job import session
from ringtrain.ops import objects
from ringtrain.training.power_sgd import replicated_state_of

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int = 0,
    *,
    prefix: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """As `ringtrain.broadcast_parameters`, with the arguments of `horovod.torch.broadcast_parameters`.

    `params` is such as model.state_dict(), model.named_parameters() or model.parameters().

    Examples:
        >>> import ringtrain.torch as hvd
        >>> weights = {"layer": torch.full((2,), float(hvd.rank()))}
        >>> hvd.broadcast_parameters(weights, root_rank=1)
        >>> weights["layer"].tolist()
        [1.0, 1.0]
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

    Works for every optimizer with `state_dict` and `load_state_dict`, also where some ranks have no state yet. Tensors
    of the state keep their dtypes, also where `load_state_dict` would cast them to that of the parameter; None, numbers
    and strings stay what they are. The tensors travel in messages of 256 MB.

    As after Horovod's, an optimizer that had no state finds zeros where its parameters had no gradients.

    Args:
        optimizer: of the same class, over the same parameters on all ranks; a distributed one too.
        root_rank: the rank of the world that has the right state.
        model: knows which of the parameters are those of sparse embeddings: their zeros are sparse.
        process_set: the ranks that take part.

    Raises:
        TypeError: this is not an optimizer, or root_rank has a tensor in its state that cannot be sent.
        ValueError: the optimizer of root_rank has other parameter groups than this one.
        RuntimeError: root_rank could not pickle an option (there, the pickling error itself is raised).

    Examples:
        >>> import ringtrain.torch as hvd
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + hvd.rank())
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        >>> optimizer.param_groups[0]["lr"]
        0.1
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"broadcast_optimizer_state takes a torch.optim.Optimizer, not a {type(optimizer).__name__}; for a model "
            "call broadcast_parameters(model.state_dict(), root_rank)"
        )
    own = replicated_state_of(optimizer)
    is_new = not own.get("state")
    if session.rank() != root_rank:
        state = _receive(root_rank, process_set)
        _put_options_in_place(state, optimizer)
        load_unchanged(optimizer, state)
    else:
        _send(own, root_rank, process_set)
    if is_new:
        _leave_zeros(optimizer, model)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns the parameters in the order of their numbers in a state_dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _put_options_in_place(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Tensors among the options, such as a learning rate on the GPU, go where this rank's own ones are.

    load_state_dict does so for the state of the parameters only.
    """
    for options, own in zip(state["param_groups"], optimizer.param_groups, strict=False):
        for name, value in options.items():
            if torch.is_tensor(value) and torch.is_tensor(own.get(name)):
                options[name] = value.to(own[name].device)


def _leave_zeros(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Horovod makes the state of a new optimizer by a step with zeros, and scripts may rely on gradients after it."""
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    modules = [] if model is None else model.modules()
    sparse = {module.weight for module in modules if isinstance(module, embeddings) and module.sparse}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                zeros = torch.zeros_like(parameter)
                is_sparse = parameter in sparse or isinstance(optimizer, torch.optim.SparseAdam)
                parameter.grad = zeros.to_sparse() if is_sparse else zeros


# ------------------------------------------------------------------------------------------- loading a state unchanged


def load_unchanged(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state of an optimizer of this job with its dtypes; `load_state_dict` decides on the devices.

    `Optimizer.load_state_dict` alone is for checkpoints, also of a model in another dtype: it casts all tensors but
    "step" to the dtype and the device of their parameter, and makes generators of strings.

    Args:
        optimizer: of the same class as the one that `state` is from.
        state: what its `state_dict` has returned. Tensors in it are taken over, not copied.
    """
    saved = state.get("state")
    if not isinstance(saved, Mapping):  # a class with a format of its own
        optimizer.load_state_dict(dict(state))
        return
    optimizer.load_state_dict({**state, "state": {key: _loadable(value) for key, value in saved.items()}})
    loaded = getattr(optimizer, "state", {})
    for number, parameter in enumerate(_parameters_of(optimizer)):
        if number in saved and parameter in loaded:
            loaded[parameter] = _put_back(loaded[parameter], saved[number])


class _Kept:
    """Hides a value from load_state_dict, which enters everything that it can iterate over."""

    def __init__(self, value: Any):
        self.value = value


def _loadable(value: Any) -> Any:
    """Returns a copy, with the same tensors, that load_state_dict can copy."""
    if isinstance(value, torch.Tensor):
        return value
    if type(value) is dict:
        return {key: _loadable(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_loadable, value))
    return _Kept(value) if isinstance(value, Iterable) else value


def _put_back(loaded: Any, saved: Any) -> Any:
    """Returns what was loaded, with the saved values of those that load_state_dict has cast or not seen."""
    if isinstance(loaded, _Kept):
        return loaded.value
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if type(saved) is type(loaded) is dict:
        return {key: _put_back(one, saved.get(key)) for key, one in loaded.items()}
    if type(saved) is type(loaded) in (list, tuple) and len(saved) == len(loaded):
        return type(saved)(_put_back(*pair) for pair in zip(loaded, saved, strict=True))
    return loaded


# ----------------------------------------------------------------------------------------- tensors apart from the rest

_MESSAGE_BYTES = 256 << 20


class _Kind(NamedTuple):
    """The description of a tensor, which the other ranks need before its elements."""

    dtype: torch.dtype
    shape: torch.Size
    is_on_gpu: bool


class _Pickler(pickle.Pickler):
    """Leaves the tensors out, and collects them."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if obj.layout is not torch.strided:
            raise TypeError(f"broadcast_optimizer_state cannot send a tensor with the layout {obj.layout}")
        check_has_elements(obj)
        self.tensors.append(obj.detach())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Puts the tensors in."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def _send(state: dict[str, Any], root_rank: int, process_set: ProcessSet) -> None:
    skeleton = io.BytesIO()
    pickler = _Pickler(skeleton)
    pickling_error = None
    try:
        pickler.dump(state)
    except Exception as error:
        pickling_error = error
    kinds = [_Kind(tensor.dtype, tensor.shape, tensor.is_cuda) for tensor in pickler.tensors]
    description = None if pickling_error else (skeleton.getvalue(), kinds)
    objects.broadcast_object(description, root_rank, process_set=process_set)
    if pickling_error is not None:
        raise pickling_error
    _share(pickler.tensors, root_rank, process_set)


def skeleton_of(state: dict[str, Any]) -> tuple[bytes, list[torch.Tensor]]:
    """Returns a state without the elements of its tensors, and these. Raises as `broadcast_optimizer_state`."""
    skeleton = io.BytesIO()
    pickler = _Pickler(skeleton)
    pickler.dump(state)
    kinds = [_Kind(tensor.dtype, tensor.shape, tensor.is_cuda) for tensor in pickler.tensors]
    return skeleton.getvalue() + repr(kinds).encode(), pickler.tensors


def _receive(root_rank: int, process_set: ProcessSet) -> dict[str, Any]:
    description = objects.broadcast_object(None, root_rank, process_set=process_set)
    if description is None:
        raise RuntimeError(
            f"broadcast_optimizer_state: rank {root_rank} could not pickle its state; its own error says why"
        )
    skeleton, kinds = description
    # On the GPU at once, if they are to be there: the host may not have room for all of them.
    tensors = [
        torch.empty(
            kind.shape, dtype=kind.dtype, device="cuda" if kind.is_on_gpu and torch.cuda.is_available() else "cpu"
        )
        for kind in kinds
    ]
    _share(tensors, root_rank, process_set)
    state: dict[str, Any] = _Unpickler(io.BytesIO(skeleton), tensors).load()
    return state


def _share(tensors: Sequence[torch.Tensor], root_rank: int, process_set: ProcessSet) -> None:
    """Give the tensors of all ranks the elements that those of the root have."""
    lengths = [tensor.nbytes for tensor in tensors]
    message = torch.empty(min(_MESSAGE_BYTES, sum(lengths)), dtype=torch.uint8, device="cpu")
    is_root = session.rank() == root_rank
    number, content = -1, message
    for parts in _messages(lengths):
        end, places = 0, []
        for part in parts:
            if part.number != number:
                number, content = part.number, _bytes_of(tensors[part.number])
            begin, end = end, end + part.length
            places.append((message[begin:end], content.narrow(0, part.first, part.length)))
        if is_root:
            for place, elements in places:
                place.copy_(elements)
        ops.broadcast_(message[:end], root_rank, process_set=process_set)
        if not is_root:
            for place, elements in places:
                elements.copy_(place)


class _Part(NamedTuple):
    """Some bytes of a tensor."""

    number: int  # of the tensor
    first: int
    length: int


def _messages(lengths: Sequence[int]) -> Iterator[list[_Part]]:
    """Yields the parts of tensors of these lengths that each message carries."""
    parts: list[_Part] = []
    room = _MESSAGE_BYTES
    for number, length in enumerate(lengths):
        first = 0
        while first < length:
            part = _Part(number, first, min(length - first, room))
            parts.append(part)
            first += part.length
            room -= part.length
            if room == 0:
                yield parts
                parts, room = [], _MESSAGE_BYTES
    if parts:
        yield parts


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """In its own memory, if its elements are dense and in the usual order; else in a copy."""
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


# ------------------------------------------------------------------------------------------------------------- objects


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
