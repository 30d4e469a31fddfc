"""Local SGD and DiLoCo: ranks train alone for `every` steps, and an outer optimizer follows the mean of their changes.

The terms are those of DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (2501.18512). An *inner step* is a step of the
optimizer of the script. The *outer parameters* are the same on all ranks. They are a copy of the parameters at first;
from then on only outer steps change them. A *fragment* is a part of the parameters that is synchronised at one time:

    send     at inner step t:  difference = outer - parameters + error        (error: what the codes left out so far)
                               error = difference - decoded(encoded(difference))
                               the mean of the decoded differences of all islands is under way
    arrive   at t + overlap:   outer = step of the outer optimizer with the mean as its gradient
                               parameters = mixing * parameters + (1 - mixing) * outer

Fragment p of P is sent at the steps t with t % every == (p + 1) * every // P % every. Everything happens at steps that
follow from the counter alone, so all ranks submit the same operations, and a run is the same each time.

The outer state is kept in host memory, in float32, or float64 where a parameter of the fragment is float64. So one
implementation serves every array library: it reads and writes parameters through their adapters.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import operator
import reprlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringtrain import ops, optim
from ringtrain.arrays.adapter import adapter_for
from ringtrain.engine.compression import BF16Compressor, BlockCodes, Compression, FP16Compressor
from ringtrain.engine.handles import Handle
from ringtrain.engine.requirements import require_weight
from ringtrain.errors import MismatchError, ReplicaError, list_of_ranks
from ringtrain.job import elastic_client, session
from ringtrain.ops import objects
from ringtrain.training import difference_codes
from ringtrain.training.islands import Given, Islands
from ringtrain.training.replicas import digest_of

Array = npt.NDArray[Any]
Fragments = int | Sequence[Sequence[str]]

# Below that of every gradient, so that the averages inside an island overtake transfers between islands.
_PRIORITY = -(1 << 20)
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_FORMAT = "ringtrain local steps 2"


# --- what the user has asked for --------------------------------------------------------------------------------------


def paper_outer() -> optim.SGD:
    """The outer optimizer of the DiLoCo paper: SGD with Nesterov momentum 0.9 and learning rate 0.7."""
    return optim.SGD(lr=0.7, momentum=0.9, nesterov=True)


@dataclasses.dataclass
class Settings:
    """The arguments of `ringtrain.DiLoCo` that are about outer steps, checked. Raises TypeError and ValueError."""

    every: int
    outer: Any = None
    fragments: Fragments = 1
    overlap: int = 0
    mixing: float | None = None
    compression: Any = Compression.none
    islands: Given = "host"

    def __post_init__(self) -> None:
        self.every = _integer(self.every, "every")
        self.overlap = _integer(self.overlap, "overlap")
        if self.every < 1:
            raise ValueError(f"every must be at least 1 inner step, but is {self.every}")
        if not 0 <= self.overlap < self.every:
            raise ValueError(
                f"overlap must be in 0..{self.every - 1}, below every={self.every}, but is {self.overlap}: a fragment "
                "arrives before it is sent again"
            )
        self.outer = paper_outer() if self.outer is None else self.outer
        if not isinstance(self.outer, optim.Optimizer):
            raise TypeError(
                f"outer must be an optimizer of ringtrain.optim, such as SGD(lr=0.7, momentum=0.9, nesterov=True), not "
                f"{' '.join(reprlib.repr(self.outer).split())}"
            )
        if self.mixing is None:
            self.mixing = 0.5 if self.overlap else 0.0
        if isinstance(self.mixing, bool) or not isinstance(self.mixing, (int, float)):
            raise TypeError(f"mixing must be a number in [0, 1), not {self.mixing!r}")
        if not 0 <= self.mixing < 1:
            raise ValueError(f"mixing must be in [0, 1), but is {self.mixing}: with 1 no rank would follow the others")
        if self.compression not in (Compression.none, FP16Compressor, BF16Compressor) and not isinstance(
            self.compression, BlockCodes
        ):
            raise TypeError(
                f"compression of DiLoCo must be Compression.none, fp16, bf16, int8 or int4, not {self.compression!r}"
            )

    def describe(self) -> dict[str, Any]:
        """Return what all ranks must have alike, by the names of the arguments, for messages too."""
        outer = ", ".join(f"{name}={value}" for name, value in self.outer.hyperparameters().items())
        compression = self.compression
        return {
            "every": self.every,
            "overlap": self.overlap,
            "mixing": self.mixing,
            "outer": f"{type(self.outer).__name__}({outer})",
            "compression": repr(compression) if isinstance(compression, BlockCodes) else compression.__name__,
        }


def _integer(value: Any, name: str) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an integer number of steps, not {value!r}")


def named_fragments(fragments: Any, name_of: Callable[[Any], str]) -> Fragments:
    """The fragments with the names of their parameters, as `Settings` takes them.

    Raises:
        TypeError: neither a number nor lists.
    """
    if isinstance(fragments, int) and not isinstance(fragments, bool):
        return fragments
    parts: list[Any] = list(fragments) if _is_list(fragments) else [fragments]
    if not all(_is_list(part) for part in parts):
        shown = reprlib.repr(fragments)
        raise TypeError(f"fragments must be a number, or a list of lists of parameters, not {shown}")
    return [[name_of(one) for one in part] for part in parts]


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, Mapping)) and not hasattr(value, "shape")


class Plan:
    """Which parameters are in which fragment, as places in the list of parameters.

    Args:
        arrays: the parameters by name, in the order in which they are always given.
        fragments: see `Settings`.
        every: fragments are sent at different steps, so there are at most so many.

    Raises:
        TypeError: a parameter is not floating-point.
        ValueError: too many fragments, or they do not have each parameter once.
    """

    def __init__(self, arrays: Mapping[str, Any], fragments: Fragments, every: int) -> None:
        self.names = list(arrays)
        self.shapes = [tuple(array.shape) for array in arrays.values()]
        self.dtypes = [adapter_for(array).dtype_name(array) for array in arrays.values()]
        if not self.names:
            raise ValueError("DiLoCo needs at least one parameter")
        for name, dtype in zip(self.names, self.dtypes, strict=True):
            if dtype not in _FLOATS:
                raise TypeError(f'parameter "{name}" is {dtype}; DiLoCo averages {", ".join(_FLOATS)}')
        self.fragments = self._of_names(fragments) if not isinstance(fragments, int) else self._of_equal_size(fragments)
        if len(self.fragments) > every:
            raise ValueError(
                f"{len(self.fragments)} fragments need at least as many inner steps, but every={every}: at most one "
                "fragment is sent in a step"
            )

    def _of_names(self, fragments: Sequence[Sequence[str]]) -> list[list[int]]:
        place_of = {name: place for place, name in enumerate(self.names)}
        given = [name for names in fragments for name in names]
        unknown = [name for name in given if name not in place_of]
        if unknown:
            raise ValueError(f"fragments: there is no parameter {_listed(unknown)}")
        missing = [name for name in self.names if name not in given]
        if missing:
            raise ValueError(f"fragments must have each parameter once, but {_listed(missing)} is in none")
        if len(given) > len(self.names):
            repeated = [name for name in self.names if given.count(name) > 1]
            raise ValueError(f"fragments must have each parameter once, but {_listed(repeated)} is in several")
        if not all(fragments):
            raise ValueError("fragments: each list needs at least one parameter")
        return [sorted(place_of[name] for name in names) for names in fragments]

    def _of_equal_size(self, count: int) -> list[list[int]]:
        if not 1 <= count <= len(self.names):
            raise ValueError(f"fragments must be in 1..{len(self.names)}, the number of parameters, but is {count}")
        sizes = [max(math.prod(shape), 1) for shape in self.shapes]
        fragments: list[list[int]] = [[]]
        behind, total = 0, sum(sizes)
        for place, size in enumerate(sizes):
            left = len(self.names) - place  # parameters, of which each later fragment needs one
            is_full = behind + size / 2 > len(fragments) * total / count
            if fragments[-1] and len(fragments) < count and (is_full or left <= count - len(fragments)):
                fragments.append([])
            fragments[-1].append(place)
            behind += size
        return fragments

    def describe(self) -> dict[str, Any]:
        """Return what all ranks must have alike."""
        kinds = zip(self.dtypes, self.shapes, strict=True)
        return {
            "parameters": {
                name: f"{dtype}{list(shape)}" for name, (dtype, shape) in zip(self.names, kinds, strict=True)
            },
            "fragments": [[self.names[place] for place in places] for places in self.fragments],
        }


def _listed(names: Iterable[str]) -> str:
    all_names = [f'"{name}"' for name in names]
    more = f" and {len(all_names) - 5} more" if len(all_names) > 5 else ""
    return ", ".join(all_names[:5]) + more


# --- the way of a difference ------------------------------------------------------------------------------------------


class _Transfer:
    """The mean of the differences of all islands, under way."""

    def __init__(self, wait: Callable[[], Array]) -> None:
        self._wait: Callable[[], Array] | None = wait
        self._mean: Array | None = None

    @classmethod
    def done(cls, mean: Array) -> _Transfer:
        transfer = cls(lambda: mean)
        transfer.mean()
        return transfer

    @property
    def has_come(self) -> bool:
        """Whether `mean` has waited for it, as `state_dict` does."""
        return self._mean is not None

    def mean(self) -> Array:
        """Wait for it. Called any number of times."""
        if self._wait is not None:
            self._mean, self._wait = self._wait(), None
        assert self._mean is not None
        return self._mean


class _Sender:
    """Sends differences to all ranks, in the form that the compression gives them.

    The ranks of an island have the same difference, so the mean over the ranks is that over the islands, weighted with
    their numbers of ranks, or with the sums of the weights of their ranks.
    """

    def __init__(self, compression: Any, islands: Islands) -> None:
        self._compression = compression
        self._islands = islands

    def send(self, name: str, difference: Array, weight: float | None) -> tuple[_Transfer, Array | None]:
        """Submit a difference. Returns the transfer, and what the codes left out of the difference (None: nothing).

        `weight`: of this rank in the mean; None if all ranks weigh the same.
        """
        compression = self._compression
        if len(self._islands.lists) == 1:
            return _Transfer.done(difference), None
        if isinstance(compression, BlockCodes):
            return self._send_codes(name, difference, compression.bits, weight)
        if compression is Compression.none:
            return _Transfer(_submit_average(name, difference, weight).wait), None
        sent = _cast(difference, "float16" if compression is FP16Compressor else "bfloat16")
        handle = _submit_average(name, sent, weight)
        return (
            _Transfer(lambda: handle.wait().astype(difference.dtype)),
            _finite(difference - sent.astype(difference.dtype)),
        )

    def _send_codes(self, name: str, difference: Array, bits: int, weight: float | None) -> tuple[_Transfer, Array]:
        """Codes with scales of their own cannot be summed on the way: the first rank of each island sends its codes."""
        message = difference_codes.encode(difference, bits)
        rest = _finite(difference - difference_codes.decode(message, difference.size, bits))
        rows = message[None] if self._islands.is_first() else np.empty((0, message.size), np.uint8)
        handle = ops.allgather_async(rows, name=name)
        # Also without weights: all ranks see if some have one. It travels with the codes.
        weights = ops.allgather_async(np.array([np.nan if weight is None else weight]), name=f"{name}.weights")
        islands = self._islands.lists

        def wait() -> Array:
            messages, shares = handle.wait(), _shares_of(islands, weights.wait())
            are_equal = len(set(shares)) == 1
            total = np.zeros(difference.size, difference.dtype)
            for share, one in zip(shares, messages, strict=True):
                decoded = difference_codes.decode(one, difference.size, bits) if share else np.zeros_like(total)
                total += decoded if are_equal else decoded * total.dtype.type(share)
            total /= len(shares) if are_equal else sum(shares)
            return total

        return _Transfer(wait), rest


def _submit_average(name: str, values: Array, weight: float | None) -> Handle[Array]:
    return ops.allreduce_async(values, name=name, op=ops.Average, priority=_PRIORITY, weight=weight)


def _shares_of(islands: Sequence[Sequence[int]], weights: Array) -> list[float]:
    """How much each island counts in a mean: the sum of the weights of its ranks, or the number of its ranks.

    Args:
        weights: of each rank; NaN for None.

    Raises:
        MismatchError: some ranks have a weight and others none, or all weights are 0.
    """
    given = ~np.isnan(weights)
    if not given.any():
        return [float(len(ranks)) for ranks in islands]
    if not given.all():
        having, lacking = (list_of_ranks(np.flatnonzero(which).tolist()) for which in (given, ~given))
        raise MismatchError(
            f"DiLoCo: {having} gave a weight, {lacking} gave no weight. Call set_weight() on all ranks or on none, "
            "with 0 on a rank without samples."
        )
    if not weights.any():
        raise MismatchError("DiLoCo: the weights of all ranks are 0, so there is no mean of their differences.")
    return [float(weights[list(ranks)].sum()) for ranks in islands]


def _cast(values: Array, dtype_name: str) -> Array:
    """Values beyond the range of float16 become its largest ones; the rest goes with the next difference."""
    if dtype_name == "float16":
        largest = float(np.finfo(np.float16).max)
        values = np.where(np.isfinite(values), np.clip(values, -largest, largest), values)
    cast: Array = adapter_for(values).cast(values, dtype_name)
    return cast


def _finite(rest: Array) -> Array:
    """An error that is not finite would stay for ever."""
    rest[~np.isfinite(rest)] = 0
    return rest


# --- the outer half of the training -----------------------------------------------------------------------------------


class _Arriving(NamedTuple):
    due: int  # the step of its arrival
    transfer: _Transfer
    error_before: Array | None  # that of the fragment before sending; None also after loading a state


class _Fragment:
    """One part of the parameters, as flat arrays."""

    def __init__(self, places: list[int], plan: Plan, sent_at: int) -> None:
        self.places = places
        self.shapes = [plan.shapes[place] for place in places]
        self.dtype = np.dtype("float64" if any(plan.dtypes[place] == "float64" for place in places) else "float32")
        self.sent_at = sent_at  # of the steps of one period
        self.outer: Array = np.zeros(0, self.dtype)
        self.outer_state: dict[str, Any] = {}
        self.error: Array | None = None
        self.arriving: _Arriving | None = None

    def drop(self) -> None:
        """Forget the difference under way: go on as if it had not been sent."""
        if self.arriving is not None:
            self.error, self.arriving = self.arriving.error_before, None

    def is_at(self, state: Mapping[str, Any]) -> bool:
        """Whether the outer parameters and the difference under way are those of the state."""
        other = state["arriving"]
        if self.arriving is None or other is None:
            has_same = self.arriving is other
        else:
            mean = self.arriving.transfer.mean()
            has_same = self.arriving.due == other["due"] and np.array_equal(mean, other["mean"], equal_nan=True)
        return has_same and np.array_equal(self.outer, state["outer"], equal_nan=True)

    def read(self, arrays: Sequence[Any]) -> Array:
        """A flat copy of the parameters."""
        values = (adapter_for(arrays[place]).on_host(arrays[place]) for place in self.places)
        return np.concatenate([value.reshape(-1).astype(self.dtype, copy=False) for value in values])

    def write(self, arrays: Sequence[Any], values: Array) -> None:
        begin = 0
        for place, shape in zip(self.places, self.shapes, strict=True):
            end = begin + math.prod(shape)
            adapter_for(arrays[place]).assign_host(arrays[place], values[begin:end].reshape(shape))
            begin = end


_living: weakref.WeakSet[LocalSteps] = weakref.WeakSet()
_made = 0  # in this process, for their order
_numbers_taken = 0  # in this generation


class LocalSteps:
    """Counts inner steps and carries out the outer ones. One thread at a time.

    All ranks construct it together, and call `before_step` and `after_step` in each inner step.

    Args:
        arrays: the parameters by name: arrays of any library that can be written in place.
        settings: checked.

    Raises:
        NotInitializedError: before init().
        MismatchError: on all ranks, these do not have the same settings, or parameters of the same names, dtypes and
            shapes.
        TypeError, ValueError: see `Plan` and `Islands`.
    """

    def __init__(self, arrays: Mapping[str, Any], settings: Settings) -> None:
        global _made
        session.size()
        self._settings = settings
        self._plan = Plan(arrays, settings.fragments, settings.every)
        self.islands = Islands(settings.islands)
        self._sender = _Sender(settings.compression, self.islands)
        every, count = settings.every, len(self._plan.fragments)
        self._fragments = [
            _Fragment(places, self._plan, (number + 1) * every // count % every)
            for number, places in enumerate(self._plan.fragments)
        ]
        self._weight: float | None = None  # of this rank in the means of differences
        self.inner_steps = 0
        self.outer_steps = 0  # of the last fragment, which is the last of a period
        self._has_outer = False
        self._is_compared = False
        self._is_formed = False  # in this generation
        self._generation = 0  # 0 in a job that is not elastic
        self._rank_in: dict[int, int] = {}  # of this process in each generation
        self._prefix = ""
        self.begin_generation()
        self.number = _made
        _made += 1
        _living.add(self)

    def begin_generation(self) -> None:
        """Agree with all ranks of a new generation, and form its islands. They call it together."""
        global _numbers_taken
        self._prefix = f"diloco{_numbers_taken}"
        _numbers_taken += 1
        self._is_compared = False
        self.islands.choose()
        seat = elastic_client.seat()
        self._generation = 0 if seat is None else seat.generation
        self._rank_in[self._generation] = session.rank()
        self._require_same({**self._settings.describe(), **self._plan.describe(), "islands": self.islands.lists})
        self.islands.form()
        self._is_formed = True

    def end_generation(self) -> None:
        """Drop what is under way: its operations end with the generation. Means for which `state_dict` waited stay."""
        self._is_formed = False
        for fragment in self._fragments:
            if fragment.arriving is not None and not fragment.arriving.transfer.has_come:
                fragment.drop()

    @property
    def is_transferring(self) -> bool:
        """Whether a difference is under way."""
        return any(fragment.arriving is not None for fragment in self._fragments)

    def wait(self) -> None:
        """Wait for the differences under way; they still arrive at their steps.

        Raises:
            RingtrainError: a transfer failed; see ringtrain.errors.
        """
        for fragment in self._fragments:
            if fragment.arriving is not None:
                fragment.arriving.transfer.mean()

    def set_weight(self, weight: Any) -> None:
        """Weigh the differences that this rank sends from now on; None: those of all ranks alike.

        Raises:
            ValueError: the weight is negative, NaN or infinite. TypeError: not a number.
        """
        self._weight = None if weight is None else require_weight(weight, ops.Average, "DiLoCo")

    def require_count(self, parameters: int) -> None:
        """Raises ValueError for another number of parameters than at construction."""
        if parameters != len(self._plan.names):
            raise ValueError(
                f"step: {parameters} parameters, but DiLoCo was constructed for {len(self._plan.names)}; construct it "
                "when the optimizer has all of them"
            )

    def due(self) -> set[int]:
        """The places of the parameters that `after_step` reads or writes behind the next inner step."""
        step = self.inner_steps + 1
        return {
            place
            for fragment in self._fragments
            if self._is_sent_at(fragment, step) or (fragment.arriving is not None and fragment.arriving.due <= step)
            for place in fragment.places
        }

    def keep_outer(self, arrays: Sequence[Any]) -> None:
        """Before the first update: keep the parameters that all ranks begin with. Does nothing later."""
        if self._has_outer:
            return
        for fragment in self._fragments:
            fragment.outer = fragment.read(arrays)
            fragment.outer_state = self._settings.outer.create_state(0, fragment.outer)
        self._has_outer = True

    def before_step(self, arrays: Sequence[Any]) -> None:
        """Before each update; keeps the parameters of the first one.

        After a generation, a difference that was under way arrives if all ranks have its mean: if each of them called
        `state_dict` meanwhile, or loaded such a state. Otherwise all ranks go on as if it had not been sent.

        Raises:
            ReplicaError: on all ranks in the first step, these do not begin with the same outer parameters.
        """
        if not self._is_formed:  # the job was left and joined again, and is not elastic
            self.begin_generation()
        self.keep_outer(arrays)
        if not self._is_compared:
            self._require_replicas()
            self._share_errors()
            self._is_compared = True

    def after_step(self, arrays: Sequence[Any]) -> None:
        """After the update: what is due arrives, then what is due is sent.

        Raises:
            RingtrainError: a transfer failed; see ringtrain.errors.
        """
        self.inner_steps += 1
        self._arrive(arrays)
        for number, fragment in enumerate(self._fragments):
            if self._is_sent_at(fragment, self.inner_steps):
                self._send(number, fragment, arrays, self._settings.overlap)
        self._arrive(arrays)

    def outer_step(self, arrays: Sequence[Any]) -> None:
        """Synchronise the whole model now: afterwards all ranks have the outer parameters. They call it together.

        Raises:
            RingtrainError: a transfer failed; see ringtrain.errors.
        """
        self.before_step(arrays)
        for fragment in self._fragments:
            if fragment.arriving is not None:
                self._take(fragment, arrays)
        for number, fragment in enumerate(self._fragments):
            self._send(number, fragment, arrays, 0)
        for fragment in self._fragments:
            self._take(fragment, arrays)
            fragment.write(arrays, fragment.outer)

    def _is_sent_at(self, fragment: _Fragment, step: int) -> bool:
        return step % self._settings.every == fragment.sent_at

    def _send(self, number: int, fragment: _Fragment, arrays: Sequence[Any], overlap: int) -> None:
        difference = fragment.outer - fragment.read(arrays)
        error_before = fragment.error
        if error_before is not None:
            difference += error_before
        transfer, fragment.error = self._sender.send(f"{self._prefix}.fragment{number}", difference, self._weight)
        fragment.arriving = _Arriving(self.inner_steps + overlap, transfer, error_before)

    def _arrive(self, arrays: Sequence[Any]) -> None:
        for fragment in self._fragments:
            if fragment.arriving is not None and fragment.arriving.due <= self.inner_steps:
                self._take(fragment, arrays)

    def _take(self, fragment: _Fragment, arrays: Sequence[Any]) -> None:
        assert fragment.arriving is not None and self._settings.mixing is not None
        mean = fragment.arriving.transfer.mean()
        fragment.arriving = None
        self._settings.outer.update(0, fragment.outer, mean, fragment.outer_state)
        mixing = fragment.dtype.type(self._settings.mixing)
        mixed = fragment.outer
        if mixing:
            mixed = mixing * fragment.read(arrays) + (1 - mixing) * fragment.outer
        fragment.write(arrays, mixed)
        self.outer_steps += fragment is self._fragments[-1]

    # --- agreement

    def _require_same(self, description: dict[str, Any]) -> None:
        if session.size() == 1:
            return
        words = json.dumps(description, default=str).encode()
        digest = np.frombuffer(hashlib.sha256(words).digest(), np.uint8)
        of_ranks = ops.allgather(digest[None], name=f"{self._prefix}.settings")
        if (of_ranks == of_ranks[0]).all():
            return
        everyone = objects.allgather_object(description, name=f"{self._prefix}.differing")
        raise MismatchError(_difference_of(everyone))

    def _require_replicas(self) -> None:
        if session.size() == 1:
            return
        dues = [0 if fragment.arriving is None else fragment.arriving.due for fragment in self._fragments]
        digests = [digest_of(fragment.outer) for fragment in self._fragments]
        own = np.array([[*dues, self.inner_steps, *digests]], np.int64)
        all_dues, of_ranks = np.split(ops.allgather(own, name=f"{self._prefix}.outer"), [len(dues)], axis=1)
        steps = of_ranks[:, 0].tolist()
        if len(set(steps)) > 1:
            raise ReplicaError(
                f"DiLoCo: the ranks have taken different numbers of inner steps, {steps}: load a checkpoint of the "
                "same step on all ranks"
            )
        odd = [rank for rank in range(len(of_ranks)) if (of_ranks[rank] != of_ranks[0]).any()]
        if odd:
            raise ReplicaError(
                f"DiLoCo: {list_of_ranks(odd)} and rank 0 have different outer parameters: call broadcast_parameters() "
                "before the first step, or load checkpoints of one job"
            )
        for fragment, of_fragment in zip(self._fragments, all_dues.T, strict=True):
            if (of_fragment != of_fragment[0]).any():
                fragment.drop()

    def _share_errors(self) -> None:
        """Give the ranks of this island the mean of their errors, so that these go on with the same difference.

        The errors differ if the ranks were in different islands before, or if one of the ranks is new.
        """
        own, name = self.islands.of_rank, f"{self._prefix}.errors"
        if len(self.islands.own) == 1:
            return
        digests = [0 if fragment.error is None else digest_of(fragment.error) for fragment in self._fragments]
        of_ranks = ops.allgather(np.array([digests], np.int64), name=name, process_set=own)
        for number, fragment in enumerate(self._fragments):
            if (of_ranks[:, number] != of_ranks[0, number]).any():
                error = np.zeros_like(fragment.outer) if fragment.error is None else fragment.error
                fragment.error = ops.allreduce(error, name=f"{name}{number}", op=ops.Average, process_set=own)

    # --- checkpoints

    def state_dict(self, with_errors: bool = True) -> dict[str, Any]:
        """Return the outer half of a checkpoint of this rank: copies, NumPy arrays among them.

        Waits for the differences under way, which all ranks have submitted; their means are part of it. Without errors
        it is the same on all ranks.
        """
        return {
            "format": _FORMAT,
            "inner_steps": self.inner_steps,
            "outer_steps": self.outer_steps,
            "hyperparameters": copy.deepcopy(self._settings.outer.hyperparameters()),
            "fragments": [self._state_of(fragment) for fragment in self._fragments] if self._has_outer else [],
            "errors": self._state_of_errors() if with_errors and self._has_outer else None,
        }

    def _state_of_errors(self) -> dict[str, Any]:
        errors = [None if fragment.error is None else fragment.error.copy() for fragment in self._fragments]
        return {"generation": self._generation, "ranks": list(self.islands.own), "fragments": errors}

    def _state_of(self, fragment: _Fragment) -> dict[str, Any]:
        arriving = None
        if fragment.arriving is not None:
            arriving = {"due": fragment.arriving.due, "mean": fragment.arriving.transfer.mean().copy()}
        return {
            "names": [self._plan.names[place] for place in fragment.places],
            "outer": fragment.outer.copy(),
            "outer_state": copy.deepcopy(fragment.outer_state),
            "arriving": arriving,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has returned.

        The ranks of the island that has saved the state take its errors, others begin without: an error must be sent by
        one island alone. After a state without errors a rank keeps its own ones if the state differs in nothing else.

        Raises:
            ValueError: it is something else, or that of other fragments or parameters.
        """
        if state.get("format") != _FORMAT:
            raise ValueError(f'load_state_dict: this is not the state of DiLoCo: it lacks format="{_FORMAT}"')
        content = state["fragments"]
        if content and [one["names"] for one in content] != self._plan.describe()["fragments"]:
            raise ValueError(
                f"load_state_dict: the checkpoint has {len(content)} fragments with other parameters than these "
                f"{len(self._fragments)}; give DiLoCo the fragments= of the run that saved it"
            )
        for fragment, one in zip(self._fragments, content, strict=False):
            size = sum(math.prod(shape) for shape in fragment.shapes)
            if np.shape(one["outer"]) != (size,):
                raise ValueError(
                    f"load_state_dict: the fragment of {_listed(one['names'])} has {np.size(one['outer'])} values in "
                    f"the checkpoint and {size} in this model"
                )
        errors = self._errors_after(state)
        for name, value in state["hyperparameters"].items():
            setattr(self._settings.outer, name, value)
        self.inner_steps, self.outer_steps = int(state["inner_steps"]), int(state["outer_steps"])
        self._has_outer, self._is_compared = bool(content), False
        for fragment, error in zip(self._fragments, errors, strict=True):
            fragment.error, fragment.arriving = error, None
        for fragment, one in zip(self._fragments, content, strict=False):  # none before the first step
            fragment.outer = np.array(one["outer"], fragment.dtype)
            fragment.outer_state = copy.deepcopy(dict(one["outer_state"]))
            arriving = one["arriving"]
            if arriving is not None:
                mean = np.array(arriving["mean"], fragment.dtype)
                fragment.arriving = _Arriving(int(arriving["due"]), _Transfer.done(mean), None)

    def _errors_after(self, state: Mapping[str, Any]) -> list[Array | None]:
        """Returns the error of each fragment after loading the state."""
        none: list[Array | None] = [None for _ in self._fragments]
        saved, content = state["errors"], state["fragments"]
        if saved is not None:
            rank = self._rank_in.get(saved["generation"], self._rank_in[self._generation])
            errors = zip(self._fragments, saved["fragments"], strict=True)
            is_own = rank in saved["ranks"]
            return [np.array(one, of.dtype) if one is not None else None for of, one in errors] if is_own else none
        is_at = self._has_outer and bool(content) and self.inner_steps == int(state["inner_steps"])
        if is_at and all(fragment.is_at(one) for fragment, one in zip(self._fragments, content, strict=True)):
            return [fragment.error for fragment in self._fragments]
        return none


def _difference_of(everyone: Sequence[dict[str, Any]]) -> str:
    """The message about the first thing that is not the same on all ranks."""
    for name, value in everyone[0].items():
        values = [one[name] for one in everyone]
        odd = next((rank for rank, one in enumerate(values) if one != value), None)
        if odd is None:
            continue
        if name == "parameters":
            return _difference_of_parameters(value, values[odd], odd)
        return f"DiLoCo: rank 0 has {name}={value}, rank {odd} has {name}={values[odd]}; give all ranks the same"
    raise AssertionError("the descriptions differ, and none of their parts")


def _difference_of_parameters(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> str:
    for name in [*first, *other]:
        if first.get(name) != other.get(name):
            kinds = first.get(name, "missing"), other.get(name, "missing")
            return (
                f'DiLoCo: parameter "{name}" is {kinds[0]} on rank 0 and {kinds[1]} on rank {rank}. '
                "Do all ranks build the same model?"
            )
    return f"DiLoCo: rank 0 and rank {rank} have their parameters in different orders"


def _begin_generation(_settings: dict[str, str]) -> None:
    """A process that is new to an elastic job constructs its optimizers now, and the others take part in that."""
    global _numbers_taken
    _numbers_taken = 0
    if not elastic_client.is_elastic():
        return
    for steps in sorted(_living, key=operator.attrgetter("number")):
        steps.begin_generation()


def _end_generation() -> None:
    for steps in list(_living):
        steps.end_generation()


session.at_init(_begin_generation)
session.at_shutdown(_end_generation)


class HasLocalSteps:
    """An optimizer of DiLoCo, of any array library, as far as all of them are alike."""

    _local_steps: LocalSteps

    @property
    def inner_steps(self) -> int:
        """How many inner steps this rank has taken, those that a GradScaler of torch left out included."""
        return self._local_steps.inner_steps

    @property
    def outer_steps(self) -> int:
        """How often the last fragment has been synchronised."""
        return self._local_steps.outer_steps

    @property
    def is_transferring(self) -> bool:
        """Whether a difference is under way. `state_dict` waits for it."""
        return self._local_steps.is_transferring

    def wait(self) -> None:
        """Wait for the differences under way, as `state_dict` does; they still arrive at their steps.

        They also arrive after shutdown() and another init() if each rank has waited for them before. Otherwise all
        ranks go on as if these differences had not been sent.

        Raises:
            RingtrainError: a transfer failed; see ringtrain.errors.
        """
        self._local_steps.wait()
