"""The backend of many workers with servers, which hold the values, sum the pushes and update."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

import ringtrain._core as _core
from ringtrain.arrays import numpy as numpy_adapter
from ringtrain.arrays.adapter import adapter_for
from ringtrain.engine.handles import Pending, report_failure
from ringtrain.errors import MismatchError, PeerLostError, StalledError
from ringtrain.kvstore import places
from ringtrain.kvstore.backend import Backend, Function, Groups, each, require_same
from ringtrain.kvstore.entries import Entry, Key, Kind, ServedEntry
from ringtrain.kvstore.row_sparse import Array, RowSparse, sum_of as sparse_sum
from ringtrain.kvstore.servers.keys import KeyTable
from ringtrain.kvstore.servers.python_updates import COMMAND, words_of_change, words_of_updater
from ringtrain.kvstore.servers.worker import Counts, KeepsArrays, Worker
from ringtrain.kvstore.update_rules import Recipe
from ringtrain.kvstore.updaters import BuiltInUpdater, LocalUpdater, SentUpdater, ServedUpdater, Updater
from ringtrain.record.logger import logger

_LOOK_S = 0.2
_ASK_S = 2.0  # how often a long wait asks whether all workers have agreed on its keys


class WaitLimits(NamedTuple):
    """How long a request waits before a warning and before an error; 0 is for ever.

    `ended` has the workers that push nothing more, and why.
    """

    warning_s: float
    shutdown_s: float
    ended: Mapping[int, str]


class Request:
    """A request to servers, which read or write `arrays` until it has ended.

    Args:
        require_agreed: called in a long wait; it raises if the request will never end.
        look_at_waits: called in a long wait; see `SchedulerClient.look_at_waits`.
    """

    __slots__ = ("_arrays", "_core", "_counts", "_limits", "_look_at_waits", "_others", "_require_agreed", "never_ends")

    def __init__(
        self,
        core: _core.StoreHandle,
        arrays: Any,
        limits: WaitLimits,
        counts: Counts,
        require_agreed: Callable[[], None],
        look_at_waits: Callable[[str, list[int], dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._core = core
        self._look_at_waits = look_at_waits
        self._others: dict[str, Any] = {}  # where the other workers waited when this one last looked
        self._require_agreed = require_agreed
        self._arrays = arrays
        self._limits = limits
        self._counts = counts
        self.never_ends = False  # workers do not agree on a key of it: its round stays open

    def poll(self) -> bool:
        """Whether the arrays may be changed."""
        return self._core.wait(0.0)

    def wait(self) -> None:
        """Waits until the arrays may be changed. Ctrl-C interrupts it. Raises RingtrainError if the request failed."""
        began_s = time.monotonic()
        try:
            if not self._core.wait(_LOOK_S):
                self._wait_long()
        except BaseException as error:
            self.never_ends = isinstance(error, MismatchError)
            report_failure(error)
            raise
        finally:
            self._counts.waiting_s += time.monotonic() - began_s
        self._arrays = None

    def is_over(self) -> bool:
        """Whether the servers have finished with the arrays."""
        return self._core.is_memory_free()

    def _wait_long(self) -> None:
        """Waits, and returns to Python regularly, so that it handles signals."""
        began_s = time.monotonic()
        warn_s = began_s + self._limits.warning_s
        ask_s = began_s
        while not self._core.wait(_LOOK_S):
            waited_s = time.monotonic() - began_s
            if self._limits.ended:
                self._require_pushes()
            if time.monotonic() > ask_s:
                self._require_agreed()
                self._others = self._look_at_waits(self._core.missing(), self._core.awaited(), self._others)
                ask_s = time.monotonic() + _ASK_S
            if time.monotonic() > warn_s:
                logger.warning(f"a store has waited {waited_s:.0f} s: {self._missing()}")
                warn_s = float("inf")
            if 0 < self._limits.shutdown_s < waited_s:
                raise StalledError(f"a store has waited {waited_s:.1f} s (stall_shutdown_time_s): {self._missing()}")

    def _missing(self) -> str:
        where = [f"worker {number} waits {what}" for number, (_, _, what) in self._others.items()]
        return ", ".join([self._core.missing(), *where])

    def _require_pushes(self) -> None:
        """Raises PeerLostError if this waits for a push of a worker that has come to its end."""
        for number in self._core.awaited():
            if number in self._limits.ended:
                raise PeerLostError(f"{self._limits.ended[number]}, and pushes nothing more: {self._core.missing()}")


# Of send_command_to_servers: smaller numbers are MXNet's own.
_FIRST_COMMAND = 16


_NO_RATES = (0.0, 0.0)


class ServedBackend(Backend):
    """All workers make their stores in the same order.

    Args:
        max_staleness: of an asynchronous store: a pull waits while the slowest worker is that many pushes of the key
            behind this one; None never waits.
        elastic: workers may come and go.
        atomic: of an asynchronous store: pushes and pulls of a key are whole.
    """

    def __init__(
        self, kind: Kind, worker: Worker, max_staleness: int | None, elastic: bool, atomic: bool = False
    ) -> None:
        super().__init__(kind)
        self._worker = worker
        self._number = worker.stores
        worker.stores += 1
        self.rank, self.is_recovery = worker.number, worker.is_recovery
        neighbours = worker.on_this_host()
        self.local_rank, self.num_local_workers = neighbours.index(worker.number), len(neighbours)
        self._client = worker.client
        self._client.open(self._number, not kind.is_asynchronous, max_staleness, atomic)
        self._is_atomic = atomic
        self._keys = KeyTable(worker, self._number, cuts_keys=not atomic)
        self._pending: deque[Request] = deque()
        self._never_ending: list[Request] = []
        worker.pushers.add(self)
        seconds = worker.seconds
        self._limits = WaitLimits(seconds("stall_warning_time_s"), seconds("stall_shutdown_time_s"), worker.ended)
        if elastic:
            worker.is_elastic = True
            worker.scheduler_client.be_elastic()

    # ---------------------------------------------------------------------------------------------------- values

    def begin(self, arrays: dict[Key, Any]) -> None:
        new = {key: places.in_host_memory(array) for key, array in arrays.items() if key not in self.entries}
        for key, array in new.items() if self._is_atomic else ():
            _require_fits_atomic(key, array)
        known = {key: places.in_host_memory(array) for key, array in arrays.items() if key in self.entries}
        for key, array in zip(new, self._keys.begin(new), strict=True):
            self.entries[key] = ServedEntry(self, array.id, key, new[key], array.version)
        for key, array in known.items():
            entry = self._served(key)
            self.finish(entry)
            entry.version = self._keys.replace(entry.name, entry.id, array, entry.version)
        for key in arrays:
            if self._calls_script():
                self._renew(self._served(key))

    def push(self, groups: Groups, priority: int, copies: bool) -> list[Pending[Any]]:
        entries, totals = self._totals(groups)
        views = [adapter_for(total).view(total) for total in totals]
        ids, rates = [entry.id for entry in entries], self._rates(entries)
        with KeepsArrays(self._client, totals):
            core = self._client.push(self._number, ids, views, rates, priority, copies, *self._codes())
        self._worker.counts.pushed(totals)
        request = self._keep(entries, self._handle(core, None if copies else totals, entries))
        if self._calls_script():
            each(groups, lambda entry, _: self.finish(entry))
        return [request]

    def pull(self, groups: Groups, priority: int) -> None:
        if self._calls_script():
            super().pull(groups, priority)
            return
        entries = [self._served(entry.key) for entry, _ in groups]
        targets = [_target(entry, outs) for entry, (_, outs) in zip(entries, groups, strict=True)]
        views = [adapter_for(target).view(target) for target in targets]
        with KeepsArrays(self._client, targets):
            core = self._client.pull(self._number, [entry.id for entry in entries], views, priority)
        self._worker.counts.pulled(targets)
        self._wait_for(core, targets, entries)
        _hand_out(targets, [outs for _, outs in groups])

    def pushpull(self, groups: list[tuple[Entry, list[Any], list[Any]]], priority: int) -> None:
        given: Groups = [(entry, values) for entry, values, _ in groups]
        wanted: Groups = [(entry, outs) for entry, _, outs in groups]
        if self._calls_script():
            self.push(given, priority, copies=False)
            self.pull(wanted, priority)
            return
        entries, totals = self._totals(given)
        targets = [_target(entry, outs) for entry, (_, outs) in zip(entries, wanted, strict=True)]
        values = [adapter_for(total).view(total) for total in totals]
        views = [adapter_for(target).view(target) for target in targets]
        ids, rates = [entry.id for entry in entries], self._rates(entries)
        with KeepsArrays(self._client, (totals, targets)):
            core = self._client.push_pull(self._number, ids, values, views, rates, priority, *self._codes())
        self._worker.counts.pushed(totals)
        self._worker.counts.pulled(targets)
        self._wait_for(core, (totals, targets), entries)
        _hand_out(targets, [outs for _, outs in wanted])

    def finish(self, entry: Entry) -> None:
        served = self._served(entry.key)
        request, served.request = served.request, None
        if request is None:
            return
        if self._calls_script():
            self._apply(served, self._sum_of(served), self._begin_update(served))
        request.wait()
        if self.kind.is_asynchronous and isinstance(self.updater, SentUpdater):
            # the server has the gradient, but its Python may not have applied it
            self.read_into(served, np.empty(served.shape, served.dtype_of_numpy))

    # ------------------------------------------------------------------------------------------------------- rows

    def push_rows(self, entry: Entry, values: Sequence[RowSparse], priority: int) -> list[Pending[Any]]:
        if self._calls_script():
            return super().push_rows(entry, values, priority)
        self._require_updates()
        served = self._served(entry.key)
        total = sparse_sum(served, values)
        (rates,) = self._rates([served])
        views = numpy_adapter.view(total.indices), prod(served.shape[1:]), numpy_adapter.view(total.rows)
        with KeepsArrays(self._client, total):
            core = self._client.push_rows(self._number, served.id, *views, rates, priority, copies=False)
        self._worker.counts.pushed([total.rows])
        return [self._keep([served], self._handle(core, total, [served]))]

    def pull_rows(self, entry: Entry, numbers: Array, priority: int) -> Array:
        if self._calls_script():
            return super().pull_rows(entry, numbers, priority)
        served = self._served(entry.key)
        rows = np.empty((numbers.size, *served.shape[1:]), served.dtype_of_numpy)
        views = numpy_adapter.view(numbers), prod(served.shape[1:]), numpy_adapter.view(rows)
        self._worker.counts.pulled([rows])
        with KeepsArrays(self._client, (numbers, rows)):
            core = self._client.pull_rows(self._number, served.id, *views, priority)
        self._wait_for(core, (numbers, rows), [served])
        return rows

    # ---------------------------------------------------------------------------------------------------- totals

    def _require_updates(self) -> None:
        if self.kind.is_asynchronous and self.updater is None:
            raise ValueError(
                f'a "{self.kind.name}" store without an optimizer would replace weights by gradients; call '
                "set_optimizer first"
            )

    def _totals(self, groups: Groups) -> tuple[list[ServedEntry], list[Any]]:
        """Returns what this worker pushes of each key: the sum of its values, in the host's memory."""
        self._require_updates()
        entries = [self._served(entry.key) for entry, _ in groups]
        totals = []
        for entry, (_, values) in zip(entries, groups, strict=True):
            here = values if self.kind.on_device else [places.in_host_memory(one) for one in values]
            total = places.in_host_memory(here[0] if len(here) == 1 else places.sum_of(here, here[0]))
            if self.compression is None:
                totals.append(total)
            elif self.compression.dtype is not None:
                totals.append(places.cast(total, self.compression.dtype))
            else:
                totals.append(self.compression.encode(total, entry.residuals))
        return entries, totals

    def _codes(self) -> tuple[str, float]:
        """Returns how servers decode pushes: the kind of the codes and the threshold, or nothing."""
        compression = self.compression
        return ("", 0.0) if compression is None or compression.dtype is not None else compression

    def _rates(self, entries: Sequence[ServedEntry]) -> list[tuple[float, float]]:
        rates = [_NO_RATES] * len(entries)
        if isinstance(self.updater, ServedUpdater):
            rates = self.updater.rates(entries)
        for entry in entries:
            entry.num_update += 1
        return rates

    def _handle(self, core: _core.StoreHandle, arrays: Any, entries: Sequence[Entry]) -> Request:
        def require_agreed() -> None:
            self._keys.require_agreed({entry.name for entry in entries})

        return Request(core, arrays, self._limits, self._worker.counts, require_agreed, self._worker.look_at_waits)

    def _keep(self, entries: Sequence[ServedEntry], request: Request) -> Request:
        for entry in entries:
            entry.request = request
        while self._pending and (self._pending[0].is_over() or self._pending[0].never_ends):
            first = self._pending.popleft()
            if not first.is_over():
                self._never_ending.append(first)  # servers may still write to its arrays
        self._pending.append(request)
        return request

    def has_pushed(self) -> bool:
        """Whether servers have all that this worker has pushed."""
        return all(request.is_over() or request.never_ends for request in self._pending)

    def _wait_for(self, core: _core.StoreHandle, arrays: Any, entries: Sequence[Entry]) -> None:
        request = self._handle(core, arrays, entries)
        self._pending.append(request)  # if the wait is interrupted, servers still write to the arrays
        request.wait()
        self._pending.remove(request)

    def _served(self, key: Key) -> ServedEntry:
        entry = self.entries[key]
        assert isinstance(entry, ServedEntry)
        return entry

    # Called by entries.

    def read_into(self, entry: ServedEntry, array: Any) -> None:
        with KeepsArrays(self._client, array):
            core = self._client.pull(self._number, [entry.id], [numpy_adapter.view(array)], 0)
        self._worker.counts.pulled([array])
        self._wait_for(core, array, [entry])

    def write(self, entry: ServedEntry, array: Any) -> None:
        with KeepsArrays(self._client, array):
            self._client.assign(self._number, [entry.id], [numpy_adapter.view(array)])

    # --------------------------------------------------------------------------------------------------- updates

    def _renew(self, entry: ServedEntry) -> None:
        """Copies the value of the servers, which hold sums instead from then on."""
        entry.replica = None
        entry.replica = entry.value()

    def _sum_of(self, entry: ServedEntry) -> Any:
        total = np.empty(entry.shape, entry.dtype_of_numpy)
        self.read_into(entry, total)
        return total

    def use(self, updater: LocalUpdater | None, function: Function | None) -> None:
        replicated = self._calls_script()
        is_built_in = isinstance(updater, BuiltInUpdater)
        is_sent = not is_built_in and self._worker.runs_python()
        if self.kind.is_asynchronous and not is_built_in and not is_sent:
            raise ValueError(
                f'a "{self.kind.name}" store updates on its servers, with the optimizers that are built in: a name '
                'such as "sgd", or one of ringtrain.optim or MXNet; for any other one use "dist_sync", or servers of '
                "their own (DMLC_NUM_SERVER) and RINGTRAIN_KV_PYTHON_UPDATERS=on for all processes"
            )
        if replicated and (is_built_in or is_sent):
            self._give_back_replicas()
        if is_sent:
            if updater is None:  # before an optimizer, workers have compared what they set
                self._worker.say_unless_missed(self._label("set_updater"))
            sent = SentUpdater(updater, function, self._change_sent)
            words = words_of_updater(self._number, sent.for_servers)
            self.updater, self.function = sent, None
            numbers = {"keeps_gradient": float(self.kind.is_asynchronous)}
            self._set_rule("program", "server", numbers, 0, keeps_states=False, program=words)
            return
        super().use(updater, function)
        if isinstance(updater, BuiltInUpdater):
            self.updater = ServedUpdater(updater, self)
            self.set_rule(updater.recipe, keeps_states=False)
        elif not replicated:
            self._take_rule_away()

    def _change_sent(self, numbers: dict[str, Any]) -> None:
        if self.rank == 0:
            self._worker.command(COMMAND, words_of_change(self._number, numbers))
        self._worker.say_unless_missed(self._label("change"))

    def _give_back_replicas(self) -> None:
        for entry in self.all_entries():
            if self.rank == 0:
                self.write(entry, entry.replica)
            entry.replica = None
        self._worker.say(self._label("values"))

    def _take_rule_away(self) -> None:
        for entry in self.all_entries():
            self._renew(entry)
        self._worker.say(self._label("replicas"))  # no worker pushes before all have the value
        self._set_rule("", "", {}, 0, keeps_states=False)

    # Called by a ServedUpdater.

    def all_entries(self) -> Sequence[ServedEntry]:
        return [self._served(key) for key in self.entries]

    def set_rule(self, recipe: Recipe, keeps_states: bool) -> None:
        self._set_rule(recipe.name, recipe.form, recipe.numbers, recipe.begin_num_update, keeps_states)
        if not keeps_states:
            for entry in self.all_entries():
                entry.num_update = recipe.begin_num_update

    def _set_rule(
        self, name: str, form: str, numbers: dict[str, float], begin: int, keeps_states: bool, program: str = ""
    ) -> None:
        """Worker 0 tells the servers; the others wait until it has. `program`: see `words_of_updater`."""
        given = (self._number, name, form, numbers, begin)
        rules_before = self._keys.rules_before()
        has_rule = rules_before > 0
        if self.rank == 0 and not has_rule:
            if program:
                self._worker.command(COMMAND, program)
            self._client.set_rule(*given, keeps_states, tells_servers=True)
            self._keys.publish_rule()
        if rules_before < 2:  # the others may still wait in the first of these rounds
            self._worker.say_unless_missed(self._label("rule"))
        if self.rank != 0 or has_rule:
            self._client.set_rule(*given, keeps_states, tells_servers=False)

    def num_updates(self, entries: Sequence[ServedEntry]) -> list[int]:
        if self.kind.is_asynchronous or self._worker.is_recovery:
            return self._client.num_updates(self._number, [entry.id for entry in entries])
        return [entry.num_update for entry in entries]

    def read_num_updates(self, entries: Sequence[ServedEntry]) -> list[int]:
        return self._client.read_num_updates(self._number, [entry.id for entry in entries])

    def write_num_updates(self, entries: Sequence[ServedEntry], counts: Sequence[int]) -> None:
        self._client.write_num_updates(self._number, [entry.id for entry in entries], list(counts))

    def read_state(self, entry: ServedEntry, name: str, array: np.ndarray[Any, Any]) -> None:
        with KeepsArrays(self._client, array):
            self._client.read_state(self._number, entry.id, name, numpy_adapter.view(array))

    def write_state(self, entry: ServedEntry, name: str, array: np.ndarray[Any, Any]) -> None:
        with KeepsArrays(self._client, array):
            self._client.write_state(self._number, entry.id, name, numpy_adapter.view(array))

    # ----------------------------------------------------------------------------------------------------- files

    def load(self, fname: str) -> None:
        self._on_rank_0("load", lambda: super(ServedBackend, self).load(fname))
        for entry in self.all_entries() if self._calls_script() else ():
            self._renew(entry)

    def load_states(self, updater: Updater, fname: str) -> None:
        if updater.is_built_in:
            self._on_rank_0("load_optimizer_states", lambda: super(ServedBackend, self).load_states(updater, fname))
        else:
            super().load_states(updater, fname)

    def _on_rank_0(self, call: str, body: Callable[[], None]) -> None:
        """Runs on rank 0. All workers raise its error."""
        outcome: list[str] = []
        if self.rank == 0:
            try:
                body()
            except (OSError, ValueError) as error:
                outcome = ["ValueError" if isinstance(error, ValueError) else "OSError", str(error)]
        said = self._worker.say(self._label(call), outcome)
        first = said[min(said)]
        if first:
            raise (ValueError if first[0] == "ValueError" else OSError)(first[1])

    # --------------------------------------------------------------------------------------------------- workers

    @property
    def num_workers(self) -> int:
        return self._worker.workers

    def require_usable(self) -> None:
        self._worker.require_usable()

    def require_same(self, call: str, given: dict[str, Any]) -> None:
        require_same(call, self._worker.say_unless_missed(self._label(call), given))

    def _label(self, call: str) -> str:
        return f"{call} of store {self._number}"

    def barrier(self) -> None:
        self._worker.say_unless_missed("barrier")

    def count_dead(self, node_id: int, timeout_s: float) -> int:
        try:
            return self._worker.scheduler_client.count_dead(node_id & 6, timeout_s)
        except PeerLostError:
            return node_id & 1

    def wait_before_exit(self, waits: bool) -> None:
        self._worker.waits_before_exit = waits

    def command(self, head: int, body: str) -> None:
        if head < _FIRST_COMMAND:
            raise ValueError(f"send_command_to_servers: {head} is one of MXNet's own; take {_FIRST_COMMAND} or more")
        if not self._worker.has_servers_of_their_own():
            raise ValueError(
                "send_command_to_servers: the servers are threads of the workers; start servers of their own "
                "(DMLC_NUM_SERVER) with kvstore.run_server(controller)"
            )
        self._worker.command(head, body)

    def placement(self) -> dict[Key, list[tuple[int, int, int]]]:
        return {key: self._keys.pieces(str(key)) for key in self.entries}

    def restored(self) -> dict[Key, float]:
        ages_s = self._worker.restored
        by_key = {
            key: [ages_s[server] for server, _, _ in self._keys.pieces(str(key)) if server in ages_s]
            for key in self.entries
        }
        return {key: max(of_key) for key, of_key in by_key.items() if of_key}

    def join(self) -> None:
        number = self._client.join(self._number)
        self._client.resume(self._number, self._worker.say(self._label("join"), number))


def _require_fits_atomic(key: Key, array: Any) -> None:
    is_half = adapter_for(array).dtype_name(array) in ("float16", "bfloat16")  # which are updated in float32
    wide_bytes = int(array.nbytes) * (2 if is_half else 1)
    if wide_bytes > _core.LARGEST_ATOMIC_BYTES:
        raise ValueError(
            f'key "{key}" has {wide_bytes >> 20} MiB, and a store with atomic=True takes at most '
            f"{_core.LARGEST_ATOMIC_BYTES >> 20} MiB for each key; cut it into several keys, or make the store without "
            "atomic=True"
        )


def _target(entry: ServedEntry, outs: list[Any]) -> Any:
    """Returns the array that gets the value of a key from the servers: one of `outs`, if possible."""
    for out in outs:
        adapter = adapter_for(out)
        if adapter.device(out) < 0 and adapter.dtype_name(out) == entry.dtype_name and adapter.view_in_place(out):
            return out
    return np.empty(entry.shape, entry.dtype_of_numpy)


def _hand_out(targets: list[Any], wanted: list[list[Any]]) -> None:
    for target, outs in zip(targets, wanted, strict=True):
        for out in outs:
            if out is target:
                adapter_for(out).note_change(out)
            else:
                places.copy_into(out, target)
