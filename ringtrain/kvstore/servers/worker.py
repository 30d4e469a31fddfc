"""A worker of a job: its place, its client of the servers, and its own server if servers are in the workers."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import ringtrain._core as _core
from ringtrain.engine.handles import keep_until_free
from ringtrain.engine.process_sets import ProcessSet
from ringtrain.errors import NotInitializedError, RingtrainError
from ringtrain.job import launched_by, session
from ringtrain.job.host import usual_address
from ringtrain.job.network import Meeting
from ringtrain.job.rendezvous.listener import bound
from ringtrain.kvstore.servers import roles
from ringtrain.kvstore.servers.arrival import (
    Arrival,
    arrive,
    make_client,
    make_scheduler,
    make_server,
    name_what_is_needless,
    numbers_of,
    secret_of,
    serve_metrics,
)
from ringtrain.kvstore.servers.membership import MEMORY
from ringtrain.kvstore.servers.roles import SERVER, WORKER, Role
from ringtrain.kvstore.servers.scheduler import Scheduler
from ringtrain.kvstore.servers.scheduler_client import Notice
from ringtrain.kvstore.servers.server import KEPT, NO_AUTOSERVE_VARIABLE, memory_entry, memory_name, take_worker
from ringtrain.kvstore.servers.server_ranks import has_plan, take_plan
from ringtrain.ops.objects import broadcast_object
from ringtrain.options import table
from ringtrain.record import metrics
from ringtrain.record.logger import logger


class KeepsArrays:
    """While a call of the client lasts: if it raises, its arrays are kept until no server reads or writes them."""

    __slots__ = ("_arrays", "_client")

    def __init__(self, client: _core.StoreClient, arrays: Any) -> None:
        self._client, self._arrays = client, arrays

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        requests = None if kind is None else self._client.take_abandoned()
        if requests is not None:
            keep_until_free(requests, self._arrays)


class Pusher(Protocol):
    """A store of a worker."""

    def has_pushed(self) -> bool: ...


@dataclass
class Counts:
    """Counters of the requests of all stores of a worker, for `hvd.metrics()`."""

    pushes: int = 0  # values
    push_bytes: int = 0
    pulls: int = 0
    pull_bytes: int = 0
    waiting_s: float = 0.0

    def pushed(self, arrays: Iterable[Any]) -> None:
        """Counts arrays that are being pushed."""
        for array in arrays:
            self.pushes += 1
            self.push_bytes += array.nbytes

    def pulled(self, arrays: Iterable[Any]) -> None:
        """Counts arrays that are being pulled."""
        for array in arrays:
            self.pulls += 1
            self.pull_bytes += array.nbytes

    def with_traffic(self, traffic: dict[str, float]) -> dict[str, float]:
        """Returns these counts and those of the connections."""
        return {**asdict(self), **traffic}


_DAY_S = 86400.0
_LOOPBACK = "127.0.0.1"


class Worker:
    """Until close(). One thread makes and uses the stores; notices arrive on a thread of the scheduler client.

    Args:
        scheduler: the scheduler of the job, if it runs in this process.
    """

    def __init__(self, arrival: Arrival, scheduler: Scheduler | None = None) -> None:
        self.scheduler_client, self.settings = arrival.scheduler_client, arrival.settings
        self._arrival, self._scheduler = arrival, scheduler
        self._is_closed = False
        self._held: set[str] = set()  # labels of rounds
        # Why workers push nothing more that have come to their ends, and wait for the others there.
        self.ended: dict[int, str] = {}
        self._published: dict[int, int] = {}  # by server, the number of the last memory in the directory
        self._process = os.getpid()
        self._server: _core.StoreServer | None = None
        self.stores = 0  # made so far
        self.pushers = weakref.WeakSet[Pusher]()  # stores add themselves
        self.counts = Counts()
        self.waits_before_exit = True
        self.is_elastic = False
        try:
            self.world = arrival.world()
            if arrival.listeners:
                self._server = make_server(arrival, self.world)
            self.client = make_client(arrival, self.world)
            self.living = set(self.world.living)
            # servers that have restored a snapshot, and its age
            self.restored = {server: age_s for server, age_s in self.world.restored.items() if age_s != KEPT}
            for number, text in self.world.gone.items():  # before this process joined
                self.client.lost(number, text, self.world.terms[number] + 1)
            # Before it meets the servers: a replaced server has another address.
            self.scheduler_client.listen_with(self._notice)
            self.client.meet()
            self._ends = self._begin_to_count()
        except BaseException as error:
            self._give_up(error)
            raise
        self.number, self.is_recovery = self.world.number, self.world.is_recovery
        arrival.say(f"is one of {self.world.workers} workers, with {len(self.world.servers)} servers")

    @property
    def workers(self) -> int:
        """The number of workers; in an elastic job of those that live."""
        return len(self.living) if self.is_elastic else self.world.workers

    def on_this_host(self) -> list[int]:
        """The numbers of its workers."""
        hosts = self.world.hosts
        return sorted(number for number, host in hosts.items() if host == hosts[self.number])

    def has_servers_of_their_own(self) -> bool:
        return self._server is None

    def runs_python(self) -> bool:
        """Whether the servers run optimizers in Python."""
        return self.has_servers_of_their_own() and self.settings["kv_python_updaters"] == "on"

    def command(self, head: int, body: str) -> None:
        """Has all servers carry out a command. Raises as `SchedulerClient.command`."""
        self.scheduler_client.command(head, body, self.seconds("stall_shutdown_time_s"))

    def publish_memory(self) -> None:
        """Publishes the memory that servers share with this process, for the successors of lost servers."""
        new = self.client.take_shared_parts()
        if not self.has_servers_of_their_own() or self.seconds("kv_rejoin_s") == 0:
            return
        for server, store, number, spec, ticket in new:
            place = self._published[server] = self._published.get(server, -1) + 1
            entry = memory_entry(store, number, spec, ticket)
            self.scheduler_client.publish(MEMORY, {memory_name(server, self.number, place): entry})

    def seconds(self, option: str) -> float:
        return float(self.settings[option])

    def say(self, label: str, value: Any = None) -> dict[int, Any]:
        """A round of the workers, which ends after stall_shutdown_time_s. Raises as `SchedulerClient.say`."""
        return self.scheduler_client.say(label, value, **self._limits_of_wait())

    def find(self, store: int, versions: dict[str, int]) -> dict[str, Any]:
        """Waits for entries of the directory. Raises as `SchedulerClient.find`."""
        return self.scheduler_client.find(store, versions, **self._limits_of_wait())

    def look_at_waits(self, what: str, awaited: list[int], known: dict[str, Any]) -> dict[str, Any]:
        """Returns where the others wait. Raises as `SchedulerClient.look_at_waits`."""
        return self.scheduler_client.look_at_waits(what, awaited, known, self.seconds("stall_shutdown_time_s"))

    def _limits_of_wait(self) -> dict[str, Any]:
        return {
            "patience_s": self.seconds("stall_shutdown_time_s"),
            "warning_s": self.seconds("stall_warning_time_s"),
            "has_pushed": lambda: all(one.has_pushed() for one in list(self.pushers)),
        }

    def say_unless_missed(self, label: str, value: Any = None) -> dict[int, Any]:
        """The same, except that a worker that has replaced a lost one may have missed a round.

        It holds the first round of a label alone if all others have held one and do not wait in the next.
        """
        may_have_missed = self.is_recovery and label not in self._held
        self._held.add(label)
        return self.scheduler_client.say(label, value, joins_only=may_have_missed, **self._limits_of_wait())

    def require_usable(self) -> None:
        """Raises NotInitializedError if this process has left the job or is a forked child."""
        if self._process != os.getpid():
            raise NotInitializedError("this process was forked from a worker of a store; make a store of its own")
        if self._is_closed:
            raise NotInitializedError("this store was made before the last init() or shutdown(); make a new one")

    def close(self) -> None:
        """Leaves the job: when all others have ended, too, or with the error that ends the script."""
        if self._is_closed or self._process != os.getpid():
            return
        self._is_closed = True
        for end in self._ends:
            end()
        error = getattr(sys, "last_value", None)  # the uncaught error that ends the script
        if error is not None and not hasattr(sys, "ps1"):  # at a prompt the process lives on
            self._give_up(error)
            return
        # The others need a server or the scheduler of this process until they are done. Without one, they may wait for
        # another process in a lost one's place until kv_rejoin_s is over, and then have to hear which one was lost.
        is_needed = self._server is not None or self._scheduler is not None
        longest_s = _DAY_S if is_needed else self.seconds("kv_timeout_s") + self.seconds("kv_rejoin_s")
        self.client.close()
        with contextlib.suppress(KeyboardInterrupt):
            self.scheduler_client.leave(longest_s if self.waits_before_exit or is_needed else 0)
        if self._server is not None:
            self._server.close()
        if self._scheduler is not None:
            self._scheduler.close()

    def _begin_to_count(self) -> list[Callable[[], None]]:
        """Returns functions to call at the end."""
        ends = []
        if not session.is_initialized():
            serve_metrics(self._arrival, self._arrival.number)
            ends.append(metrics.stop_serving)
        ends.append(metrics.count_store("kvstore", lambda: self.counts.with_traffic(self.client.metrics())))
        if self._server is not None:
            ends.append(metrics.count_store("kvstore_server", self._server.metrics))
        return ends

    def _give_up(self, error: BaseException) -> None:
        self._is_closed = True
        text = f"{type(error).__name__}: {error}"
        self.scheduler_client.fail(text)
        if self._scheduler is not None:
            self._scheduler.end(
                f"worker {self._arrival.number}, which runs the scheduler, has died: {text}", "PeerLostError"
            )
        for one in (self._server, self._scheduler):
            if one is not None:
                one.close()

    def _notice(self, notice: Notice) -> None:
        kind, role, number = notice["kind"], notice.get("role"), int(notice.get("number", 0))
        if kind in ("gone", "over"):
            self._arrival.say(notice["text"])
            self.client.end(notice["text"], is_lost=notice["error"] != "ShutDownError")
        elif role == WORKER and kind in ("lost", "left"):
            self.living.discard(number)
            text, first_term = notice["text"], int(notice["term"]) + 1
            self.client.lost(number, text, first_term)
            if self._server is not None:
                self._server.lost(number, first_term)
                self.client.lost_server(number, text)
        elif kind == "stalled":
            logger.warning(f"a store has waited {self.seconds('stall_warning_time_s'):g} s {notice['text']}")
        elif role == WORKER and kind == "ending":
            self.ended[number] = notice["text"]
        elif role == WORKER and kind == "back":
            self.living.add(number)
            self.client.back(number)
            if self._server is not None:
                self._server.back(number, int(notice["term"]))
        elif role == SERVER and kind == "lost":
            self.client.lost_server(number, notice["text"])
        elif role == SERVER and kind == "back":
            age_s = float(notice["snapshot_age_s"])
            if age_s != KEPT:
                self.restored[number] = age_s
            addresses = [(str(host), int(port)) for host, port in notice["addresses"]]
            self.client.back_server(number, addresses, keeps_memory=age_s == KEPT)


_of_environment: Worker | None = None
_meetings = 0  # how often init() has met the other workers
_of_sets: dict[int, Worker] = {}


def is_worker_by_environment() -> bool:
    """Whether MXNet's variables make this process a worker."""
    return roles.of_environment() is not None


def count_workers_by_environment() -> int:
    """Returns the number of workers of the job in MXNet's variables; 0 if this process is not one of them."""
    role = roles.of_environment()
    return role.workers if role is not None and role.name in (WORKER, "") else 0


def meet_by_environment(settings: dict[str, str]) -> Meeting:
    """Returns the meeting of an init(): the workers exchange values through the scheduler, and their numbers are ranks.

    Raises as `worker_by_environment`, and RingtrainError if this worker has replaced a lost one.
    """
    global _meetings
    role = roles.of_environment()
    assert role is not None
    worker = worker_by_environment(settings)
    if worker.is_recovery:
        raise RingtrainError(
            f"worker {worker.number} has taken the place of a lost one, and the init() of the other workers is over: "
            "start the whole job again, or use only stores with servers (dist_sync, dist_async)"
        )
    _meetings += 1
    label = f"init() number {_meetings}"

    def exchange(value: Any) -> list[Any]:
        said = worker.scheduler_client.say(label, value, float(settings["start_timeout_s"]))
        return [said[number] for number in range(worker.world.workers)]

    address = numbers_of(role.address) or worker.scheduler_client.own_address
    return Meeting(worker.number, exchange, address, secret_of(role))


def worker_by_environment(of_init: dict[str, str] | None = None) -> Worker:
    """Returns the worker that MXNet's variables describe; a process has one.

    Args:
        of_init: the options of the init() that calls this.

    Raises:
        ValueError: a variable is missing or wrong, the job has no place for this process, or it is not a worker.
        RuntimeError: a worker has started this process.
        StalledError: not all workers and servers came in time (start_timeout_s).
        PeerLostError: the scheduler or a server is gone.
    """
    global _of_environment
    if _of_environment is None or _of_environment._is_closed:
        role = roles.of_environment()
        assert role is not None
        if role.name not in (WORKER, ""):
            raise ValueError(
                f"this process is the {role.name} of its job (DMLC_ROLE), and {NO_AUTOSERVE_VARIABLE} keeps it from "
                "serving by itself; call kvstore.run_server(): only workers make stores"
            )
        if of_init is None:
            launched_by.own_place("kvstore.create()")
        settings = of_init or (session.settings() if session.is_initialized() else table.resolve({}))
        name_what_is_needless(int(float(settings["kv_verbose"])))
        arrival = take_worker() or arrive(role._replace(name=WORKER), secret_of(role), settings)
        _of_environment = Worker(arrival)
        atexit.register(_of_environment.close)  # at the end of the script, while the core still works
        _warn_of_collectives(role)
    return _of_environment


def worker_of(process_set: ProcessSet) -> Worker:
    """Returns the worker of a rank of a process set, with a server in each rank; the first has the scheduler.

    All of them call it together. Raises as `worker_by_environment`.
    """
    number = process_set.process_set_id
    assert number is not None
    known = _of_sets.get(number)
    if known is not None:
        return known
    if number == 0 and has_plan():
        planned = take_plan()
        arrival = arrive(planned.role, planned.secret, session.settings())
        worker = _of_sets[number] = Worker(arrival, planned.scheduler)
        return worker
    ranks, rank = list(process_set.ranks or []), process_set.rank()
    assert rank is not None
    settings = session.settings()
    scheduler: Scheduler | None = None
    told: tuple[str, int, bytes] | None = None
    if rank == 0:
        is_one_node = all(session.is_on_node_of(one) for one in ranks)
        host, secret = _LOOPBACK if is_one_node else usual_address(), secrets.token_bytes(32)
        listener = bound(host, 0)
        role = Role(WORKER, host, listener.getsockname()[1], len(ranks), 0, rank, 0, "")
        scheduler = make_scheduler(role, listener, secret, settings)
        told = host, role.port, secret
    host, port, secret = broadcast_object(told, ranks[0], process_set=process_set)
    role = Role(WORKER, host, port, len(ranks), 0, rank, 0, "")
    worker = _of_sets[number] = Worker(arrive(role, secret, settings), scheduler)
    return worker


def _close_those_of_sets() -> None:
    for worker in list(_of_sets.values()):
        worker.close()
    _of_sets.clear()


def _warn_of_collectives(role: Role) -> None:
    if session.is_initialized() and session.size() == 1 and role.workers > 1:
        logger.warning(
            f"DMLC_* variables make this process one of {role.workers} workers of a store, but rank 0 of 1 of "
            "ringtrain.init(): nothing but the store knows of the others; start with ringrun or mpirun for both"
        )


session.at_shutdown(_close_those_of_sets)
