"""Backends carry out the calls of a KVStore: the interface, and those that need no servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import ringtrain._core as _core
from ringtrain import ops
from ringtrain._core import OpKind, ReduceOp
from ringtrain.arrays.adapter import adapter_for
from ringtrain.engine.handles import Handle, Pending, on_gpu_of
from ringtrain.engine.process_sets import ProcessSet
from ringtrain.errors import MismatchError, NotInitializedError
from ringtrain.failure import call_site
from ringtrain.job import session
from ringtrain.kvstore import places, state_files
from ringtrain.kvstore.entries import Entries, Entry, Key, Kind
from ringtrain.kvstore.gradient_compression import GradientCompression
from ringtrain.kvstore.row_sparse import Array, RowSparse, sum_of
from ringtrain.kvstore.state_files import Arrays
from ringtrain.kvstore.update_rules import Rates
from ringtrain.kvstore.updaters import LocalUpdater, Updater
from ringtrain.ops.objects import allgather_object, broadcast_object

# A function of key, sum and stored value, which it changes.
Function = Callable[[Key, Any, Any], object]
# Keys with the values or the arrays that a call has given them.
Groups = list[tuple[Entry, list[Any]]]
_VALUE, _STATE = "value/", "state/"


class Backend:
    """Holds the values of a KVStore, which has checked the arguments. One thread at a time.

    Methods that concern other workers are those of a store with one worker.
    """

    rank = local_rank = 0
    num_local_workers = 1
    is_recovery = False

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.entries = Entries()
        self.updater: Updater | None = None
        self.function: Function | None = None  # of set_updater
        self.compression: GradientCompression | None = None

    # --------------------------------------------------------------------------------------------------- values

    def begin(self, arrays: dict[Key, Any]) -> None:
        """Gives each key the value that its array has on rank 0: a copy, in the entry that it has or in a new one."""
        raise NotImplementedError

    def push(self, groups: Groups, priority: int, copies: bool) -> list[Pending[Any]]:
        """Begins to push. Returns what to wait for before the values may be changed."""
        raise NotImplementedError

    def pull(self, groups: Groups, priority: int) -> None:
        """Fills the arrays of each key with its value."""
        for entry, outs in groups:
            value = self.value(entry)
            for one in outs:
                places.copy_into(one, value)

    def pushpull(self, groups: list[tuple[Entry, list[Any], list[Any]]], priority: int) -> None:
        """Pushes the first list of each key and fills the second with the result."""
        raise NotImplementedError

    def push_rows(self, entry: Entry, values: Sequence[RowSparse], priority: int) -> list[Pending[Any]]:
        """Pushes rows; here as a whole value with zeros in all others."""
        total = sum_of(entry, values)
        whole = np.zeros(entry.shape, total.rows.dtype)
        whole[total.indices] = total.rows
        return self.push([(entry, [whole])], priority, copies=False)

    def pull_rows(self, entry: Entry, numbers: Array, priority: int) -> Array:
        """Returns a new array of rows that the key has."""
        value = self.value(entry)
        return np.ascontiguousarray(adapter_for(value).on_host(value)[numbers])

    def finish(self, entry: Entry) -> None:
        """Waits until the value has everything that this worker has pushed."""

    def value(self, entry: Entry) -> Any:
        self.finish(entry)
        return entry.value()

    # -------------------------------------------------------------------------------------------------- updates

    def use(self, updater: LocalUpdater | None, function: Function | None) -> None:
        """Updates values with one of both from now on, on all workers alike; all own pushes are done."""
        self.updater, self.function = updater, function

    def _begin_update(self, entry: Entry) -> Rates | None:
        """Reads what the update by a sum depends on: when it is pushed, so that all workers read the same."""
        if not self._updates():
            return None
        stored = entry.value()
        if not isinstance(self.updater, LocalUpdater):
            return None
        with adapter_for(stored).at_device_of(stored):
            return self.updater.begin(entry.name, stored)

    def _apply(self, entry: Entry, total: Any, rates: Rates | None) -> bool:
        """Updates the value of a key with a sum, or overwrites it. Returns whether `total` has become the value.

        Args:
            rates: from `_begin_update`.
        """
        if not self._updates():
            return self._assign(entry, total)
        stored = entry.value()
        gradient = places.like(total, stored)
        with adapter_for(stored).at_device_of(stored):
            if isinstance(self.updater, LocalUpdater) and rates is not None:
                self.updater.end(entry.name, gradient, stored, rates)
            elif self.function is not None:
                self.function(entry.key, gradient, stored)
        return False

    def _updates(self) -> bool:
        return self.updater is not None or self.function is not None

    def _calls_script(self) -> bool:
        """Returns whether this worker updates with Python of the script, which may read anything: it runs in `push`."""
        return self.function is not None or (self.updater is not None and not self.updater.is_built_in)

    def _assign(self, entry: Entry, total: Any) -> bool:
        places.copy_into(entry.stored, total)
        return False

    # ---------------------------------------------------------------------------------------------------- files

    def save(self, fname: str) -> None:
        """Writes all values and the states of the optimizer. Called on rank 0."""
        values = {_VALUE + entry.name: entry.value() for entry in self.entries.values()}
        arrays = {name: adapter_for(value).on_host(value) for name, value in values.items()}
        if self.updater is not None:
            arrays |= {_STATE + name: array for name, array in self.updater.states().items()}
        state_files.save(fname, arrays)

    def load(self, fname: str) -> None:
        """Raises OSError and ValueError on all workers alike, which have no operation pending. Then nothing changed."""
        arrays = self._of_rank_0(lambda: state_files.load(fname)).arrays
        by_name = {entry.name: entry for entry in self.entries.values()}
        values, remembered = _part(arrays, _VALUE), _part(arrays, _STATE)
        for name, array in values.items():
            if name not in by_name:
                raise ValueError(f'the file has key "{name}", which has no value here; give it one with init')
            if by_name[name].shape != array.shape:
                raise ValueError(f'key "{name}" has shape {by_name[name].shape}, but {array.shape} in the file')
            by_name[name].value()
        if remembered and self.updater is None:
            raise ValueError("the file has what an optimizer remembers; call set_optimizer before load")
        if self.updater is not None:
            self.updater.load_states(remembered)
        for name, array in values.items():
            by_name[name].overwrite(array)

    def load_states(self, updater: Updater, fname: str) -> None:
        """Raises as `load`."""
        updater.load_states(self._of_rank_0(lambda: state_files.load(fname)).arrays)

    def _of_rank_0(self, read: Callable[[], Any]) -> Any:
        """Returns or raises on every worker what `read` does on rank 0."""
        return read()

    # -------------------------------------------------------------------------------------------------- workers

    @property
    def num_workers(self) -> int:
        return 1

    def require_usable(self) -> None:
        """Raises if the workers are others than those that have made the store."""

    def require_same(self, call: str, given: dict[str, Any]) -> None:
        """Raises MismatchError unless all workers have given the same."""

    def barrier(self) -> None:
        """Waits until all workers have come here."""

    def join(self) -> None:
        """Waits until all workers have joined; until then this one pushes zeros."""

    def count_dead(self, node_id: int, timeout_s: float) -> int:
        """Returns 0: the loss of a worker ends the operations of the others with an error."""
        return 0

    def wait_before_exit(self, waits: bool) -> None:
        """Sets whether workers with servers wait for each other at their end."""

    def command(self, head: int, body: str) -> None:
        raise ValueError("send_command_to_servers: there are no servers; every worker has all values")

    def placement(self) -> dict[Key, list[tuple[int, int, int]]]:
        return {}

    def restored(self) -> dict[Key, float]:
        return {}


class LocalBackend(Backend):
    """Adds up the values of the devices of one process, in host memory or on a device.

    Every operation is complete when its call returns; on a GPU it is in the current stream.
    """

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self._bytes_on: Counter[int] = Counter()  # by device
        self._placed: set[Key] = set()

    def begin(self, arrays: dict[Key, Any]) -> None:
        for key, array in arrays.items():
            if key in self.entries:
                places.copy_into(self.entries[key].stored, array)
            else:
                here = array if self.kind.on_device else places.in_host_memory(array)
                self.entries[key] = Entry(key, places.copy_of(here))

    def push(self, groups: Groups, priority: int, copies: bool) -> list[Pending[Any]]:
        if self.kind.on_device:
            self._place(groups)
        for entry, values in groups:
            self._push(entry, values)
        return []

    def pushpull(self, groups: list[tuple[Entry, list[Any], list[Any]]], priority: int) -> None:
        if self.kind.on_device:
            self._place([(entry, values) for entry, values, _ in groups])
        for entry, values, outs in groups:
            self._push(entry, values)
            for one in outs:
                places.copy_into(one, entry.stored)

    def _place(self, groups: Groups) -> None:
        """Spreads the keys of a device store over the devices that have their values: the largest first."""
        new = [group for group in groups if group[0].key not in self._placed]
        for entry, values in sorted(new, key=lambda group: -int(group[0].stored.nbytes)):
            there = {adapter_for(value).device(value): value for value in values}
            device = min(there, key=lambda one: (self._bytes_on[one], one))
            if adapter_for(there[device]).dtype_name(there[device]) == entry.dtype_name:
                entry.move_to(places.like(entry.stored, there[device]))
            self._bytes_on[device] += entry.stored.nbytes
            self._placed.add(entry.key)

    def _push(self, entry: Entry, values: list[Any]) -> None:
        if self.compression is not None:
            values = [self.compression.rounded(one, entry.residuals, place) for place, one in enumerate(values)]
        if not self.kind.on_device:
            values = [places.in_host_memory(one) for one in values]
        rates = self._begin_update(entry)
        self._apply(entry, values[0] if len(values) == 1 else places.sum_of(values, entry.stored), rates)


def require_same(call: str, given: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises MismatchError, which names the first difference.

    Args:
        given: by rank, names and what each rank has for them.
    """
    first_rank = min(given)
    first = given[first_rank]
    for rank, other in given.items():
        for name in sorted({*first, *other}):
            if first.get(name) != other.get(name):
                raise MismatchError(
                    f"{call}: rank {first_rank} has {name}={first.get(name)!r}, rank {rank} has "
                    f"{name}={other.get(name)!r}; give all workers the same"
                )


def each(arguments: Iterable[tuple[Any, ...]], call: Callable[..., object]) -> None:
    """Makes all calls. Raises the first error after the last of them."""
    first_error = None
    for given in arguments:
        try:
            call(*given)
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error


def _part(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


# --- many workers without servers: sums by allreduce, and the same values on every rank -------------------------------

# Operations are named `kv/<number of the store in its process set>/<key>`. A key has one operation in flight; the
# next operation of the same key waits for it in the core.


# With this many workers their codes take more bytes than an allreduce of the decoded values.
_TOO_MANY_FOR_CODES = 32


# An operation, and the name under which the place of its first call is kept.
_Named = tuple[_core.Operation, str]


class _Generation:
    """The time from one init() to the next.

    Stores are numbered within their process set, since a rank may not know the stores of other sets.
    """

    def __init__(self) -> None:
        self.stores: Counter[int] = Counter()  # by process set


_generation = _Generation()


def _begin_generation(_settings: dict[str, str]) -> None:
    global _generation
    _generation = _Generation()


session.at_init(_begin_generation)


class CollectiveBackend(Backend):
    """All workers make their stores in the same order."""

    def __init__(self, kind: Kind, process_set: ProcessSet, averages: bool = False) -> None:
        super().__init__(kind)
        _core.require_initialized()
        self._generation = _generation
        self._process_set = process_set
        of_set = self._number()
        self._prefix = f"kv/{_generation.stores[of_set]}/"
        _generation.stores[of_set] += 1
        self._op = ReduceOp.Average if averages else ReduceOp.Sum
        self.rank = process_set.rank() or 0
        self._ranks = list(process_set.ranks or [])
        nodes = [rank for rank in self._ranks if session.is_on_node_of(rank)]
        self.local_rank, self.num_local_workers = nodes.index(self._ranks[self.rank]), len(nodes)
        self._sends_codes = 1 < len(self._ranks) < _TOO_MANY_FOR_CODES and len(nodes) < len(self._ranks)
        self._operations: dict[tuple[OpKind, str], _Named] = {}
        self._beginning: list[tuple[Entry, Handle[Any], bool]] = []

    # ---------------------------------------------------------------------------------------------------- values

    def begin(self, arrays: dict[Key, Any]) -> None:
        for key, array in arrays.items():
            self.entries[key] = self._begin(key, array)

    def _begin(self, key: Key, array: Any) -> Entry:
        here = array if self.kind.on_device else places.in_host_memory(array)
        known = self.entries.get(key)
        if known is None:
            entry = Entry(key, places.shared_like(here))
        else:
            entry = known
            if entry.stored is None:
                entry.stored = places.shared_like(here)
        places.copy_into(entry.stored, here)
        operation = self._operation(OpKind.BROADCAST, entry)
        self._beginning.append((entry, self._submit(operation, entry.stored, entry.stored, 0), known is None))
        return entry

    def _settle(self) -> None:
        """Waits for the values that init has begun to send: its order may differ between ranks."""
        if not self._beginning:
            return
        beginning, self._beginning = self._beginning, []
        each(beginning, self._settle_one)

    def _settle_one(self, entry: Entry, handle: Handle[Any], is_new: bool) -> None:
        try:
            handle.wait()
        except Exception:
            if is_new:
                self.entries.pop(entry.key, None)
            raise

    def push(self, groups: Groups, priority: int, copies: bool) -> list[Pending[Any]]:
        handles: list[Pending[Any]] = [self._push(entry, values, priority, copies) for entry, values in groups]
        if self._calls_script():
            each(groups, lambda entry, _: self.finish(entry))
        return handles

    def _push(self, entry: Entry, values: list[Any], priority: int, copies: bool) -> Handle[Any]:
        self._finish_what_is_done(entry)
        rates = self._begin_update(entry)
        total, is_own = self._total(entry, values)
        if self.compression is None:
            target = total if is_own else self._memory_for(entry, total)
            if copies and not is_own:
                places.copy_into(target, total)
                total = target
            handle = self._submit(self._operation(OpKind.ALLREDUCE, entry), total, target, priority)
        else:
            handle, target = self._push_compressed(entry, total, priority)
        entry.rounds.append((handle, target, rates))
        return handle

    def _push_compressed(self, entry: Entry, total: Any, priority: int) -> tuple[Handle[Any], Any]:
        compression = self.compression
        assert compression is not None
        if compression.dtype is not None:
            sent = places.cast(total, compression.dtype)
            return self._submit(self._operation(OpKind.ALLREDUCE, entry), sent, sent, priority), sent
        if not self._sends_codes:
            sent = self._memory_for(entry, total)
            compression.round_into(sent, total, entry.residuals)
            return self._submit(self._operation(OpKind.ALLREDUCE, entry), sent, sent, priority), sent
        codes = compression.encode(total, entry.residuals)
        target = self._memory_for(entry, total)
        operation, site = self._operation(OpKind.ALLGATHER, entry)
        view = adapter_for(codes).view(codes)
        core = _core.submit(operation, [view], [], priority=priority, site=call_site(site), waits_for_name=True)
        return Handle(core, (codes, target), lambda done: self._decode_all(done, target)), target

    def _decode_all(self, done: _core.Handle, target: Any) -> None:
        """Adds up the decoded values of all workers, in the order of their ranks."""
        assert self.compression is not None
        ((memory, _, _),) = done.tensors()
        there = places.in_host_memory(target)
        values = adapter_for(there).on_host(there)
        for place, codes in enumerate(memory.reshape(len(self._ranks), -1)):
            self.compression.decode(codes, values, add=place > 0)
        if self._op is ReduceOp.Average:
            values /= len(self._ranks)
        if there is not target:
            places.copy_into(target, values)

    def pushpull(self, groups: list[tuple[Entry, list[Any], list[Any]]], priority: int) -> None:
        self._settle()
        waiting = [self._start_pushpull(*group, priority) for group in groups]
        started = zip(groups, waiting, strict=True)
        each(started, lambda group, handle: self._finish_pushpull(group[0], group[2], handle))

    def _start_pushpull(self, entry: Entry, values: list[Any], outs: list[Any], priority: int) -> Handle[Any] | None:
        """Returns the Handle of an allreduce from the value to its target; None if it pushes in another way."""
        if not self._updates() and self.compression is None:
            handle = self._start_direct(entry, values, outs, priority)
            if handle is not None:
                return handle
        self._push(entry, values, priority, copies=False)
        return None

    def _finish_pushpull(self, entry: Entry, outs: list[Any], handle: Handle[Any] | None) -> None:
        self.finish(entry)
        if handle is not None:
            handle.wait()
            adapter_for(outs[0]).note_change(outs[0])
        else:
            for one in outs:
                places.copy_into(one, entry.value())
        if not self._updates():
            # On all ranks and for all arrays alike, also if the store has the sum, whose memory the next sum takes.
            entry.free, entry.stored = entry.stored if handle is None else None, None

    def _start_direct(self, entry: Entry, values: list[Any], outs: list[Any], priority: int) -> Handle[Any] | None:
        if len(values) > 1 or len(outs) > 1:
            return None
        value, out = values[0], outs[0]
        adapter = adapter_for(out)
        view = adapter.view_in_place(out)
        if view is None or adapter is not adapter_for(value) or value.dtype != out.dtype:
            return None
        device = view[3] if len(view) == 5 else -1
        if adapter.device(value) != device or (device >= 0 and not self.kind.on_device):
            return None
        return self._submit(self._operation(OpKind.ALLREDUCE, entry), value, out, priority, is_awaited=True)

    def finish(self, entry: Entry) -> None:
        self._settle()
        while entry.rounds:
            self._finish_one(entry)

    def _finish_what_is_done(self, entry: Entry) -> None:
        """Frees the sums of completed pushes, which a worker that never pulls would accumulate."""
        self._settle()
        while entry.rounds and entry.rounds[0][0].poll():
            self._finish_one(entry)

    def _finish_one(self, entry: Entry) -> None:
        handle, total, rates = entry.rounds.popleft()
        handle.wait()
        if self.compression is not None:
            total = places.cast(total, "float32")
        if entry.stored is None and not self._updates():
            entry.stored = places.cast(total, entry.dtype_name)
        elif not self._apply(entry, total, rates) and total.nbytes == entry.value().nbytes:
            entry.free = total

    def _assign(self, entry: Entry, total: Any) -> bool:
        """Makes the sum the value, and the memory of the old value free for the next sum."""
        if adapter_for(total) is not adapter_for(entry.stored) or total.dtype != entry.stored.dtype:
            return super()._assign(entry, total)
        entry.free, entry.stored = entry.stored, total
        return True

    def _total(self, entry: Entry, values: list[Any]) -> tuple[Any, bool]:
        """Returns the sum of this worker's values, and whether the array belongs to the store."""
        here = values if self.kind.on_device else [places.in_host_memory(one) for one in values]
        if len(here) == 1:
            return here[0], here[0] is not values[0]
        return places.sum_of(here, here[0]), True

    def _memory_for(self, entry: Entry, total: Any) -> Any:
        """Returns an array like `total` for the sum over the workers."""
        free, entry.free = entry.free, None
        fits = free is not None and adapter_for(free) is adapter_for(total) and free.dtype == total.dtype
        return free if fits and places.is_same_place(free, total) else places.shared_like(total)

    # ------------------------------------------------------------------------------------------------ operations

    def _operation(self, kind: OpKind, entry: Entry) -> _Named:
        operation = self._operations.get((kind, entry.name))
        if operation is None:
            name = self._prefix + entry.name
            root = self._ranks[0] if kind == OpKind.BROADCAST else 0
            made = _core.Operation(kind, name, process_set=self._number(), op=self._op, root=root)
            operation = self._operations[kind, entry.name] = made, f"{kind.name} {name}"
        return operation

    def _submit(self, named: _Named, source: Any, target: Any, priority: int, is_awaited: bool = False) -> Handle[Any]:
        operation, site = named
        adapter = adapter_for(target)
        view = adapter.view(target)
        core = _core.submit(
            operation,
            [view if source is target else adapter.view(source)],
            [view],
            priority=priority,
            is_awaited=is_awaited,
            site=call_site(site),
            waits_for_name=True,
        )
        return Handle(core, (source, target), None, on_gpu_of(adapter, target, view))

    def _number(self) -> int:
        number = self._process_set.process_set_id
        if number is None:
            raise ValueError(f"the process set of this store is no longer registered: {self._process_set}")
        return number

    # --------------------------------------------------------------------------------------------------- workers

    @property
    def num_workers(self) -> int:
        return len(self._ranks)

    def barrier(self) -> None:
        ops.barrier(self._process_set)

    def join(self) -> None:
        if self._sends_codes and self.compression is not None and self.compression.dtype is None:
            raise ValueError(
                f"join: the others' pushes wait for the codes of this worker, since {self.compression.kind} is sent "
                'between hosts; use "fp16" or "bf16", or give all workers as many batches'
            )
        last = ops.join(process_set=self._process_set)
        self._take_over(last)

    def _take_over(self, last: int) -> None:
        """Takes the values and states of the last worker to join, whose last sums the others have missed."""
        entries = sorted(self.entries.values(), key=lambda entry: entry.name)
        own = self.updater.states() if self.updater is not None and self._ranks[self.rank] == last else None
        remembered = broadcast_object(own, last, process_set=self._process_set)
        if self.updater is not None and own is None:
            self.updater.load_states(remembered)
        # A value that one worker has given away by its last pushpull is lost for all.
        with_value = {entry.name for entry in entries if entry.stored is not None}
        kept = set.intersection(*allgather_object(with_value, process_set=self._process_set))
        handles = []
        for entry in entries:
            if entry.name in kept:
                handles.append(ops.broadcast_async_(entry.stored, last, process_set=self._process_set))
            else:
                entry.stored = entry.free = None
        for handle in handles:
            handle.wait()

    def require_usable(self) -> None:
        _core.require_initialized()  # in a forked child it says that
        if self._generation is not _generation:
            raise NotInitializedError(
                f'this "{self.kind.name}" store was made before the last init() or the last change of the ranks; make '
                "a new one after it, such as at the beginning of the function that hvd.elastic.run calls"
            )

    def require_same(self, call: str, given: dict[str, Any]) -> None:
        everybody = allgather_object(given, process_set=self._process_set)
        require_same(call, dict(zip(self._ranks, everybody, strict=True)))

    def _of_rank_0(self, read: Any) -> Any:
        result: Any = None
        if self.rank == 0:
            try:
                result = read()
            except (OSError, ValueError) as error:
                result = error
        result = broadcast_object(result, self._ranks[0], process_set=self._process_set)
        if isinstance(result, Exception):
            raise result
        return result
