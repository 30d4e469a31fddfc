"""Checks that a run is right: that all ranks have the same parameters, and that no gradient is NaN or infinite.

And that it begins right: with the same parameters and with other data on each rank.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import ringtrain._core as _core
from ringtrain import ops
from ringtrain.arrays.adapter import adapter_for
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.errors import MismatchError, NonFiniteError, ReplicaError, list_of_ranks
from ringtrain.job import session
from ringtrain.ops import objects
from ringtrain.record.logger import logger


def check_replicas(params: Any, process_set: ProcessSet = global_process_set) -> None:
    """Compare the parameters of all ranks, bit for bit. All ranks of the process set call it together.

    Only 64 bits of each parameter travel, unless one differs.

    Args:
        params: as for `broadcast_parameters`.
        process_set: the ranks that are compared.

    Raises:
        ReplicaError: on all ranks, some parameter is not the same everywhere; the message names the first one, the
            ranks, and the first element.
        TypeError: a parameter is not an array.
        ValueError: two parameters have the same path.
    """
    arrays = objects.by_path(params, "check_replicas")
    digests = np.array([[digest_of(array) for array in arrays.values()]], np.int64)
    of_ranks = ops.allgather(digests, process_set=process_set)
    differing = [place for place in range(len(arrays)) if len(set(of_ranks[:, place].tolist())) > 1]
    if not differing:
        return
    path, array = list(arrays.items())[differing[0]]
    raise ReplicaError(_describe(path, array, of_ranks[:, differing[0]].tolist(), len(differing), process_set))


_OF_BATCH_NORM = ("running_mean", "running_var")


class Vote(NamedTuple):
    """By place: the ranks that agree with most others, and those that differ from them.

    Nobody knows who is right where as many agree on one value as on another; `right` are then the first of these.
    """

    right: list[int]
    odd: list[int]
    is_tie: bool


def vote(digests: Sequence[int]) -> Vote:
    """Returns which ranks have what most ranks have; each gives the digest of what it has."""
    (usual, most), *others = Counter(digests).most_common()
    right = [place for place, digest in enumerate(digests) if digest == usual]
    odd = [place for place, digest in enumerate(digests) if digest != usual]
    return Vote(right, odd, bool(others) and others[0][1] == most)


def digest_of(array: Any) -> int:
    """64 bits that are the same for the same elements."""
    adapter = adapter_for(array)
    is_on_host = adapter.stream(array) is None
    values = array if is_on_host else adapter.on_host(array)
    adapter = adapter_for(values)
    plain = adapter.prepare(values)  # may be a copy, which has to live on
    return _core.digest(adapter.view(plain))


def _describe(path: str, array: Any, digests: list[int], count: int, process_set: ProcessSet) -> str:
    """Returns the message about a parameter that is not the same on all ranks."""
    ranks = process_set.ranks or []
    found = vote(digests)
    right, odd = [ranks[place] for place in found.right], [ranks[place] for place in found.odd]
    here = _first_difference(array, ops.broadcast(array, right[0], process_set=process_set))
    where = objects.broadcast_object(here, odd[0], process_set=process_set)
    more = f" {count - 1} more parameters differ." if count > 1 else ""
    tie = " As many ranks have one value as another, so nobody knows which is right." if found.is_tie else ""
    question = "Were all ranks given the same start, and the same updates?"
    if path.rpartition(".")[2] in _OF_BATCH_NORM:
        question = (
            "Each rank has the statistics of its own batches: train with hvd.SyncBatchNorm, or check "
            "model.named_parameters() alone, and save those of one rank"
        )
    return (
        f'parameter "{path}" is not the same on all ranks: {list_of_ranks(odd)} '
        f"differ{'s' * (len(odd) == 1)} from {list_of_ranks(right)}; on rank {odd[0]} first at "
        f"{where}.{more}{tie} {question}"
    )


def _first_difference(array: Any, right: Any) -> str:
    own, other = (np.asarray(adapter_for(one).on_host(one), order="C") for one in (array, right))
    different = np.argwhere(own.view(np.uint8) != other.view(np.uint8)) if own.ndim else np.zeros((1, 0), int)
    if not len(different):
        return ""
    place = tuple(int(index) for index in different[0])
    if place:
        place = (*place[:-1], place[-1] // own.itemsize)
    return f"{list(place)}: {own[place]} instead of {other[place]}"


class FiniteCheck:
    """Finds the first NaN or infinity among gradients, before the sum spreads it to all ranks.

    Args:
        process_set: the ranks that agree; one that does not belong to it looks at its own gradients alone.
        full_name: makes names that the ranks match operations by.
    """

    def __init__(self, process_set: ProcessSet, full_name: Callable[[str], str]):
        self._process_set = process_set
        self._full_name = full_name
        self._step = 0
        self._answers: list[tuple[str, Any]] = []  # see `adapter.Adapter.is_finite`

    def look_at(self, name: str, gradient: Any) -> None:
        """Before a gradient is submitted. On a GPU the host does not wait for the answer, before `agree`."""
        self._answers.append((name, adapter_for(gradient).is_finite(gradient)))

    def forget(self) -> None:
        """Forgets the gradients of this step, which no rank uses."""
        self._answers.clear()

    def agree(self) -> None:
        """At the end of a step, on all ranks. Ranks that have joined need not take part.

        Raises:
            NonFiniteError: on all ranks, a gradient of this step was NaN or infinite on some of them.
        """
        self._step += 1
        found = self._first_bad()
        if not self._process_set.included():
            bad, name = ([session.rank()] if found else []), found
        elif self._sum(np.array([found is not None], np.int32))[0]:
            bad, name = self._of_all(found)
        else:
            return
        if bad:
            others = f", as others on {list_of_ranks(bad[1:])}" if len(bad) > 1 else ""
            raise NonFiniteError(
                f"the gradient of {name} is NaN or infinite on rank {bad[0]} in step {self._step}{others}; "
                "no rank has updated its parameters with it"
            )

    def _of_all(self, found: str | None) -> tuple[list[int], str]:
        """The ranks that have found something, and what the first of them has."""
        text = np.frombuffer((found or "").encode(), np.uint8)
        lengths = np.zeros(self._process_set.size() or 0, np.int64)
        place = self._process_set.rank() or 0
        lengths[place] = len(text)
        lengths = self._sum(lengths)
        first = int(np.argmax(lengths > 0))
        letters = text if place == first else np.zeros(lengths[first], np.uint8)
        ranks = self._process_set.ranks or []
        bad = [rank for rank, length in zip(ranks, lengths, strict=True) if length]
        return bad, self._sum(letters).tobytes().decode()

    def _sum(self, numbers: np.ndarray[Any, Any]) -> Any:
        """Sums over all ranks; those that have joined take part in it, too."""
        return ops.allreduce(numbers, op=ops.Sum, name=self._full_name("<finite>"), process_set=self._process_set)

    def _first_bad(self) -> str | None:
        """The name of the first gradient of this step that is not finite, in quotes, if there is one."""
        answers, self._answers = self._answers, []
        on_gpu = [answer for _, answer in answers if not isinstance(answer, bool)]
        copied = iter(_on_host(on_gpu))  # all at once: each copy would wait for the GPU
        for name, answer in answers:
            if not (answer if isinstance(answer, bool) else next(copied)):
                return f'"{name}"'
        return None


def _on_host(numbers: list[Any]) -> list[Any]:
    """The values of 0-d arrays that are in one place."""
    if not numbers:
        return []
    adapter = adapter_for(numbers[0])
    values: list[Any] = adapter.on_host(adapter.stack(numbers)).tolist()
    return values


@dataclasses.dataclass
class Start:
    """The parameters and gradients with which a rank begins.

    Args:
        names: of the parameters.
        parameters: bytes that depend on their elements.
        gradients: some elements of the first gradients, of this rank alone; empty if all of these are zeros.
        unused: the names of parameters that have no gradient.
        default_lr: the learning rate, if nobody has chosen it: with it its name, such as "the default of Adam".
        broadcast_of: what a script passes to `broadcast_parameters`.
        part_of_data: how a script gives a rank its own data.
    """

    names: Sequence[str]
    parameters: bytes
    gradients: bytes
    unused: Sequence[str] = ()
    default_lr: tuple[float, str] | None = None
    broadcast_of: str = "model.state_dict()"
    part_of_data: str = "DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())"


class StartCheck:
    """The checklist of the first step: compares what the ranks begin with, and says on the first of them what is wrong
    and how to mend it, each thing once.

    The ranks call it together, when a GradientBatch is first used after init() or join(). Those that have joined need
    not take part.

    Args:
        process_set: the ranks that are compared.
        full_name: makes names that the ranks match operations by.
    """

    def __init__(self, process_set: ProcessSet, full_name: Callable[[str], str]):
        self._process_set = process_set
        self._full_name = full_name
        self._said: set[str] = set()
        self._has_compared = False

    def compare(self, start: Start) -> bool:
        """Waits for a digest of each thing from all ranks, and says what they tell.

        Returns whether the ranks have the same parameters, as far as they were compared.

        Raises:
            MismatchError: on all ranks, these have the same names in different orders.
        """
        compared = (
            "\n".join(start.names).encode(),
            start.parameters,
            start.gradients,
            "\n".join(start.unused).encode(),
            "\n".join(sorted(start.names)).encode(),
        )
        digests = np.zeros((len(compared), self._process_set.size() or 1), np.int64)
        digests[:, self._process_set.rank() or 0] = [
            objects.short_digest(content) if content else 0 for content in compared
        ]
        name = self._full_name("<start>")
        sums = ops.allreduce(digests, op=ops.Sum, name=name, process_set=self._process_set)
        *of_ranks, of_sorted = sums
        if not _are_same(of_ranks[0]) and _are_same(of_sorted):
            raise MismatchError(
                f"the parameters of {list_of_ranks(self._process_set.ranks or [])} have the same names in different "
                f"orders; the first one is {_some(start.names[:1])} on this rank. Give the optimizer the parameters in "
                "the same order on all ranks, such as that of model.parameters(): a set has another order in each "
                "process"
            )
        is_first, self._has_compared = not self._has_compared, True
        if self._process_set.rank() == 0:
            for level, text in _findings(of_ranks, start, self._process_set.ranks or [], is_first):
                if text not in self._said:
                    self._said.add(text)
                    logger.log(level, f"{text}. This is said once")
        return all(map(_are_same, of_ranks[:2]))


def _are_same(digests: Any) -> bool:
    """Whether all ranks that have something to compare, and so another number than 0, have the same number."""
    return len({int(one) for one in digests if one}) <= 1


def all_elements(arrays: Sequence[Any]) -> bytes:
    """Returns 64 bits of each array, which depend on all of its elements.

    Leaves out arrays on a GPU, since reading them would wait for the GPU, and what is not an array.
    """
    return b"".join(
        _digest_of_bytes(np.asarray(adapter.on_host(array)))
        for array in arrays
        if hasattr(array, "shape") and (adapter := adapter_for(array)).stream(array) is None
    )


def _digest_of_bytes(array: np.ndarray[Any, Any]) -> bytes:
    """Digests an array of any dtype, also of those that the core cannot send."""
    if array.dtype.hasobject:
        return b""
    plain = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return digest_of(plain).to_bytes(8, "little", signed=True)


def some_elements(arrays: Sequence[Any]) -> bytes:
    """Returns the first elements of each array: enough to tell whether other random numbers made them.

    Leaves out arrays on a GPU, since reading them would wait for the GPU, and what is not an array.
    """
    most = 64
    return b"".join(
        np.asarray(adapter.on_host(array)).flat[:most].tobytes()
        for array in arrays
        if hasattr(array, "shape") and (adapter := adapter_for(array)).stream(array) is None
    )


def default_lr_of(optimizer: Any) -> tuple[float, str] | None:
    """Returns the learning rate that such an optimizer has if the script chooses none, and whose it is."""
    parameter = inspect.signature(type(optimizer)).parameters.get("lr")
    if parameter is None or not isinstance(parameter.default, float):
        return None
    return parameter.default, f"the default of {type(optimizer).__name__}"


def _which(digests: Sequence[int], ranks: Sequence[int]) -> str:
    """Says which of the ranks differ from most others, if most agree; 0 is that of a rank without something."""
    present = [(rank, digest) for rank, digest in zip(ranks, digests, strict=True) if digest]
    found = vote([digest for _, digest in present])
    if len(found.right) == 1:
        return ""
    if found.is_tie:
        return " (as many have one value as another)"
    odd = [present[place][0] for place in found.odd]
    return f" ({list_of_ranks(odd)} differ{'s' * (len(odd) == 1)} from the others)"


def _findings(of_ranks: Any, start: Start, all_ranks: Sequence[int], is_first: bool) -> Iterator[tuple[int, str]]:
    """Level and text of each thing that is wrong, or may be. `of_ranks` has a row of digests for each thing compared,
    and in it 0 for a rank that has joined or has nothing to compare. `is_first`: nothing was compared before."""
    ranks = list_of_ranks(all_ranks)
    names, parameters, gradients, unused = ([int(one) for one in row if one] for row in of_ranks)
    which = _which([int(one) for one in of_ranks[1]], all_ranks) if len(set(parameters)) > 1 else ""
    if len(set(names)) > 1:
        yield (
            logging.WARNING,
            f"{ranks} have other parameters to train, by their names; the first of them has {_some(start.names)}: "
            "build the same model on all ranks, and freeze or compile it on all of them alike",
        )
    elif len(set(parameters)) > 1 and not is_first:
        yield (
            logging.WARNING,
            f"{ranks} have different parameters by now, as after join(): ranks that join early miss the last updates. "
            f"Call hvd.broadcast_parameters({start.broadcast_of}, root_rank=last) after last = hvd.join(), on all "
            "ranks, and broadcast the state of the optimizer. In PyTorch `with hvd.Join(optimizer):` around the loop "
            "does both",
        )
    elif len(set(parameters)) > 1:
        yield (
            logging.WARNING,
            f"{ranks} begin with different parameters{which}, and each would go on with a model of its own: call "
            f"hvd.broadcast_parameters({start.broadcast_of}, root_rank=0) after building or loading the model, on all "
            "ranks",
        )
    elif len(gradients) > 1 and len(set(gradients)) == 1:
        yield (
            logging.WARNING,
            f"{ranks} have the same gradients in the first step, as of the same data: give each rank its own part, "
            f"for example with {start.part_of_data}",
        )
    if gradients and len(unused) == len(names) and len(set(unused)) == 1:
        yield (
            logging.INFO,
            f"{len(start.unused)} of {len(start.names)} parameters have no gradient in the first step on any rank, "
            f"such as {_some(start.unused)}: they stay as they are until one has. If they are not trained, call "
            "requires_grad_(False) on them before DistributedOptimizer",
        )
    if any(name.startswith("_orig_mod.") for name in start.names):
        yield (
            logging.INFO,
            "torch.compile has made one graph of the whole model, so all gradients come at the end of backward(), and "
            "none is averaged meanwhile: compile its layers, as in `for layer in model.layers: layer.compile()`",
        )
    if start.default_lr is not None and is_first:
        learning_rate, whose = start.default_lr
        yield (
            logging.INFO,
            f"the learning rate, {learning_rate:g}, is {whose}, for the batch of one rank, and {len(names)} ranks have "
            f"a batch that is {len(names)} times as large: {learning_rate:g} * hvd.size() is usual, with a warm-up",
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names[:3])
