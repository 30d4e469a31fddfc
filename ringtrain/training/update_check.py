"""Checks that all ranks update in the same way: with the same options and state of the optimizer."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ringtrain import ops
from ringtrain.arrays.adapter import adapter_for
from ringtrain.engine.process_sets import ProcessSet
from ringtrain.errors import RingtrainError, list_of_ranks
from ringtrain.ops import objects
from ringtrain.record.logger import logger

Options = Sequence[Mapping[str, Any]]  # of each parameter group: numbers, by their names

_DIGEST_BITS = 24  # the sum of the squares of 32,000 such numbers fits into 64 bits


def equality_terms(digest: int) -> tuple[int, int, int]:
    """Returns what each rank sends for `are_equal`, as integers of 64 bits: 1, and a short digest and its square."""
    short = digest % (1 << _DIGEST_BITS)
    return 1, short, short * short


def are_equal(sums: Sequence[Any]) -> bool:
    """Whether all ranks have sent the same digest, by the sums of their `equality_terms`.

    Ranks that have joined send zeros. n * sum(d * d) - sum(d)**2 is the sum of the squares of all differences.
    """
    count, total, squares = (int(one) for one in sums)
    return count * squares == total * total


class UpdateCheck:
    """Compares what decides the next update beside the gradients: the options of the optimizer, such as the learning
    rate, in every step, and its state in the first one and where a rank has loaded another.

    A few integers are summed beside the gradients of each step, so no step waits longer. More is exchanged where these
    differ. Then the first rank says what differs and how to mend it, once.

    Args:
        process_set: the ranks that are compared.
        full_name: makes names that the ranks match operations by.
        broadcast_state: what a script calls to give all ranks the state of one.
        marks: how many further integers are summed.
    """

    def __init__(
        self, process_set: ProcessSet, full_name: Callable[[str], str], broadcast_state: str, marks: int = 0
    ) -> None:
        self._process_set = process_set
        self._full_name = full_name
        self._broadcast_state = broadcast_state
        self._options: Options = []
        self._terms = equality_terms(0)
        self._numbers = np.zeros(len(self._terms) + 1 + marks, np.int64)
        self._handle: Any = None
        self._has_said_options = self._has_said_state = False
        self._said: set[str] = set()

    def is_submitted(self) -> bool:
        return self._handle is not None

    def forget(self) -> None:
        """Forgets what is under way: a rank was lost."""
        self._handle = None

    def settle(self) -> None:
        """Waits for what is under way without looking at it, after another operation of the step has failed."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(RingtrainError):
                handle.wait()

    def submit(self, options: Options, is_loaded: bool = False, marks: Sequence[int] = ()) -> None:
        """Begins the comparison of one step, on all ranks.

        Args:
            options: of this rank now.
            is_loaded: compare the state, too, since this rank has loaded one.
            marks: summed over the ranks.
        """
        if options != self._options:
            self._options = options
            self._terms = equality_terms(objects.short_digest(_text_of(options).encode()))
        self._numbers[:] = (*self._terms, is_loaded, *marks)
        self._handle = ops.allreduce_async_(
            self._numbers, op=ops.Sum, name=self._full_name("<update>"), process_set=self._process_set
        )

    def wait(self, state: Callable[[], bytes]) -> list[int]:
        """Ends the comparison of the step; says what differs, if it was not said before.

        Args:
            state: returns bytes that depend on the state of the optimizer before this update.

        Returns:
            The number of ranks that have taken part, and the sums of `marks`.
        """
        handle, self._handle = self._handle, None
        sums: list[int] = handle.wait().tolist()
        terms, is_loaded, marks = sums[:3], sums[3], sums[4:]
        if is_loaded or not (self._has_said_options or are_equal(terms)):
            self.compare(self._options, state())
        return [sums[0], *marks]

    def begin_anew(self, options: Options, state: bytes) -> None:
        """Compares both in the first step after init() or join(), which may be the first one of some ranks only."""
        self._has_said_options = self._has_said_state = False
        self.compare(options, state)

    def compare(self, options: Options, state: bytes) -> None:
        """Waits for digests of both from all ranks, and says what differs. All ranks call it together."""
        texts = _text_of(options).encode(), state
        digests = np.zeros((len(texts), self._process_set.size() or 1), np.int64)
        digests[:, self._process_set.rank() or 0] = [objects.short_digest(one) for one in texts]
        have_same_options, have_same_state = (
            len({one for one in row if one}) <= 1 for row in self._sum(digests).tolist()
        )
        if not have_same_options and not self._has_said_options:
            self._has_said_options = True
            self._say(
                _difference_of(self._of_all(texts[0])),
                "Give all ranks the same ones, and a schedule such as ReduceLROnPlateau the mean of the losses of all "
                "ranks, hvd.allreduce(loss)",
            )
        if not have_same_state and not self._has_said_state:
            self._has_said_state = True
            self._say(
                "the state of the optimizer is not the same on all ranks",
                f"Call {self._broadcast_state} after loading a checkpoint, on all ranks",
            )

    def _say(self, what: str, remedy: str) -> None:
        if self._process_set.rank() != 0 or what in self._said:
            return
        self._said.add(what)
        ranks = list_of_ranks(self._process_set.ranks or [])
        logger.warning(
            f"{ranks} update in different ways, and each goes on with a model of its own: {what}. {remedy}. This is "
            "said once"
        )

    def _of_all(self, text: bytes) -> dict[int, str]:
        """Returns the texts of all ranks that have not joined, by rank."""
        ranks = self._process_set.ranks or []
        place = self._process_set.rank() or 0
        lengths = np.zeros(len(ranks), np.int64)
        lengths[place] = len(text)
        lengths = self._sum(lengths)
        letters = np.zeros((len(ranks), int(lengths.max())), np.uint8)
        letters[place, : len(text)] = np.frombuffer(text, np.uint8)
        letters = self._sum(letters)
        return {
            rank: row[:length].tobytes().decode()
            for rank, row, length in zip(ranks, letters, lengths.tolist(), strict=True)
            if length
        }

    def _sum(self, numbers: np.ndarray[Any, Any]) -> Any:
        """Sums over all ranks; those that have joined take part in it, too."""
        return ops.allreduce(numbers, op=ops.Sum, name=self._full_name("<options>"), process_set=self._process_set)


_WAYS_TO_COMPUTE = {"foreach", "fused", "capturable", "differentiable"}


def numbers_among(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are numbers or pairs of these; without those that choose how an update is computed.

    Leaves out arrays on a GPU, since reading them would wait for the GPU.
    """
    return {
        name: number
        for name, value in options.items()
        if name not in _WAYS_TO_COMPUTE and (number := _number_in(value)) is not None
    }


def content_of(tree: Any, content_of_leaf: Callable[[Any], bytes]) -> bytes:
    """Returns bytes that depend on all leaves of a state, in the order of their keys. Keys are numbers or texts."""
    if isinstance(tree, Mapping):
        keys = sorted((key for key in tree if isinstance(key, (str, int))), key=str)
        parts = [f"{key}:".encode() + content_of(tree[key], content_of_leaf) for key in keys]
    elif isinstance(tree, (list, tuple)):
        parts = [content_of(one, content_of_leaf) for one in tree]
    else:
        parts = [content_of_leaf(tree)]
    return b"".join([*parts, b";"])


def bytes_of_number(value: Any) -> bytes:
    """Returns a number or None as bytes, and nothing for other objects: their text may have an address in it."""
    return repr(_number_in(value)).encode() if value is None or isinstance(value, (bool, int, float)) else b""


def _number_in(value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return int(value) if isinstance(value, float) and value.is_integer() else value  # 1 and 1.0 are equal
    if isinstance(value, tuple):
        return tuple(_number_in(one) for one in value)
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and math.prod(shape) == 1 and adapter_for(value).stream(value) is None:
        return _number_in(np.asarray(adapter_for(value).on_host(value)).item())
    return None


def _text_of(options: Options) -> str:
    return json.dumps([dict(sorted(one.items())) for one in options])


def _difference_of(texts: Mapping[int, str]) -> str:
    """Describes the first option that is not the same on all ranks, such as "lr is 0.1 on rank 0 and 0.2 on rank 1"."""
    of_ranks = {rank: json.loads(text) for rank, text in texts.items()}
    counts = {rank: len(groups) for rank, groups in of_ranks.items()}
    if len(set(counts.values())) > 1:
        return f"the number of parameter groups is {_by_rank(counts)}"
    places = range(max(counts.values()))
    names = dict.fromkeys(name for groups in of_ranks.values() for group in groups for name in group)
    for name in sorted(names, key=lambda name: name != "lr"):
        for place in places:
            values = {rank: groups[place].get(name) for rank, groups in of_ranks.items()}
            if len(set(map(repr, values.values()))) > 1:
                where = f" of parameter group {place}" if len(places) > 1 else ""
                return f"the option {name}{where} is {_by_rank(values)}"
    return "the options of the optimizer are not the same on all ranks"


def _by_rank(values: Mapping[int, Any]) -> str:
    """Lists each value with its ranks; rounded, unless that makes different values look the same."""
    exact = {rank: str(value) for rank, value in values.items()}
    short = {rank: f"{value:g}" if isinstance(value, float) else exact[rank] for rank, value in values.items()}
    ranks_of: dict[str, list[int]] = {}
    for rank, text in (short if len(set(short.values())) == len(set(exact.values())) else exact).items():
        ranks_of.setdefault(text, []).append(rank)
    return " and ".join(f"{text} on {list_of_ranks(ranks)}" for text, ranks in ranks_of.items())
