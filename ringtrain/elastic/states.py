"""The state that a job must not lose, with a last commit to which all ranks can go back."""

from __future__ import annotations

import copy
import hashlib
import pickle
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ringtrain import ops, pickling
from ringtrain.arrays.adapter import adapter_for
from ringtrain.errors import HostsUpdatedInterrupt, list_of_ranks
from ringtrain.job import elastic_client, session
from ringtrain.ops import objects, preemption
from ringtrain.pickling import whole_file
from ringtrain.record.logger import logger
from ringtrain.training.power_sgd import replicated_state_of
from ringtrain.training.replicas import digest_of, vote

# --- agreement: the parts that differ between the ranks are found by 64 bits of each, and only those are sent ---------


# While a state is synchronized, the ranks with its newest commit, which should have the same; none before a commit.
_voters: ContextVar[Sequence[int]] = ContextVar("voters", default=())


def newest_ranks(commits: int) -> tuple[list[int], int]:
    """The ranks with the most commits, and how many these are. All ranks call it together."""
    of_ranks = ops.allgather(np.array([commits], np.int64), name="elastic.commits")
    newest = int(of_ranks.max())
    return np.flatnonzero(of_ranks == newest).tolist(), newest


def differing(digests: Sequence[int], name: str) -> list[bool]:
    """Says of each number whether the ranks have different ones. All ranks call it together, with as many numbers."""
    own = np.array(digests, np.int64)
    # the smallest is the complement of the largest complement
    largest = ops.allreduce(np.concatenate([own, ~own]), op=ops.Max, name=f"elastic.{name}")
    return [bool(one) for one in largest[: len(own)] != ~largest[len(own) :]]


def share_arrays(arrays: Mapping[str, Any], root_rank: int, name: str) -> bool:
    """Overwrite, in place, those arrays that differ between the ranks.

    They become those of `root_rank`, or, if ranks with the newest commit do not have the same, what most of these have.
    Returns whether there were any. The ranks must have the same names, dtypes and shapes.
    """
    if session.size() == 1:
        return False
    digests = [digest_of(array) for array in arrays.values()]
    are_different = differing(digests, name)
    if not any(are_different):
        return False
    different = [index for index, is_different in enumerate(are_different) if is_different]
    paths = list(arrays)
    roots = _roots([digests[index] for index in different], [paths[index] for index in different], root_rank, name)
    handles = [
        ops.broadcast_async_(arrays[paths[index]], root, name=f"elastic.{name}.{paths[index]}")
        for index, root in zip(different, roots, strict=True)
    ]
    for handle in handles:
        ops.synchronize(handle)
    return bool(handles)


def _roots(digests: Sequence[int], paths: Sequence[str], root_rank: int, name: str) -> list[int]:
    """Returns the rank of which all get each array. Rank 0 says which ranks have been outvoted."""
    voters = list(_voters.get())
    if len(voters) < 2:
        return [root_rank] * len(paths)
    of_ranks = ops.allgather(np.array([digests], np.int64), name=f"elastic.{name}.digests")
    roots = []
    for place, path in enumerate(paths):
        found = vote(of_ranks[voters, place].tolist())
        right, odd = [voters[one] for one in found.right], [voters[one] for one in found.odd]
        roots.append(root_rank if found.is_tie or not odd else right[0])
        # Where no two agree, each rank has its own on purpose, such as the statistics of a batch normalisation.
        if session.rank() == 0 and odd and len(right) > 1:
            tie = "; as many have one value as another" if found.is_tie else ""
            logger.warning(
                'elastic: "%s" differs on %s from %s%s. All go on with that of rank %d',
                *(f"{name}.{path}" if path else name, list_of_ranks(odd), list_of_ranks(right), tie, roots[-1]),
            )
    return roots


def share_object(
    value: Any,
    root_rank: int,
    name: str,
    take: Callable[[Any], object],
    broadcast: Callable[..., Any] = objects.broadcast_object,
) -> None:
    """Give `take` the object of `root_rank` on all ranks if it differs between them.

    Objects that are equal may have different pickles; then they are sent for nothing.
    """
    if not is_same(pickling.dumps(value), name):
        take(broadcast(value, **({"root_rank": root_rank} if root_rank else {})))


def is_same(content: bytes, name: str) -> bool:
    """Whether all ranks have the same. They call it together."""
    if session.size() == 1:
        return True
    digest = int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)
    return not differing([digest], name)[0]


# --- a state on disk --------------------------------------------------------------------------------------------------


_FORMAT = "ringtrain elastic state 1"


class Found(NamedTuple):
    """The content of a file."""

    commits: int
    content: Any


class Checkpoint:
    """One file, which is always whole.

    Args:
        every_s: how often it is written.
    """

    def __init__(self, path: Path, every_s: float):
        self._path = path
        self._every_s = every_s
        self._written_s = time.monotonic()

    def read(self) -> Found | None:
        """None where there is no file. Raises ValueError for what is not such a file."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            found = pickle.loads(content)
            if found["format"] != _FORMAT:
                raise KeyError("format")
            return Found(found["commits"], found["content"])
        except (pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
            raise ValueError(f"{self._path} is not a file that save_to has written: {error}") from None

    def write_if_due(self, commits: int, content: Callable[[], Any], is_last: bool) -> None:
        """A disk that is full is no reason to end the job: it is said, and tried again."""
        if time.monotonic() - self._written_s < self._every_s and not is_last:
            return
        self._written_s = time.monotonic()
        try:
            with whole_file(self._path) as file:
                file.write(pickling.dumps({"format": _FORMAT, "commits": commits, "content": content()}))
        except OSError as error:
            logger.error("the state cannot be written to %s: %s", self._path, error)


# --- states -----------------------------------------------------------------------------------------------------------


class State(ABC):
    """The state that `run` keeps through the generations of a job. Mirrors `horovod.common.elastic.State`.

    A subclass says how it is saved, restored and made the same on all ranks.

    Args:
        bcast_object: sends an object of rank 0 to all ranks, as `broadcast_object`.
        get_rank: returns this process' rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]):
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], object]] = []
        self._commits = 0
        # (timestamp, result) of updates of the hosts; the name is Horovod's, whose subclasses use it
        self._host_messages: queue.Queue[tuple[float, Any]] = queue.Queue()
        self._checkpoint: Checkpoint | None = None

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Registers functions to call in each new generation, before the state is made the same on all ranks."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """A new generation has begun. Called by `run`."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: Any) -> None:
        """Makes the next `commit` or `check_host_updates` raise HostsUpdatedInterrupt. Any thread."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state; `run` comes back to it when a rank is lost. All ranks call it together.

        When it has returned on any rank, all ranks that live have saved this state. It costs a copy and one small
        operation: with large states commit every few steps.

        Raises:
            HostsUpdatedInterrupt: on all ranks alike, as `check_host_updates`.
        """
        self.save()
        self._commits += 1
        elastic_client.set_commits(self._commits)
        self.check_host_updates()
        if self._checkpoint is not None and session.rank() == 0:
            self._checkpoint.write_if_due(self._commits, self.saved_content, preemption.is_agreed())

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if any of them knows that others are to come or to go.

        All ranks call it together.
        """
        has_news = not self._host_messages.empty() or elastic_client.has_news()
        if elastic_client.is_elastic():
            has_news = bool(ops.allreduce(np.array([has_news], np.uint8), op=ops.Max, name="elastic.news")[0])
        if has_news:
            raise HostsUpdatedInterrupt

    @property
    def should_checkpoint(self) -> bool:
        """Whether the job is about to be ended, the same on all ranks. All ranks ask for it together, as `preempted`.

        From then on each commit writes the file of `save_to`.
        """
        return preemption.preempted() is not None

    def save_to(self, path: str | Path, every_s: float = 60.0) -> None:
        """Write commits to a file, too, and go on from what is there: for when all ranks are lost.

        Rank 0 writes the file beside its place and renames it, so it is always whole. All ranks call this before `run`
        with the same path; where hosts share no folder, those that have the newest file have the newest state.

        Args:
            path: of the file. It is read by pickle, so it must be as trustworthy as the script.
            every_s: how often; 0 writes every commit. A commit that is written waits for the disk.
        """
        self._checkpoint = Checkpoint(Path(path), every_s)
        found = self._checkpoint.read()
        if found is not None:
            self._commits = found.commits
            elastic_client.set_commits(self._commits, are_read=True)
            self.load_content(found.content)
            self.save()

    def sync(self) -> None:
        """Make the state that of the rank with the newest commit, on all ranks. They call it together.

        Parts that all ranks have alike are compared, and not sent.
        """
        ranks, commits = newest_ranks(self._commits)
        token = _voters.set(ranks if commits > 0 else ())
        try:
            self.sync_from(ranks[0])
        finally:
            _voters.reset(token)
        self.save()

    def sync_from(self, root_rank: int) -> None:
        """Make the state that of this rank, which is 0 unless `save_to` has found another one with a newer file."""
        raise NotImplementedError(f"{type(self).__name__} has neither sync_from() nor a sync() of its own")

    def count_on(self) -> None:
        """After `sync`, in which a rank may have been lost: take over the number of commits. Called by `run`."""
        _, self._commits = newest_ranks(self._commits)
        elastic_client.set_commits(self._commits)

    @abstractmethod
    def save(self) -> None:
        """Keep a copy of the state in this process."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the copy."""

    def saved_content(self) -> Any:
        """The copy, as something that can be pickled."""
        raise TypeError(f"{type(self).__name__} does not say how it is written to a file: define saved_content()")

    def load_content(self, content: Any) -> None:
        """Take over what `saved_content` has returned, also in another process."""
        raise TypeError(f"{type(self).__name__} does not say how it is read from a file: define load_content()")

    def reset(self) -> None:  # noqa: B027
        """Whatever a new generation needs. Does nothing here."""


class ObjectState(State):
    """Python objects, each an attribute of this one. Mirrors `horovod.common.elastic.ObjectState`.

    Args:
        bcast_object, get_rank: see `State`.
        kwargs: the attributes.
    """

    _objects: dict[str, Any]

    if TYPE_CHECKING:  # what checks types does not know which attributes it is given

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(
        self,
        bcast_object: Callable[..., Any] = objects.broadcast_object,
        get_rank: Callable[[], int] = session.rank,
        **kwargs: Any,
    ):
        self._objects = kwargs
        self._set_attributes()
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        self._objects = copy.deepcopy(self._current())

    def restore(self) -> None:
        self._set_attributes()

    def sync_from(self, root_rank: int) -> None:
        if self._objects:
            share_object(self._current(), root_rank, "objects", self._take, self._bcast_object)

    def _take(self, values: dict[str, Any]) -> None:
        self._objects = values
        self._set_attributes()

    def saved_content(self) -> Any:
        return self._objects

    def load_content(self, content: Any) -> None:
        self._take({name: content.get(name, value) for name, value in self._objects.items()})

    def _current(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._objects}

    def _set_attributes(self) -> None:
        for name, value in copy.deepcopy(self._objects).items():
            setattr(self, name, value)


# --- arrays of any library, and optimizers and other objects beside them ----------------------------------------------


class ArrayState(ObjectState):
    """Arrays, optimizers and other objects, each an attribute of this one.

    Args:
        values: an array, or arrays in lists and dicts, nested as you like, are saved, restored and overwritten in
            place; what has `state_dict` and `load_state_dict`, such as the optimizers of ringtrain, is asked for these;
            anything else is a Python object.
    """

    _copies: dict[str, dict[str, Any]]  # of the arrays of each attribute, by their paths
    _holders: dict[str, Any]  # of each attribute that has a state_dict: the copy
    _in_files = "arrays"  # the name of the copies there

    def __init__(self, **values: Any):
        arrays = {name: value for name, value in values.items() if self._has_arrays(value)}
        holders = {name: value for name, value in values.items() if name not in arrays and has_state_dict(value)}
        self._copies = {name: {} for name in arrays}
        self._holders = dict.fromkeys(holders)
        for name, value in {**arrays, **holders}.items():
            setattr(self, name, value)
        super().__init__(**{name: value for name, value in values.items() if name not in {**arrays, **holders}})
        self.save()

    def save(self) -> None:
        # DiLoCo waits for what is under way, and raises if a rank is lost. JAX may tell now that a step has failed.
        # Then nothing of this commit is kept.
        holders = {name: getattr(self, name).state_dict() for name in self._holders}
        found = {name: self._by_path(name) for name in self._copies}
        super().save()
        self._copies = {name: self._kept(arrays, self._copies[name]) for name, arrays in found.items()}
        self._holders = holders

    def restore(self) -> None:
        super().restore()
        for name, copies in self._copies.items():
            self._put(name, copies)
        for name, content in self._holders.items():
            getattr(self, name).load_state_dict(content)

    def sync_from(self, root_rank: int) -> None:
        super().sync_from(root_rank)
        for name in self._copies:
            arrays = self._by_path(name)
            if share_arrays(arrays, root_rank, name):
                self._put(name, arrays)
        for name in self._holders:
            holder = getattr(self, name)
            share_object(replicated_state_of(holder), root_rank, name, holder.load_state_dict)

    def saved_content(self) -> Any:
        arrays = {
            name: {path: adapter_for(array).on_host(array) for path, array in copies.items()}
            for name, copies in self._copies.items()
        }
        return {"objects": super().saved_content(), self._in_files: arrays, "holders": self._holders}

    def load_content(self, content: Any) -> None:
        super().load_content(content["objects"])
        for name in self._copies:
            self._put(name, content[self._in_files][name])
        for name in self._holders:
            getattr(self, name).load_state_dict(content["holders"][name])

    @staticmethod
    def _has_arrays(value: Any) -> bool:
        if has_state_dict(value):
            return False
        try:
            return bool(objects.by_path(value, "ArrayState"))
        except TypeError:
            return False

    def _by_path(self, name: str) -> dict[str, Any]:
        """Returns the arrays of an attribute, which can be written to."""
        return objects.by_path(getattr(self, name), "ArrayState")

    def _kept(self, arrays: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        """Returns copies of the arrays, in the memory of those from before that fit."""
        for path, array in arrays.items():
            adapter, place = adapter_for(array), before.get(path)
            if place is None or place.shape != array.shape or place.dtype != array.dtype:
                before[path] = place = adapter.empty_like(array)
            adapter.assign(place, array)
        return before

    def _put(self, name: str, copies: dict[str, Any]) -> None:
        """Gives an attribute the values of copies."""
        for path, array in self._by_path(name).items():
            if copies[path] is not array:
                adapter_for(array).assign(array, copies[path])


def has_state_dict(value: Any) -> bool:
    """Whether it says itself how it is saved and loaded."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
