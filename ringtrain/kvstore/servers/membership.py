"""The members of a job of workers and servers. Uses no sockets, threads or clock: time is an argument.

A place is a role and a number. A request has an id, which its answer repeats, and says how long it may wait.

States of a place, what ends each, and by when:

    empty     here: a process takes the place. Before the job has begun: within start_timeout_s of the other processes,
              or of the scheduler if it has none, else StalledError; after a death within kv_timeout_s or
              kv_rejoin_s, else PeerLostError for all.
    here      done: the process has reached the end of its script.
              lost: its connection has ended, it has reported a failure, or it was silent for kv_timeout_s (expelled).
    lost      here: another process takes its place, with the next term.
              announced: at once, or for a worker after kv_rejoin_s.
    announced here: as from lost. All rounds that wait for it fail, and so do the pulls of other workers.
    done      final, except with servers that stay. Requests for keys that worker 0 has not published fail.

States of the job: gathering, until every place has a process; running, until all workers are done, none has been here
for kv_timeout_s, or the scheduler is told to end; over. A process that has lost its scheduler has left the job
(`scheduler_client.Standing`), so the last state of the scheduler holds for everybody.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ringtrain.errors import list_of_ranks
from ringtrain.kvstore.servers.roles import SCHEDULER, SERVER, WORKER
from ringtrain.kvstore.servers.rounds import END, Failure, Message, Rounds
from ringtrain.kvstore.servers.waits import Wait, never_ending, words_of

# The prefix of the names of keys.
KEY = "key/"
# Instead of the number of a store: the memory that workers share with servers. Every worker publishes its own.
MEMORY = -1


@dataclass
class _Search:
    member: int
    message: Message
    began_s: float
    end_s: float
    warn_s: float


@dataclass
class _Store:
    entries: dict[str, Any] = field(default_factory=dict)
    waits: list[_Search] = field(default_factory=list)


class Directory:
    """The keys of each store, by store and name, as worker 0 has published them, and the requests that wait for it.

    Versions of an entry begin with 1.
    """

    def __init__(self) -> None:
        self._stores: dict[int, _Store] = {}
        self._lost = ""  # why worker 0 publishes no more

    def publish(self, store: int, entries: dict[str, Any]) -> list[tuple[int, Message]]:
        """Adds entries or later versions. Returns the answers to requests that waited for them."""
        if store != MEMORY:
            self._lost = ""
        of_store = self._store(store)
        of_store.entries |= entries
        return self._answers(of_store)

    def find(self, member: int, message: Message, now_s: float) -> list[tuple[int, Message]]:
        """Requests entries. `versions` has the least version of each name; 0 also accepts a missing entry, as None."""
        of_store = self._store(message["store"])
        patience_s = float(message["patience_s"]) or float("inf")
        warn_s = now_s + (float(message["warning_s"]) or float("inf"))
        of_store.waits.append(_Search(member, message, now_s, now_s + patience_s, warn_s))
        answers = self._answers(of_store)
        return answers if answers or not self._lost else self.lose(Place("worker", 0), self._lost)

    def lose(self, _who: Place, text: str) -> list[tuple[int, Message]]:
        """Fails all requests: the worker that publishes is lost, or has ended."""
        self._lost = text
        failures = []
        for of_store in self._stores.values():
            for wait in of_store.waits:
                key = ", ".join(_names_of_keys(self._missing(of_store, wait)))
                whole = f'{text}; no other process gives key "{key}" a value'
                failures.append((wait.member, _failure_of_wait(wait, "PeerLostError", whole)))
            of_store.waits.clear()
        return failures

    def waits(self) -> list[Wait]:
        """Returns the waits for entries of worker 0."""
        return [
            Wait(
                wait.member,
                wait.message["id"],
                f'in init or broadcast of key "{", ".join(_names_of_keys(self._missing(of_store, wait)))}"',
                frozenset((0,)),
                wait.warn_s,
            )
            for of_store in self._stores.values()
            for wait in of_store.waits
        ]

    def forget(self, requests: Collection[tuple[int, int]]) -> None:
        """Workers give up these requests, by member and id."""
        for of_store in self._stores.values():
            of_store.waits = [one for one in of_store.waits if (one.member, one.message["id"]) not in requests]

    def overdue(self, now_s: float) -> list[tuple[int, Message]]:
        failures = []
        for of_store in self._stores.values():
            for wait in [one for one in of_store.waits if one.end_s < now_s]:
                of_store.waits.remove(wait)
                names = ", ".join(_names_of_keys(self._missing(of_store, wait)))
                text = (
                    f'key "{names}" has no value after {now_s - wait.began_s:.1f} s '
                    "(stall_shutdown_time_s): worker 0, whose value counts, has not called init or broadcast with it"
                )
                failures.append((wait.member, _failure_of_wait(wait, "StalledError", text)))
        return failures

    def _store(self, number: int) -> _Store:
        return self._stores.setdefault(int(number), _Store())

    def _answers(self, of_store: _Store) -> list[tuple[int, Message]]:
        done = [wait for wait in of_store.waits if not self._missing(of_store, wait)]
        of_store.waits = [wait for wait in of_store.waits if wait not in done]
        return [(wait.member, self._answer(of_store, wait)) for wait in done]

    def _missing(self, of_store: _Store, wait: _Search) -> list[str]:
        versions: dict[str, int] = wait.message["versions"]
        known = of_store.entries
        return [name for name, version in versions.items() if known.get(name, {"version": 0})["version"] < version]

    def _answer(self, of_store: _Store, wait: _Search) -> Message:
        entries = {name: of_store.entries.get(name) for name in wait.message["versions"]}
        return {"kind": "answer", "id": wait.message["id"], "value": entries}


def _names_of_keys(names: list[str]) -> list[str]:
    return [name.removeprefix(KEY) for name in names]


def _failure_of_wait(wait: _Search, error: str, text: str) -> Message:
    return {"kind": "error", "id": wait.message["id"], "error": error, "text": text}


class Place(NamedTuple):
    role: str
    number: int


@dataclass
class Process:
    """A process of the job; `member` is the number of its connection."""

    member: int
    host: str
    pid: int
    attempt: int
    addresses: list[list[Any]]  # host and port of its server, one for each interface; empty without a server
    waits_until_s: float  # for the other processes
    heartbeat_s: float
    came_s: float
    heard_s: float
    term: int = 0  # how many processes had the place before
    is_recovery: bool = False
    is_done: bool = False
    lost_s: float | None = None
    text: str = ""  # why it was lost
    snapshot_age_s: float | None = None  # age of the snapshot that a server has restored
    is_announced: bool = False  # whether the others know that it is lost
    pushed_in: int | None = None  # the last of its requests in which it waited with all its pushes at the servers

    @staticmethod
    def of(member: int, message: dict[str, Any], now_s: float) -> Process:
        """Made from the message with which it asks for a place."""
        addresses = [[str(host), int(port)] for host, port in message["addresses"]]
        waits_until_s = now_s + float(message["patience_s"]) if message["patience_s"] else float("inf")
        return Process(
            *(member, str(message["host"]), int(message["pid"]), int(message["attempt"])),
            *(addresses, waits_until_s),
            *(float(message["heartbeat_s"]), now_s, now_s),
        )

    def is_here(self) -> bool:
        return not self.is_done and self.lost_s is None

    def may_come_back(self) -> bool:
        return self.lost_s is not None and not self.is_announced

    def is_overdue(self, now_s: float, rejoin_s: float) -> bool:
        """Whether the time to wait for a replacement is over."""
        return self.may_come_back() and self.lost_s is not None and now_s - self.lost_s > rejoin_s

    def is_dead(self, now_s: float, silent_s: float) -> bool:
        return not self.is_done and (self.lost_s is not None or now_s - self.heard_s > silent_s)

    def name(self) -> str:
        return f"{self.host}, pid {self.pid}"


def in_words(place: Place, process: Process) -> str:
    return f"{place.role} {place.number} ({process.name()})"


class Limits(NamedTuple):
    """The options of the scheduler."""

    workers: int
    servers: int  # 0: one in each worker
    capacity: int  # the most workers at any time
    timeout_s: float  # of silence, after which a process is dead
    rejoin_s: float  # before the others hear of a dead worker
    keeps: bool  # whether the servers stay when all workers are done
    start_timeout_s: float  # how long a job that has not begun goes on without any process; 0 is for ever


class Tell(NamedTuple):
    """A message to send to a process."""

    member: int
    message: Message


class Drop(NamedTuple):
    """Forget the connection of a process."""

    member: int


class Over(NamedTuple):
    """The job is over. With a text it has never begun."""

    failure: str = ""


class Note(NamedTuple):
    """A line of the log."""

    text: str


Output = Tell | Drop | Over | Note


@dataclass
class _Order:
    """A command that servers are carrying out."""

    member: int
    id: int
    missing: set[Place]
    failure: Message | None = None


class _Vacancy(NamedTuple):
    """A place whose process died before the job began."""

    text: str
    since_s: float


@dataclass
class _State:
    is_running: bool = False
    is_elastic: bool = False
    is_over: bool = False
    lonely_s: float | None = None  # since when no worker has lived although not all are done
    empty_s: float | None = None  # since when a job that has not begun has had no process


class _Workers(NamedTuple):
    """The workers, by number, until a process comes or is lost, announced or done."""

    here: dict[int, Process]  # includes workers whose loss is not announced yet
    originals: list[int]  # those that live and have not replaced a lost one
    gone: dict[int, Failure]


class Membership:
    """The state machine. Every method returns what to do now, in this order.

    The message of a worker in a round takes constant time; the last one of a round, and each change of the processes,
    take time for each process. A message to all is one object.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._token = secrets.token_hex(8)
        self._processes: dict[Place, Process] = {}
        self._places: dict[int, Place] = {}  # by connection
        self._vacancies: dict[Place, _Vacancy] = {}
        self._directory = Directory()
        self._rounds = Rounds()
        self._warned_s = -float("inf")  # of waits up to this time it has warned
        self._orders: dict[int, _Order] = {}
        self._numbers = itertools.count()
        self._state = _State()
        self._known_workers: _Workers | None = None  # as long as no process changes

    # --------------------------------------------------------------------------------------------------- processes

    def come(self, member: int, message: Message, now_s: float) -> list[Output]:
        """A process asks for a place: that of its role and task, or any."""
        process = Process.of(member, message, now_s)
        if message["role"] == SCHEDULER:
            return self._refuse_scheduler(process, message)
        try:
            self._require_heartbeat(process)
            self._require_size(process, message)
            place = self._place_for(str(message["role"]), message["task"], process)
        except ValueError as error:
            failure = {"kind": "error", "id": message["id"], "error": "ValueError", "text": str(error)}
            return [Tell(member, failure), Note(str(error))]
        output: list[Output] = []
        if place in self._processes and self._processes[place].is_here():
            text = f"another process has taken its place ({process.name()})"
            output += self._expel(place, text, f"was expelled: {text}", now_s)
        before = self._processes.get(place)
        process.term = before.term + 1 if before is not None else 0
        self._processes[place], self._places[member] = process, place
        self._known_workers = None
        self._vacancies.pop(place, None)
        self._state.empty_s = None
        process.is_recovery = self._state.is_running
        output += [
            Note(f"{in_words(place, process)} has come"),
            Tell(member, self._own_place(place, message["id"])),
        ]
        if not self._state.is_running:
            return output + self._begin_if_all_are_here()
        if place.role == WORKER:  # a server reports when it is ready
            self._state.lonely_s = None
            output += self._announce_return(place)
        return [*output, Tell(member, self._world())]

    def lose(self, member: int, text: str, now_s: float) -> list[Output]:
        """A process has died, or is taken for dead."""
        place = self._places.pop(member, None)
        if place is None:
            return []
        process = self._processes[place]
        process.lost_s, process.text = now_s, text
        self._known_workers = None
        output: list[Output] = [Note(f"{in_words(place, process)} is lost: {text}"), Drop(member)]
        if not self._state.is_running:
            del self._processes[place]  # another process may take it before the job begins
            self._vacancies[place] = _Vacancy(f"{in_words(place, process)} has died: {text}", now_s)
            return output
        output += self._forget_orders(place)
        if place.role == WORKER:
            output += self._fence(place)
        if place.role == SERVER or self._limits.rejoin_s == 0 or self._state.is_elastic:
            output += self._announce(place)
        return output + self._end_if_done(now_s)

    def done(self, member: int, now_s: float) -> list[Output]:
        """A process has ended without an error."""
        place = self._places.pop(member, None)
        if place is None:
            return []
        process = self._processes[place]
        process.is_done = True
        self._known_workers = None
        output: list[Output] = [Note(f"{in_words(place, process)} is done"), Drop(member)]
        text = _how_it_is_gone(place, process)
        left = {"kind": "left", "role": place.role, "number": place.number, "text": text, "term": process.term}
        output += [Tell(one.member, left) for one in self._here()]
        output += self._end_keys(place, text)
        return output + self._close_rounds() + self._end_if_done(now_s)

    def tick(self, now_s: float) -> list[Output]:
        """Handles everything that is due: silent processes, lost ones, requests, vacancies."""
        output: list[Output] = []
        for place in list(self._places.values()):
            silent_s = now_s - self._processes[place].heard_s
            if silent_s > self._limits.timeout_s:
                text = f"it has said nothing for {silent_s:.1f} s (kv_timeout_s)"
                told = (
                    f"was expelled after {silent_s:.1f} s of silence (kv_timeout_s): it was stopped or kept from "
                    "running, and the others take this process for dead; start it again"
                )
                output += self._expel(place, text, told, now_s)
        for place, process in self._processes.items():
            if process.is_overdue(now_s, self._limits.rejoin_s):
                output += self._announce(place)
        output += [Tell(member, failure) for member, failure in self._directory.overdue(now_s)]
        output += [Tell(member, failure) for member, failure in self._rounds.overdue(now_s, self._workers().here)]
        waits = self._waits()
        output += [*self._end_waits(waits), *self._warn(waits, now_s)]
        output += self._say_who_has_not_come(now_s)
        output += self._give_up_vacancies(now_s)
        output += self._give_up_if_empty(now_s)
        lonely_s = self._state.lonely_s
        if lonely_s is not None and now_s - lonely_s > self._limits.timeout_s and not self._limits.keeps:
            output += self._end("no worker is left")
        return output

    def _expel(self, place: Place, text: str, told: str, now_s: float) -> list[Output]:
        """Loses a process that may still run or run again later, and tells it so. `text` is for the others."""
        process = self._processes[place]
        expelled = {"kind": "expelled", "text": f"{in_words(place, process)} {told}"}
        return [Tell(process.member, expelled), *self.lose(process.member, text, now_s)]

    def end(self, text: str, error: str) -> list[Output]:
        """The scheduler ends before its job. The processes raise this error."""
        return self._end(text, error)

    # ---------------------------------------------------------------------------------------------------- messages

    def hear(self, member: int, message: Message, now_s: float) -> list[Output]:
        """Handles a message of a process that has come. Raises KeyError, TypeError or ValueError if malformed."""
        place = self._places.get(member)
        if place is None:  # the process was refused a place, and still gives signs of life until it has ended
            return []
        self._processes[place].heard_s = now_s
        kind = message["kind"]
        if kind == "say":
            return self._say(place, message, now_s)
        if kind == "publish":
            return [Tell(*one) for one in self._directory.publish(message["store"], message["entries"])]
        if kind == "find":
            return [Tell(*one) for one in self._directory.find(member, message, now_s)]
        if kind == "stuck":
            return self._look_at(place, message)
        if kind == "pushed":
            self._processes[place].pushed_in = int(message["id"])
            return []
        if kind == "interrupted":
            self._forget({(member, int(message["id"]))})
            return []
        if kind == "dead":
            return [self._answer(member, message, self._count_dead(message["who"], message["silent_s"], now_s))]
        if kind == "command":
            return self._order(member, message)
        if kind == "obeyed":
            return self._obeyed(place, message)
        if kind == "ready":
            self._processes[place].snapshot_age_s = float(message["snapshot_age_s"])
            return self._announce_return(place)
        if kind == "elastic":
            self._state.is_elastic = True
            return self._close_rounds()
        return []  # a heartbeat

    def _say(self, place: Place, message: Message, now_s: float) -> list[Output]:
        member = self._processes[place].member
        originals = self._workers().originals
        answers: list[Output] = [
            Tell(*one) for one in self._rounds.say(message, place.number, member, now_s, originals)
        ]
        if message["label"] == END:
            text = f"{in_words(place, self._processes[place])} has ended"
            ending = {"kind": "ending", "role": WORKER, "number": place.number, "text": text}
            others = (one for other, one in self._of(WORKER) if one.is_here() and other != place)
            answers += [*(Tell(one.member, ending) for one in others), *self._end_keys(place, text)]
        return answers + self._close_rounds()

    def _waits(self) -> dict[int, Wait]:
        """Returns the workers that wait for others, by number."""
        waits = [*self._rounds.waits(self._workers().here), *self._directory.waits()]
        here = {one.member: place.number for place, one in self._of(WORKER) if one.is_here()} if waits else {}
        return {here[wait.member]: wait for wait in waits if wait.member in here}

    def _look_at(self, place: Place, message: Message) -> list[Output]:
        """Tells a worker that waits for pushes where the others wait, or ends its wait if it cannot go on.

        Another worker may have pushed after the asking one has looked at its request (`awaited`). So it counts as
        awaited only if it was in its wait, with all pushes at the servers, when the asking one asked before (`known`).
        """
        member, waits = self._processes[place].member, self._waits()
        others = {
            str(number): wait
            for number, wait in waits.items()
            if wait.id == self._processes[Place(WORKER, number)].pushed_in
        }
        was_there = [number for number, wait in others.items() if message["known"].get(number) == [*wait[:2]]]
        awaited = frozenset(message["awaited"]) & {int(number) for number in was_there}
        own = Wait(member, message["id"], f"in a push or pull ({message['what']})", awaited)
        ended = self._end_waits({**waits, place.number: own})
        if ended:
            return ended
        return [self._answer(member, message, {number: [*wait[:3]] for number, wait in others.items()})]

    def _end_waits(self, waits: Mapping[int, Wait]) -> list[Output]:
        """Fails the requests of workers that wait for each other."""
        stuck = never_ending(waits)
        if not stuck:
            return []
        text = f"workers wait for each other: {words_of(stuck)}; all have to make the same calls, in one order"
        requests = {(one.member, one.id) for one in stuck.values()}
        self._forget(requests)
        return [
            Tell(member, {"kind": "error", "id": number, "error": "DeadlockError", "text": text})
            for member, number in sorted(requests)
        ]

    def _forget(self, requests: Collection[tuple[int, int]]) -> None:
        """Workers give up these requests, by member and id."""
        self._rounds.forget(requests)
        self._directory.forget(requests)

    def _warn(self, waits: Mapping[int, Wait], now_s: float) -> list[Output]:
        """Tells each worker once that it has waited for long, and for which workers."""
        output: list[Output] = []
        for wait in waits.values():
            if self._warned_s < wait.warn_s <= now_s:
                late = list_of_ranks(sorted(wait.awaited)).replace("rank", "worker")
                output.append(Tell(wait.member, {"kind": "stalled", "text": f"{wait.what}: {late} did not come"}))
        self._warned_s = now_s
        return output

    def _end_keys(self, place: Place, text: str) -> list[Output]:
        """Fails requests for keys if this worker was the one that publishes them, and no other can come."""
        if place != Place(WORKER, 0) or self._state.is_elastic or self._limits.keeps:
            return []
        return [Tell(*one) for one in self._directory.lose(place, text)]

    def _close_rounds(self) -> list[Output]:
        """Ends rounds that are complete, or that a lost worker will never join."""
        workers = self._workers()
        return [Tell(*one) for one in self._rounds.close(workers.here, workers.gone, self._state.is_elastic)]

    def _count_dead(self, who: int, silent_s: float, now_s: float) -> int:
        """`who`: 1 is the scheduler, which answers, 2 the servers and 4 the workers."""
        bits = {SERVER: 2, WORKER: 4}
        dead = sum(
            bool(bits[place.role] & who) and process.is_dead(now_s, silent_s)
            for place, process in self._processes.items()
        )
        # Servers in workers die with them.
        with_workers = who & 6 == 2 and self._limits.servers == 0
        return self._count_dead(4, silent_s, now_s) if with_workers else dead

    def _order(self, member: int, message: Message) -> list[Output]:
        servers = {place: one for place, one in self._processes.items() if place.role == SERVER and one.is_here()}
        number = next(self._numbers)
        self._orders[number] = _Order(member, message["id"], set(servers))
        order = {"kind": "command", "order": number, "head": message["head"], "body": message["body"]}
        return [Tell(one.member, order) for one in servers.values()] + self._finish_order(number)

    def _obeyed(self, place: Place, message: Message) -> list[Output]:
        order = self._orders.get(message["order"])
        if order is None:
            return []
        order.missing.discard(place)
        if message["text"] and order.failure is None:
            order.failure = {"kind": "error", "id": order.id, "error": "RemoteError", "text": message["text"]}
        return self._finish_order(message["order"])

    def _forget_orders(self, place: Place) -> list[Output]:
        for order in self._orders.values():
            if place in order.missing:
                order.missing.discard(place)
                text = f"{in_words(place, self._processes[place])} has died: {self._processes[place].text}"
                order.failure = {"kind": "error", "id": order.id, "error": "PeerLostError", "text": text}
        return [one for number in list(self._orders) for one in self._finish_order(number)]

    def _finish_order(self, number: int) -> list[Output]:
        order = self._orders[number]
        if order.missing:
            return []
        del self._orders[number]
        return [Tell(order.member, order.failure or {"kind": "answer", "id": order.id, "value": None})]

    # ------------------------------------------------------------------------------------------------------ places

    def _place_for(self, role: str, task: int | None, process: Process) -> Place:
        if self._state.is_over:
            raise ValueError("the job is over")
        if not role:
            has_all_servers = len(list(self._of(SERVER))) >= self._limits.servers
            role = WORKER if has_all_servers and not self._lost(SERVER) else SERVER
        most = self._limits.workers if role == WORKER else self._limits.servers
        if self._state.is_running and role == WORKER and (self._state.is_elastic or self._limits.keeps):
            most = self._limits.capacity
        if role == SERVER and most == 0:
            raise ValueError("a server has come to a job without any (DMLC_NUM_SERVER=0): they are in the workers")
        if task is not None:
            return self._place_of_task(Place(role, int(task)), most, process)
        if self._lost(role):
            return min(self._lost(role))
        for number in range(most):
            place = Place(role, number)
            if place not in self._processes or (self._limits.keeps and not self._processes[place].is_here()):
                return self._checked(place, process)
        raise ValueError(f"a {role} has come to a job that has all its {most} {role}s (DMLC_NUM_{role.upper()})")

    def _place_of_task(self, place: Place, most: int, process: Process) -> Place:
        if not 0 <= place.number < most:
            raise ValueError(f"{place.role} {place.number} (DMLC_TASK_ID) has come to a job of {most} {place.role}s")
        before = self._processes.get(place)
        if before is not None and before.is_here() and process.attempt <= before.attempt:
            raise ValueError(
                f"two processes are {place.role} {place.number} (DMLC_TASK_ID): {before.name()} and {process.name()}"
            )
        return self._checked(place, process)

    def _checked(self, place: Place, process: Process) -> Place:
        """Raises ValueError if the lost worker had a server, whose values are gone."""
        if place in self._processes and self._limits.servers == 0 and self._state.is_running:
            raise ValueError(
                f"worker {place.number} cannot come back: a part of the values was in it; start servers of their own "
                "(DMLC_NUM_SERVER)"
            )
        return place

    def _refuse_scheduler(self, process: Process, message: Message) -> list[Output]:
        """Answers the second scheduler of a place. A job that has not begun ends: processes may be of either job."""
        text = (
            f"{process.name()} is a second scheduler at DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT: if these are two jobs, "
            "give each another DMLC_PS_ROOT_PORT"
        )
        refusal = Tell(process.member, {"kind": "error", "id": message["id"], "error": "ValueError", "text": text})
        if self._state.is_running or self._state.is_over:
            return [refusal, Note(text)]
        self._state.is_over = True
        failure = {"kind": "failed", "error": "ValueError", "text": text}
        return [refusal, *(Tell(one.member, failure) for one in self._here()), Note(text), Over(text)]

    def _require_size(self, process: Process, message: Message) -> None:
        """Raises ValueError for a process of a job of another size, as long as this one has not begun."""
        told, known = message.get("size"), [self._limits.workers, self._limits.servers]
        if told is not None and told != known and not self._state.is_running:
            raise ValueError(
                f"{process.name()} is of a job of {told[0]} workers and {told[1]} servers, but the scheduler of one of "
                f"{known[0]} and {known[1]} (DMLC_NUM_WORKER, DMLC_NUM_SERVER): if these are two jobs, give each "
                "another DMLC_PS_ROOT_PORT"
            )

    def _require_heartbeat(self, process: Process) -> None:
        """Raises ValueError if a process would be expelled between two of its heartbeats."""
        if process.heartbeat_s >= self._limits.timeout_s:
            raise ValueError(
                f"kv_timeout_s of the scheduler must be more than kv_heartbeat_s of all others, not "
                f"{self._limits.timeout_s:g} and {process.heartbeat_s:g}"
            )

    def _lost(self, role: str) -> list[Place]:
        return [place for place, one in self._of(role) if not one.is_here() and not one.is_done]

    def _of(self, role: str) -> Iterator[tuple[Place, Process]]:
        return ((place, one) for place, one in self._processes.items() if place.role == role)

    def _here(self) -> list[Process]:
        return [one for one in self._processes.values() if one.is_here()]

    def _workers(self) -> _Workers:
        if self._known_workers is None:
            workers = dict(self._of(WORKER))
            self._known_workers = _Workers(
                {place.number: one for place, one in workers.items() if one.is_here() or one.may_come_back()},
                [place.number for place, one in workers.items() if one.is_here() and not one.is_recovery],
                {
                    place.number: Failure(one.is_done, in_words(place, one), one.text)
                    for place, one in workers.items()
                    if one.is_done or (one.lost_s is not None and one.is_announced)
                },
            )
        return self._known_workers

    # ------------------------------------------------------------------------------------------- beginning and end

    def _begin_if_all_are_here(self) -> list[Output]:
        if len(self._processes) < self._limits.workers + self._limits.servers:
            return []
        self._state.is_running = True
        world = self._world()
        return [Tell(one.member, world) for one in self._processes.values()]

    def _own_place(self, place: Place, request: int) -> Message:
        own = {"role": place.role, "number": place.number, "is_recovery": self._processes[place].is_recovery}
        return {"kind": "place", "id": request, **own}

    def _world(self) -> Message:
        """The same for all, so that it is packed once."""
        servers = dict(self._of(SERVER if self._limits.servers else WORKER))
        workers = dict(self._of(WORKER))
        return {
            "kind": "world",
            "workers": self._limits.workers,
            "capacity": self._limits.capacity,
            "servers": [servers[place].addresses for place in sorted(servers)],
            "names": {str(place.number): one.name() for place, one in workers.items()},
            "hosts": {str(place.number): one.host for place, one in workers.items()},
            "living": [place.number for place, one in workers.items() if one.is_here()],
            "restored": {
                str(place.number): one.snapshot_age_s
                for place, one in self._of(SERVER)
                if one.snapshot_age_s is not None
            },
            "token": self._token,
            "terms": {str(place.number): one.term for place, one in workers.items()},
            "gone": {
                str(place.number): _how_it_is_gone(place, one)
                for place, one in workers.items()
                if one.is_done or one.is_announced
            },
        }

    def _say_who_has_not_come(self, now_s: float) -> list[Output]:
        overdue = [one for one in self._here() if one.waits_until_s < now_s]
        if self._state.is_running or not overdue:
            return []
        wanted = [(WORKER, self._limits.workers), (SERVER, self._limits.servers)]
        missing = [
            f"{role} {number}"
            for role, count in wanted
            for number in range(count)
            if Place(role, number) not in self._processes
        ]
        text = f"the store has waited for all workers and servers (start_timeout_s): {', '.join(missing)} did not come"
        failure = {"kind": "failed", "error": "StalledError", "text": text}
        output: list[Output] = [Tell(one.member, failure) for one in overdue]
        for one in overdue:
            place = self._places.pop(one.member)
            del self._processes[place]
            self._known_workers = None
            output.append(Drop(one.member))
        if not self._processes:
            self._state.is_over = True
            output.append(Over(text))
        return output

    def _give_up_vacancies(self, now_s: float) -> list[Output]:
        """Ends a job that has not begun if a process has died and was not replaced in time."""
        if self._state.is_running or self._state.is_over or not self._vacancies or not self._here():
            return []
        patience_s = max(self._limits.timeout_s, self._limits.rejoin_s)
        waits_since_s = min(one.came_s for one in self._here())
        given_up = [one for one in self._vacancies.values() if now_s - max(one.since_s, waits_since_s) > patience_s]
        if not given_up:
            return []
        text = (
            f"the job has not begun: {given_up[0].text}; no other process came in its place within {patience_s:g} s "
            "(kv_timeout_s, kv_rejoin_s)"
        )
        self._state.is_over = True
        failure = {"kind": "failed", "error": "PeerLostError", "text": text}
        return [*(Tell(one.member, failure) for one in self._here()), Note(text), Over(text)]

    def _give_up_if_empty(self, now_s: float) -> list[Output]:
        """Ends a job that has not begun if it has had no process for start_timeout_s."""
        if self._state.is_running or self._state.is_over or self._here():
            return []
        if self._state.empty_s is None:
            self._state.empty_s = now_s
        if not 0 < self._limits.start_timeout_s < now_s - self._state.empty_s:
            return []
        self._state.is_over = True
        waited = f"the scheduler has waited {self._limits.start_timeout_s:g} s (start_timeout_s)"
        text = f"the job has not begun: {waited} for workers and servers"
        return [Note(text), Over(text)]

    def _fence(self, place: Place) -> list[Output]:
        """Makes servers refuse requests of a lost process, whose loss may not be announced yet."""
        fenced = {"kind": "fenced", "role": place.role, "number": place.number, "term": self._processes[place].term}
        return [Tell(one.member, fenced) for _, one in self._of(SERVER) if one.is_here()]

    def _announce_return(self, place: Place) -> list[Output]:
        process = self._processes[place]
        back = {"kind": "back", "role": place.role, "number": place.number, "addresses": process.addresses}
        back["term"] = process.term
        if process.snapshot_age_s is not None:
            back["snapshot_age_s"] = process.snapshot_age_s
        return [Tell(one.member, back) for one in self._here() if one is not process]

    def _announce(self, place: Place) -> list[Output]:
        """Tells all processes that this one is lost."""
        process = self._processes[place]
        process.is_announced = True
        self._known_workers = None
        text = _how_it_is_gone(place, process)
        lost = {"kind": "lost", "role": place.role, "number": place.number, "text": text, "term": process.term}
        found = [Tell(*one) for one in self._directory.lose(place, text)] if place == Place(WORKER, 0) else []
        return [*(Tell(one.member, lost) for one in self._here()), *found, *self._close_rounds()]

    def _end_if_done(self, now_s: float) -> list[Output]:
        workers = dict(self._of(WORKER))
        if any(one.is_here() for one in workers.values()):
            return []
        if all(one.is_done for one in workers.values()) and not self._limits.keeps:
            return self._end("all workers are done")
        self._state.lonely_s = now_s
        return []

    def _end(self, text: str, error: str = "ShutDownError") -> list[Output]:
        if self._state.is_over:
            return []
        self._state.is_over = True
        over = {"kind": "over", "text": text, "error": error}
        return [Note(f"the job is over: {text}"), *(Tell(one.member, over) for one in self._here()), Over()]

    def _answer(self, member: int, message: Message, value: Any) -> Tell:
        return Tell(member, {"kind": "answer", "id": message["id"], "value": value})


def _how_it_is_gone(place: Place, process: Process) -> str:
    how = "has ended" if process.is_done else f"has died: {process.text}"
    return f"{in_words(place, process)} {how}"
