"""The world of the scheduler of stores: the real Scheduler, Membership, Rounds and Directory, the SchedulerClients and
Workers of processes, and what servers do with notices, while processes stop, die and come back, and connections break.

Simulated are the connections, the script of each worker, and the values: a client knows how often each worker has
pushed, and its pulls wait for rounds as those of a StoreClient do. The work of C++ on values has a world of its own
(core/store.cc).

Rules. All workers that hold a round of the scheduler hear the same, and nobody is missing who lives. An entry of the
directory is never older than what is asked for. A process that was expelled hears nothing more. Without a cause there
is no error, and an error names only processes that were disturbed, or workers that have not come to a round. In the end
every wait has ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from ringtrain import errors
from ringtrain.job.rendezvous.conversation import AWAY_S
from ringtrain.job.rendezvous.lasting import GivenUpError, GoneError
from ringtrain.job.rendezvous.server import Place
from ringtrain.kvstore.servers import scheduler, scheduler_client, server, worker
from ringtrain.kvstore.servers.arrival import Arrival
from ringtrain.kvstore.servers.membership import Limits
from ringtrain.kvstore.servers.roles import SERVER, WORKER
from ringtrain.kvstore.servers.scheduler import Scheduler
from ringtrain.kvstore.servers.scheduler_client import SchedulerClient
from ringtrain.kvstore.servers.worker import Worker
from simulate.story import Story, run_replaced
from simulate.threads import Killed, Threads, modules

_HEALED_S = 25.0
_END_S = 120.0
_LEAST_CAPACITY = 4
_NAMES = re.compile(r"\b(worker|server) (\d+)")
# The missing workers of a round, and the error of another process in an error, which was judged there.
_MISSING = re.compile(r"^(.+): workers? ([\d, -]+) did not come")
_QUOTED = re.compile(r": \w+Error: .*")
# Errors that end a process in a job that has trouble; any other is a defect of the product.
_EXPECTED = (errors.RingtrainError, ValueError)


class _Process:
    """Of a worker, of a server, or the scheduler."""

    def __init__(self, world: _World, role: str, number: int, attempt: int, pid: int):
        self.world, self.role, self.number, self.attempt, self.pid = world, role, number, attempt, pid
        self.is_killed = self.is_over = False
        self.stopped_until = 0.0
        self.stores: _Server | None = None
        self.connections: list[_Connection] = []
        self.waits_for = ""
        self.is_new = attempt > 0

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}" if self.role != "scheduler" else self.role

    def runs(self) -> bool:
        return not self.is_killed and not self.is_over


class _Connection:
    """Of a process to the scheduler: in the place of LastingConnection there, and of Line here.

    A connection that is reset is made again after a while, and delivers then what was said meanwhile; world `elastic`
    has how. After AWAY_S it is too late.
    """

    def __init__(self, world: _World, process: _Process):
        self._world, self.process = world, process
        self.name = ""
        self._inbox: list[Any] = []
        self._last_s = {True: 0.0, False: 0.0}
        self._is_shut = self._is_ended = False
        self.error: Exception = GoneError("its process has ended")
        self.is_open = True  # at the scheduler
        self.broken_until_s = 0.0
        process.connections.append(self)

    # At the process.

    def has_come(self, longest_s: float) -> bool:
        if longest_s > 0:
            self._world.threads.wait(self._has_something, self._world.story.now + longest_s)
        return self._has_something()

    def hear(self, _deadline: float) -> list[Any]:
        if not self._inbox:
            raise self.error if self._is_ended else GoneError("shut")
        return [self._inbox.pop(0)]

    def send(self, message: Any) -> None:
        if not (self._is_shut or self._is_ended):
            self._world.hub.take(self, message)

    def await_sent(self, longest_s: float) -> None:
        end_s = min(self.broken_until_s, self._world.story.now + longest_s)
        self._world.threads.wait(lambda: self._is_ended, end_s)

    def broken_for_s(self) -> float:
        return 0.0

    def forget_in_child(self) -> None:
        pass

    def own_address(self) -> str:
        return "10.0.0.1"

    def shut(self) -> None:
        if not self._is_shut:
            self._is_shut = True
            self._world.hub.cut(self)

    close = shut

    def _has_something(self) -> bool:
        return bool(self._inbox) or self._is_ended or self._is_shut

    # In between.

    def arrival_s(self, is_to_scheduler: bool) -> float:
        begin_s = max(self._world.story.now, self.broken_until_s)
        at = max(self._last_s[is_to_scheduler], begin_s + self._world.delay(self.process))
        self._last_s[is_to_scheduler] = at
        return at

    def deliver(self, message: Any) -> None:
        if self._is_ended:
            return
        if self._inbox and self._inbox[-1]["kind"] == "expelled":
            self._world.story.find(f"{self.process.name} hears {_short(message)} after it was expelled")
        self._inbox.append(message)

    def reset(self, lasts_s: float) -> None:
        story = self._world.story
        if lasts_s > AWAY_S:
            story.after(AWAY_S, lambda: self._world.hub.give_up(self))
            story.after(lasts_s, lambda: self.end(GivenUpError()))
        self.broken_until_s = max(self.broken_until_s, story.now + lasts_s)

    def end(self, error: Exception) -> None:
        if not self._is_ended:
            self._is_ended, self.error = True, error


class _Hub:
    """In the place of Hub, in the process of the scheduler."""

    def __init__(self, world: _World, listener: Any, tick_s: float):
        self.port = 1
        self._world, self._listener, self._tick_s = world, listener, tick_s
        self._process = world.scheduler
        self._lines: list[_Connection] = []
        self._work: list[Callable[[], object]] = []
        world.hub = self

    def start(self) -> None:
        self._world.story.after(self._tick_s, self._tick)

    def call(self, function: Callable[[], object]) -> None:
        self._do(function)

    def send(self, line: _Connection, message: dict[str, Any]) -> None:
        if line.is_open:
            if message["kind"] != "beat":
                self._world.trace("scheduler", f"tells {line.process.name} {_short(message)}")
            if message["kind"] == "error":
                self._world.require_missing(line.process, message["text"])
            self._world.story.at(line.arrival_s(False), lambda: line.deliver(message))

    def are_some_away(self) -> bool:
        return any(line.is_open and line.broken_until_s > self._world.story.now for line in self._lines)

    def drop(self, line: _Connection) -> None:
        if line.is_open:
            line.is_open = False
            error = GoneError("its process has ended")
            self._world.story.at(line.arrival_s(False), lambda: line.end(error))

    def close(self) -> None:
        for line in list(self._lines):
            self.drop(line)

    # The processes' side.

    def take(self, line: _Connection, message: Any) -> None:
        if line not in self._lines:
            self._lines.append(line)

        def hear() -> None:
            if not line.is_open:
                return
            if message["kind"] != "beat":
                self._world.trace(line.process.name, f"says {_short(message)}")
            if message["kind"] == "say":
                self._world.came.setdefault(message["label"], set()).add(line.process)
            try:
                self._listener.hear(line, message)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                self._world.story.find(f"the scheduler does not understand {line.process.name}: {error!r}")

        self._world.story.at(line.arrival_s(True), lambda: self._do(hear))

    def cut(self, line: _Connection, text: str = "its process has ended") -> None:
        """The connection has ended, seen from the process."""
        self._world.story.at(line.arrival_s(True), lambda: self._do(lambda: self._lose(line, text)))

    def give_up(self, line: _Connection) -> None:
        self._do(lambda: self._lose(line, "the network has broken its connection"))

    def _lose(self, line: _Connection, text: str) -> None:
        if line.is_open and line in self._lines:
            line.is_open = False
            self._listener.lose(line, text)

    def _tick(self) -> None:
        self._do(self._listener.tick)
        if not self._process.is_killed:
            self._world.story.after(self._tick_s, self._tick)

    def _do(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        self._go_on()

    def _go_on(self) -> None:
        """Delivers in order what came while the process was stopped."""
        story = self._world.story
        while self._work and not self._process.is_killed:
            if self._process.stopped_until > story.now:
                story.at(self._process.stopped_until, self._go_on)
                return
            self._work.pop(0)()


class _Client:
    """In the place of the core's StoreClient: what it hears decides what its pulls do."""

    def __init__(self, world: _World, process: _Process, number: int):
        self._world, self._process, self._number = world, process, number
        self._ended: Exception | None = None
        self._lost: dict[int, str] = {}
        self._lost_servers: dict[int, tuple[str, float]] = {}  # why, and until when others may take their places

    def meet(self) -> None: ...

    def close(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def take_shared_parts(self) -> list[Any]:
        return []

    def end(self, text: str, is_lost: bool) -> None:
        kind = errors.PeerLostError if is_lost else errors.ShutDownError
        self._ended = self._ended or kind(text)

    def lost(self, worker: int, text: str, _first_term: int) -> None:
        self._lost[worker] = text

    def back(self, worker: int) -> None:
        self._lost.pop(worker, None)

    def lost_server(self, server: int, text: str) -> None:
        story = self._world.story
        self._lost_servers[server] = text, story.now + self._world.rejoin_s
        story.after(self._world.rejoin_s, lambda: None)

    def back_server(self, server: int, _addresses: Any, keeps_memory: bool) -> None:
        self._lost_servers.pop(server, None)

    def push(self, is_synchronous: bool) -> None:
        """Push, and wait for the values: in rounds those of all workers."""
        pushed = self._world.pushed
        pushed[self._number] = pushed.get(self._number, 0) + 1
        own = pushed[self._number]

        def is_done() -> bool:
            if self._ended or (is_synchronous and self._lost) or self._lost_for_good():
                return True
            if self._lost_servers:
                return False
            others = range(self._world.workers) if is_synchronous else ()
            return all(pushed.get(other, 0) >= own for other in others)

        self._world.threads.wait(is_done)
        if self._ended:
            raise self._ended
        if is_synchronous and self._lost:
            raise errors.PeerLostError(next(iter(self._lost.values())))
        if self._lost_for_good():
            raise errors.PeerLostError(self._lost_for_good())

    def _lost_for_good(self) -> str:
        now_s = self._world.story.now
        return next((text for text, until_s in self._lost_servers.values() if until_s <= now_s), "")


class _Server:
    """In the place of the core's StoreServer."""

    def metrics(self) -> dict[str, float]:
        return {}

    def lost(self, worker: int, first_term: int) -> None: ...

    def left(self, worker: int) -> None: ...

    def back(self, worker: int, first_term: int) -> None: ...

    def begin_recovery(self) -> None: ...

    def close(self) -> None: ...


class _Nothing:
    """In the place of snapshots, and of optimizers in Python."""

    def has_any(self) -> bool:
        return False

    def write_if_due(self, *_: object) -> None: ...

    def restore(self, *_: object) -> float:
        return 1.0


class _World:
    def __init__(self, story: Story):
        self.story = story
        self.threads = Threads(story)
        self.hub: Any = None
        self._draw()
        self.scheduler = _Process(self, "scheduler", 0, 0, 1)
        self.processes: list[_Process] = []
        self.disturbed: set[str] = set()
        self.pushed: dict[int, int] = {}
        self._next_step: dict[int, int] = {}  # by worker: for the process that takes its place
        self._cuts: list[tuple[_Process, float]] = []
        self._slow_until: dict[str, float] = {}
        self.came: dict[str, set[_Process]] = {}  # by label: the workers whose word the scheduler has heard
        self._said: dict[str, dict[int, Any]] = {}  # by label: what those who held a round together have heard

    def _draw(self) -> None:
        random = self.story.random
        self.workers, self.servers = random.randint(1, 3), random.randint(1, 2)
        self.is_synchronous = random.random() < 0.5
        self.rejoin_s = random.choice([0.0, 0.0, random.uniform(1, 8)])
        self.timeout_s, self.heartbeat_s = 4.0, random.choice([0.5, 1.0, 1.9])
        self.start_timeout_s = random.choice([8.0, 30.0])
        self.stall_s = random.choice([0.0, 0.0, 6.0])
        self.steps = random.randint(1, 8)
        self.pause_s = random.choice([0.01, 0.5, 2.0])
        self._delay_s = random.choice([0.001, 0.05, 0.3])
        self.is_elastic = random.random() < 0.2 and not self.is_synchronous

    def trace(self, who: str, text: str) -> None:
        self.story.trace(who, text)

    # ---------------------------------------------------------------------------------------------------- processes

    def settings(self) -> dict[str, str]:
        numbers = {
            "kv_timeout_s": self.timeout_s,
            "kv_heartbeat_s": self.heartbeat_s,
            "kv_rejoin_s": self.rejoin_s,
            "stall_shutdown_time_s": self.stall_s,
            "stall_warning_time_s": 60.0,
            "start_timeout_s": self.start_timeout_s,
            "kv_verbose": 0,
            "metrics_port": 0,
        }
        words = {"kv_python_updaters": "off", "shared_memory": "off", "timeline_filename": "", "timeline_limit_mb": "0"}
        return {name: f"{value:g}" for name, value in numbers.items()} | words

    def start(self, role: str, number: int, attempt: int = 0, late_s: float = 0.0) -> None:
        process = _Process(self, role, number, attempt, 100 + len(self.processes))
        self.processes.append(process)
        self.story.after(late_s, lambda: self.threads.start(process, lambda: self._run(process)))

    def _run(self, process: _Process) -> None:
        self.trace(process.name, f"starts, attempt {process.attempt}")
        try:
            self._arrive(process)
            self.trace(process.name, "is done")
        except _EXPECTED as error:
            self.trace(process.name, f"ends of {type(error).__name__}: {error}")
            self._require_cause(process, error)
            self.disturbed.add(process.name)
        except Killed:
            raise
        except BaseException as error:
            self.story.find(f"{process.name} has {type(error).__name__}: {error}")
        self.end_process(process)

    def _arrive(self, process: _Process) -> None:
        process.waits_for = "the scheduler"
        own = SchedulerClient(Place("scheduler", [1]), b"", self.start_timeout_s, self.heartbeat_s, self.timeout_s)
        role, number = own.come(process.role, process.number, process.attempt, [("10.0.0.1", process.pid)])
        arrival = Arrival(role, number, own, [], b"", self.settings())
        process.waits_for = "the others"
        if process.role == SERVER:
            server.serve(arrival)
        else:
            self._work(process, arrival)

    def _work(self, process: _Process, arrival: Arrival) -> None:
        job = Worker(arrival)
        try:
            if self.is_elastic:
                job.is_elastic = True
                job.scheduler_client.be_elastic()
            # In rounds, a script that pushes again what its predecessor has pushed keeps the others waiting by itself.
            first = self._next_step.get(job.number, 0) if self.is_synchronous else 0
            for step in range(first, self.steps):
                process.waits_for = f"step {step}"
                self.threads.wait(None, self.story.now + self.story.random.uniform(0, self.pause_s))
                self._step(process, job, step)
            process.waits_for = "the round before the end"
            job.close()
        except BaseException as error:
            if not isinstance(error, Killed):
                job._give_up(error)
            raise

    def _step(self, process: _Process, job: Worker, step: int) -> None:
        kind = ("push", "round", "directory", "push")[(step * 7 + self.workers) % 4]
        self._next_step[job.number] = step + 1 if kind == "push" else step
        if kind == "push":
            process.waits_for = f"the push of step {step}"
            client: Any = job.client  # a _Client
            client.push(self.is_synchronous)
        elif kind == "round":
            process.waits_for = f"the round of step {step}"
            label = f"round {step}"
            said = (
                job.say_unless_missed(label, [job.number, step])
                if process.is_new
                else job.say(label, [job.number, step])
            )
            self._check_round(process, job, label, said)
        else:
            self._look_up(process, job, step)

    def _look_up(self, process: _Process, job: Worker, step: int) -> None:
        process.waits_for = f"the key of step {step}"
        name = f"key/{step}"
        if job.number == 0:
            job.scheduler_client.publish(0, {name: {"version": 1, "id": step}})
        entry = job.scheduler_client.find(0, {name: 1}, self.stall_s)[name]
        if entry is None or entry["version"] < 1:
            self.story.find(f"the directory gives {entry} for a key of version 1")

    def end_process(self, process: _Process) -> None:
        process.is_over = True
        process.waits_for = ""
        for connection in process.connections:
            connection.shut()

    def kill(self, process: _Process) -> None:
        """Of some the kernel resets the connection, as they have not read all."""
        process.is_killed = True
        for connection in process.connections:
            if process.pid % 3 == 0:
                connection.reset(2 * AWAY_S)
            else:
                connection.shut()

    def _of(self, role: str) -> list[_Process]:
        return [one for one in self.processes if one.role == role]

    def last(self, role: str, number: int) -> _Process:
        return [one for one in self._of(role) if one.number == number][-1]

    # ------------------------------------------------------------------------------------------------------ network

    def delay(self, process: _Process) -> float:
        story = self.story
        until = max((end for one, end in self._cuts if one is process and end > story.now), default=story.now)
        seconds = story.random.uniform(0.0001, self._delay_s)
        if self._slow_until.get(process.name, 0.0) > story.now:
            seconds += story.random.uniform(0, 2.5)
        return until - story.now + seconds

    def connect(self, *_: object) -> _Connection:
        assert self.threads.running is not None
        process = self.threads.running.process
        if self.scheduler.is_killed:
            self.threads.wait(None, self.story.now + self.start_timeout_s)
            raise errors.StalledError("the scheduler of this job was not there")
        return _Connection(self, process)

    # ------------------------------------------------------------------------------------------------------- faults

    def _rate(self) -> float:
        return self.story.random.choice([0.0, 0.0, 0.0, 0.3, 1.0])

    def plan(self) -> None:
        random = self.story.random
        rates = {kind: self._rate() for kind in ("stop", "kill", "scheduler", "cut", "slow", "reset", "late", "pause")}
        late: dict[tuple[str, int], float] = {}
        places = [(WORKER, n) for n in range(self.workers)] + [(SERVER, n) for n in range(self.servers)]
        last_s = 0.0
        for kind, rate in rates.items():
            for _ in range(random.choice([0, 1, 2, 3])):
                role, number = random.choice(places)
                at = random.uniform(0, random.choice([1.0, 10.0]))
                lasts = random.uniform(0.1, random.choice([2.0, 12.0]))
                back_s = random.choice([0.0, random.uniform(0.1, 5.0)])
                if kind == "kill" and last_s and random.random() < 0.5:
                    at = last_s + random.uniform(0, 0.01)  # two die at once
                if random.random() >= rate:
                    continue
                last_s = at if kind == "kill" else last_s
                if not self.story.add_fault(_in_words(kind, f"{role} {number}", at, lasts, back_s)):
                    continue
                if kind == "late":
                    late[role, number] = lasts
                    continue
                self.story.at(at, partial(self._strike, kind, role, number, lasts, back_s))
        for role, number in places:
            self.start(role, number, late_s=late.get((role, number), 0.0))
            if (role, number) in late:
                self.disturbed.add(f"{role} {number}")

    def _strike(self, kind: str, role: str, number: int, lasts_s: float, back_s: float) -> None:
        story = self.story
        process = self.last(role, number)
        until = min(story.now + lasts_s, _HEALED_S)
        if kind in ("scheduler", "pause"):
            if self.scheduler.is_killed:
                return
            self.trace("fault", f"{kind} of the scheduler for {lasts_s:.3f} s")
            self.disturbed |= {one.name for one in self.processes}
            if kind == "scheduler":
                self.scheduler.is_killed = True
                for one in self.processes:
                    for connection in one.connections:
                        error = GoneError("its process has ended")
                        story.at(connection.arrival_s(False), partial(connection.end, error))
            else:
                self.scheduler.stopped_until = until
            return
        if not process.runs():
            return
        self.trace("fault", f"{kind} {process.name}")
        if kind != "reset" or lasts_s > AWAY_S:
            self.disturbed.add(process.name)
        if kind == "kill":
            self.kill(process)
            if back_s:
                story.after(back_s, lambda: self._come_back(role, number))
        elif kind == "stop":
            process.stopped_until = until
            story.at(until, lambda: None)
        elif kind == "cut":
            self._cuts.append((process, until))
            if until - story.now > self.timeout_s:
                for connection in process.connections:
                    story.after(self.timeout_s, partial(self._time_out, connection))
        elif kind == "slow":
            self._slow_until[process.name] = until
        elif kind == "reset":
            for connection in process.connections:
                connection.reset(lasts_s)

    def _time_out(self, connection: _Connection) -> None:
        connection.end(OSError("timed out"))
        self.hub._do(lambda: self.hub._lose(connection, "timed out"))

    def _come_back(self, role: str, number: int) -> None:
        before = self.last(role, number)
        if not before.runs() and not self.scheduler.is_killed:
            self.start(role, number, before.attempt + 1)

    # ------------------------------------------------------------------------------------------------------- checks

    def _check_round(self, process: _Process, job: Worker, label: str, said: dict[int, Any]) -> None:
        for number, value in said.items():
            if value != [number, int(label.split()[1])]:
                self.story.find(f"{process.name} hears in {label} that worker {number} has said {value}")
        is_alone = process.is_new and len(said) == 1
        if not is_alone and said != self._said.setdefault(label, said):
            self.story.find(f"{process.name} hears {said} in {label}, and another worker {self._said[label]}")
        missing = [
            one.name
            for one in self._of(WORKER)
            if one.name not in self.disturbed and one.runs() and one.number not in said
        ]
        if missing and not process.is_new:
            self.story.find(f"{process.name} hears nothing of {', '.join(missing)} in {label}")

    def _require_cause(self, process: _Process, error: Exception) -> None:
        text = _QUOTED.sub("", str(error))
        if isinstance(error, errors.StalledError) and (self.stall_s or self.disturbed):
            return  # what it says was judged when the scheduler sent it
        if not self.disturbed:
            self.story.find(f"{process.name} has an error without a cause: {text}")
        for role, number in _NAMES.findall(text):
            if f"{role} {number}" not in self.disturbed:
                self.story.find(f"an error of {process.name} names {role} {number}, which was not disturbed: {text}")

    def require_missing(self, process: _Process, text: str) -> None:
        """An undisturbed worker may keep the others waiting, but not one that has come."""
        match = _MISSING.match(text)
        if match is None:
            return
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", match[2]):
            for number in range(int(first), int(last or first) + 1):
                worker = self.last(WORKER, number)
                if worker.runs() and worker in self.came.get(match[1], ()):
                    self.story.find(f"{process.name} is told of worker {number}, which has come: {text}")

    def is_over(self) -> bool:
        return bool(self.story.finding) or not any(one.runs() for one in self.processes)

    def run(self) -> None:
        sizes = self.workers, self.servers, _LEAST_CAPACITY
        limits = Limits(*sizes, self.timeout_s, self.rejoin_s, keeps=False, start_timeout_s=self.start_timeout_s)
        made = self.threads.start(self.scheduler, lambda: Scheduler(None, b"", limits, 0))  # type: ignore[arg-type]
        self.threads.run_until(0.0, lambda: made.is_over)
        assert made.is_over
        self.plan()
        self.threads.run_until(_END_S, self.is_over)
        waiting = [f"{one.name} waits for {one.waits_for or 'notices'}" for one in self.processes if one.runs()]
        if waiting:
            self.story.find(f"without an end: {'; '.join(waiting)}")


def _in_words(kind: str, name: str, at_s: float, lasts_s: float, back_s: float) -> str:
    """Returns a fault as a line of text, with the times that count for it."""
    at, lasts = f"at {at_s:.3f} s", f"for {lasts_s:.3f} s"
    if kind in ("scheduler", "pause"):
        return f"kill the scheduler {at}" if kind == "scheduler" else f"stop the scheduler {at}, {lasts}"
    if kind == "kill":
        return f"kill {name} {at}, {f'back after {back_s:.3f} s' if back_s else 'for good'}"
    if kind == "late":
        return f"late {name}, by {lasts_s:.3f} s"
    return f"{kind} {name} {at}, {lasts}"


def _short(message: dict[str, Any]) -> str:
    left_out = ("kind", "host", "pid", "patience_s", "heartbeat_s", "token", "hosts", "names", "addresses", "servers")
    numbers = [f"{name}={value}" for name, value in message.items() if name not in left_out]
    return " ".join([str(message["kind"]), *numbers])


def tell(seed: int, without: Sequence[int] = (), trace: bool = False) -> Story:
    """The story of a seed, without some of its faults."""
    story = Story(seed, without, trace)
    world = _World(story)
    fakes = modules(world.threads, story)

    def pid() -> int:
        return world.threads.running.process.pid if world.threads.running else 0

    system = SimpleNamespace(getpid=pid, register_at_fork=lambda **_: None)
    count = SimpleNamespace(count_store=lambda *_: lambda: None, stop_serving=lambda: None, serve=lambda *_: None)

    def client_of(arrival: Arrival, own: Any) -> _Client:
        assert world.threads.running is not None
        return _Client(world, world.threads.running.process, arrival.number)

    def make_server(*_: object) -> _Server:
        assert world.threads.running is not None
        made = world.threads.running.process.stores = _Server()
        return made

    hub = lambda _sock, _secret, listener, _silent_s, tick_s, _most=0: _Hub(world, listener, tick_s)  # noqa: E731
    run_replaced(
        world,
        *(
            (module, name, fake)
            for module in (scheduler_client, scheduler)
            for name, fake in fakes.items()
            if name in vars(module)
        ),
        (scheduler_client, "os", system),
        (scheduler_client, "connect", world.connect),
        (scheduler_client, "LastingConnection", lambda connection, *_: connection),
        (scheduler_client, "socket", SimpleNamespace(gethostname=lambda: "host")),
        (scheduler, "Hub", hub),
        (worker, "os", system),
        (worker, "make_client", client_of),
        (worker, "metrics", count),
        (worker, "serve_metrics", lambda *_: None),
        (server, "queue", fakes["queue"]),
        (server, "make_server", make_server),
        (server, "serve_metrics", lambda *_: None),
        (server, "metrics", count),
        (server, "_snapshots", lambda _: _Nothing()),
        (server, "PythonUpdates", lambda *_: _Nothing()),
    )
    return story
