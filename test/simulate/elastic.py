"""The world of elastic jobs: the real starter, fleet, rendezvous server, generations and conversations.

Meanwhile processes are killed and stopped, connections are reset, hosts vanish and come back, links to the rendezvous
fail, its host is lost, and the discovery of hosts changes its mind.

Simulated are the processes (what `elastic_client` and `elastic.run` say to the rendezvous, and a training whose step
needs all ranks), the agents that start them, and the lines between all of these.

Rules. Only the newest generation trains, with the newest state of all living processes, and that is lost with these
alone; those that the rendezvous has given up may train on until they reach it again. A job without faults completes. A
job whose connections are reset completes, and loses no process. After other faults are over the job ends: with code 0,
and then the training is complete, or with a reason. Without its launcher, each process ends.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringtrain.job.rendezvous import elastic_server
from ringtrain.job.rendezvous.conversation import Conversation, Conversations, is_counted
from ringtrain.job.rendezvous.elastic_server import ElasticServer
from ringtrain.job.rendezvous.generations import Arrival, Left, Limits, StateLost
from ringtrain.runner.hosts import Host
from ringtrain.runner.start import elastic_starter, starter
from ringtrain.runner.start.elastic_starter import ElasticStarter, Fleet
from simulate.story import Story, TimeIsUp, replaced

_HEALED_S = 60.0
_END_S = 400.0
_TIMEOUT_S = 90.0  # --elastic-timeout
_GRACE_S = 3.0
_SSH_NOTICES_S = 3.0
_ROUNDS_OF_INIT = 2
_PATIENCE_S = 30.0  # of a process that needs a rendezvous which does not answer
_FAREWELL_S = 5.0
_ALONE_S = 150.0  # until all processes without a launcher have ended


class _LauncherLost(BaseException):
    """Unwinds the starter when its host is lost."""


class _Line:
    """A process as the rendezvous knows it."""

    def __init__(self, process: _Process):
        self.process = process
        self.name = ""
        self.is_open = True
        self.wire = -1  # the number of its connection; -1: it has none
        self.conversation = Conversation()


class _Hub:
    """In the place of Hub: one for each world. A connection is a number, and has messages in order both ways."""

    def __init__(self, world: _World, listener: Any, tick_s: float):
        self.port = 1
        self._world, self._listener, self._tick_s = world, listener, tick_s
        self._conversations: Conversations[_Line] = Conversations()
        self._lines: dict[int, _Line] = {}  # by connection
        self._last_s: dict[tuple[int, bool], float] = {}
        world.hub = self

    def start(self) -> None:
        self._world.story.after(self._tick_s, self._tick)

    def call(self, function: Callable[[], object]) -> None:
        self._world.story.after(self._world.short(), function)

    def send(self, line: _Line, message: dict[str, Any]) -> None:
        if not line.is_open:
            return
        if message["kind"] != "beat":
            self._world.story.trace("server", f"tells {line.process.name} {message}")
        if is_counted(message):
            line.conversation.keep(message)  # type: ignore[arg-type]
        self._carry(line, message)

    def drop(self, line: _Line) -> None:
        if line.is_open:
            line.is_open = False
            self._conversations.forget(line)
            process, wire = line.process, line.wire
            self._world.story.after(self._world.delay_to(process), lambda: process.cut(wire))

    # Of the simulated processes.

    def dial(self, process: _Process, wire: int, hello: dict[str, Any]) -> None:
        def greet() -> None:
            line = self._conversations.find(hello["talk"], _Line(process), hello["is_new"])
            if line is None:
                self._world.story.after(self._world.delay_to(process), lambda: process.hear(wire, {"heard": None}))
                return
            lacking = self._world.lacking(line.conversation, hello["heard"])
            line.wire, self._lines[wire] = wire, line
            self._conversations.back(line)
            for message in (line.conversation.tell(), *lacking):
                self._carry(line, message)

        self._at(process, wire, True, greet)

    def receive(self, process: _Process, wire: int, message: dict[str, Any]) -> None:
        def hear() -> None:
            line = self._lines.get(wire)
            if line is None or not line.is_open or line.wire != wire:
                return
            if "heard" in message:
                self._world.lacking(line.conversation, message["heard"])
                return
            if is_counted(message) and line.conversation.hear():
                self._carry(line, line.conversation.tell())
            if message["kind"] != "pong":
                self._world.story.trace(process.name, f"says {message}")
            self._listener.hear(line, message)

        self._at(process, wire, True, hear)

    def broken(self, process: _Process, wire: int, error: OSError, seconds: float | None = None) -> None:
        """The kernel says so after these seconds, or behind what has been said."""

        def lose() -> None:
            line = self._lines.get(wire)
            if line is None or not line.is_open or line.wire != wire:
                return
            line.wire = -1
            if not self._conversations.is_awaited(line, error, self._world.story.now):
                self._lose(line, str(error))

        if seconds is None:
            self._at(process, wire, True, lose)
        else:
            self._world.story.after(seconds, lose)

    def _carry(self, line: _Line, message: Any) -> None:
        process, wire = line.process, line.wire
        if wire >= 0:
            self._at(process, wire, False, lambda: process.hear(wire, message))

    def _at(self, process: _Process, wire: int, is_to_server: bool, action: Callable[[], None]) -> None:
        """A message that is under way when its connection breaks or the host is lost does not arrive."""
        story = self._world.story
        at = max(story.now + self._world.delay_to(process), self._last_s.get((wire, is_to_server), 0.0))
        self._last_s[wire, is_to_server] = at
        story.at(at, lambda: None if wire in self._world.broken_wires or self._world.is_launcher_lost else action())

    def _lose(self, line: _Line, text: str) -> None:
        line.is_open, line.process.is_given_up = False, True
        self._conversations.forget(line)
        self._listener.lose(line, text)

    def _tick(self) -> None:
        if self._world.is_launcher_lost:
            return
        for line in self._conversations.overdue(self._world.story.now):
            self._lose(line, "its connection was reset")
        self._listener.tick()
        self._world.story.after(self._tick_s, self._tick)


class _Mail:
    """In the place of Mail."""

    wake_up = -1

    def __init__(self, world: _World):
        self._world = world
        self._news: list[Any] = []

    def put(self, news: Any) -> None:
        if isinstance(news, StateLost):
            self._world.check_loss(news)
        elif isinstance(news, Left):
            self._world.check_left(news)
        self._news.append(news)
        self._world.wake_starter(self._world.read_mail)

    def take(self) -> list[Any]:
        news, self._news = self._news, []
        return news


class _Loop:
    """In the place of Loop: the starter waits here, and all other events happen meanwhile."""

    def __init__(self, world: _World, on_report: Callable[[Any, dict[str, Any]], None]):
        self._world = world
        self._is_woken = False
        world.loop, world.on_report = self, on_report

    def add(self, link: _Agent) -> None:
        link.is_watched = True

    def forget(self, link: _Agent) -> None:
        link.is_watched = False

    def handle_signals(self, numbers: object, handle: object) -> None:
        pass

    def register(self, stream: int, read: Callable[[], None]) -> None:
        self._world.read_mail = read

    def wait(self, longest_s: float, also: object = None) -> None:
        story = self._world.story
        self._is_woken = False
        story.run_until(story.now + longest_s, lambda: self._is_woken or self._world.is_launcher_lost)
        if self._world.is_launcher_lost:
            raise _LauncherLost
        if story.now > _END_S:
            raise TimeIsUp

    def wake(self) -> None:
        self._is_woken = True


class _Agent:
    """In the place of Link: the agent of a host, and the way to it."""

    def __init__(self, world: _World, host: str):
        self.running: set[int] = set()
        self.is_watched = False
        self.is_open = True
        self.is_alive = True
        self.host = host
        self._world = world
        self._processes: dict[int, _Process] = {}
        self._is_finishing = False
        self._last_s = 0.0

    def order(self, order: Mapping[str, Any]) -> None:
        def obey() -> None:
            if not self.is_alive:
                return
            if "start" in order:
                process = _Process(self._world, self, order["start"])
                self._processes[process.number] = process
                self._world.processes.append(process)
            elif "signal" in order:
                self._of(order).kill(9)
            elif "end" in order:
                for process in [self._of(order)] if "rank" in order else list(self._processes.values()):
                    process.terminate(order["end"])
                self._is_finishing |= "rank" not in order
                self._finish()
            elif "finish" in order:
                self._is_finishing = True
                self._finish()

        self._world.story.after(self._world.delay_of_host(self.host), obey)

    def end_in_words(self) -> str:
        return f"the connection to {self.host} has ended"

    def close(self) -> None:
        self.die()

    def again(self) -> None:
        """Nothing takes its place: no host of this world refuses a connection."""

    def die(self) -> None:
        """The agent ends, and its processes with it."""
        if self.is_alive:
            self.is_alive = False
            for process in list(self._processes.values()):
                process.kill(9)
            self._send(self._note_end)

    def vanish(self) -> None:
        """The host is cut off: what is there ends, and the others notice it by silence."""
        if self.is_alive:
            self.is_alive = False
            for process in list(self._processes.values()):
                process.vanish()
            self._world.story.after(_SSH_NOTICES_S, self._note_end)

    def ended(self, process: _Process, code: int) -> None:
        del self._processes[process.number]
        if not self.is_alive:
            return
        report = {"ended": [process.number, code]}

        def tell() -> None:
            if self.is_open and self.is_watched and not self._world.is_launcher_lost:
                self._world.story.trace(f"agent {self.host}", f"reports {report}")
                self._world.on_report(self, report)
                self._world.loop.wake()

        self._send(tell)
        self._finish()

    def _of(self, order: Mapping[str, Any]) -> _Process:
        return self._processes.get(order["rank"], self._world.nobody)

    def _finish(self) -> None:
        if self._is_finishing and not self._processes and self.is_alive:
            self.is_alive = False
            self._send(self._note_end)

    def _send(self, action: Callable[[], None]) -> None:
        """To the starter, in order."""
        self._last_s = max(self._last_s, self._world.story.now + self._world.delay_of_host(self.host))
        self._world.story.at(self._last_s, action)

    def _note_end(self) -> None:
        self.is_open = False
        self._world.loop.wake()


class _Training:
    """The ranks of a generation, from their init() on."""

    def __init__(self, world: _World, generation: int, size: int):
        self.members: list[_Process] = []
        self._world, self._generation, self._size = world, generation, size
        self._at: dict[_Process, str] = {}  # the point at which a rank waits for the others
        self._is_broken = False

    def meet(self, process: _Process, point: str, then: Callable[[], None]) -> None:
        """All ranks come to this point; then each of them goes on. A rank that another one has left gets an error."""
        process.goes_on = then
        if self._is_broken or process.has_heard_of_a_loss:
            self._world.story.after(self._world.short(), lambda: process.fail_in(self._generation))
            return
        self._at[process] = point
        if len(self._at) == self._size and set(self._at.values()) == {point}:
            waiting, self._at = self._at, {}
            for one in waiting:
                self._world.story.after(self._world.short(), one.released())

    def leave(self, process: _Process) -> None:
        """A rank has died or goes to the next generation, which the others notice after a moment."""
        self._is_broken = True
        for one in self.members:
            if one is not process:
                delay_s = self._world.random.uniform(0.005, 0.3)
                self._world.story.after(delay_s, lambda one=one: one.fail_in(self._generation))  # type: ignore[misc]


class _Process:
    """A rank's process: its connection, and a script of `elastic.run` that commits after each step."""

    def __init__(self, world: _World, agent: _Agent | None, number: int):
        self.number = number
        self.host = agent.host if agent else "nowhere"
        self.name = f"{self.host}/{number}"
        self.is_alive = agent is not None
        self.stopped_until = 0.0
        self.generation = 0
        self.commits = 0
        self.phase = "starting"
        self.goes_on: Callable[[], None] | None = None
        self.is_told_to_end = False
        self.has_heard_of_a_loss = False
        self._world, self._agent = world, agent
        self._token = 0
        self._talk = Conversation()
        self._is_known = False  # to the server, in this conversation
        self._wire = -1  # the number of its connection
        self._is_connected = False  # to the server, which has said so
        self._broken_s = float("inf")  # since when it has no connection
        self._unreachable_until = 0.0
        self.is_given_up = False  # perhaps, until it gets its next place
        self._has_news = False
        self._is_cut = False
        self._is_asking = False  # whether its generation has the state
        self._has_told_of_commit = False
        self._training: _Training | None = None
        self._later: list[Callable[[], None]] = []  # what happens when it is continued
        if self.is_alive:
            world.story.trace(self.name, "starts")
            slow = world.random.random() < world.slow_starts
            self._after(world.random.uniform(5, 14) if slow else world.random.uniform(0.2, 1.5), self._begin)

    # --- what happens to it -------------------------------------------------------------------------------------------

    def kill(self, code: int) -> None:
        self._end(128 + code)

    def terminate(self, grace_s: float) -> None:
        """SIGTERM, of which Python dies unless it is stopped; SIGKILL after the grace."""
        self.is_told_to_end = True
        self._after(0.0, lambda: self._end(143))
        self._world.story.after(grace_s, lambda: self._end(137))

    def stop(self, until_s: float) -> None:
        if self.is_alive and until_s > self.stopped_until:
            self.stopped_until = until_s
            self._world.story.trace(self.name, f"stopped until {until_s:.3f}")
            self._world.story.at(until_s, self._continue)

    def vanish(self) -> None:
        """Its host is cut off, so nobody sees its end at once."""
        if not self.is_alive:
            return
        self.is_alive = False
        story, training = self._world.story, self._training
        story.trace(self.name, "vanishes")
        self._go_silent()
        if training is not None:
            story.after(self._world.random.uniform(1.0, 3.0), lambda: training.leave(self))

    def _go_silent(self) -> None:
        self._world.broken_wires.add(self._wire)
        self.is_given_up = True
        silent = TimeoutError("its host is silent")
        self._world.hub.broken(self, self._wire, silent, self._world.random.uniform(1.0, 1.5))

    def reset(self) -> None:
        """The network resets its connection, which both sides hear of, or this one a second later."""
        if self.is_alive and self._wire >= 0:
            self._world.story.trace(self.name, "its connection is reset")
            world, wire = self._world, self._wire
            world.broken_wires.add(wire)
            world.hub.broken(self, wire, ConnectionResetError(errno.ECONNRESET, "reset"), world.short())
            late = world.random.random() < 0.3
            self._after(world.random.uniform(1.0, 1.5) if late else world.short(), lambda: self._notice(wire))

    def lose_link(self, seconds: float) -> None:
        """The link between this process and the rendezvous is gone for so long."""
        if self.is_alive and self._wire >= 0:
            self._world.story.trace(self.name, f"cannot reach the rendezvous for {seconds:.3f} s")
            wire = self._wire
            self._unreachable_until = max(self._unreachable_until, self._world.story.now + seconds)
            self._go_silent()
            self._after(self._world.random.uniform(1.0, 3.0), lambda: self._notice(wire))

    def lose_launcher(self) -> None:
        wire = self._wire
        self._unreachable_until = float("inf")
        self._after(self._world.random.uniform(1.0, 3.0), lambda: self._notice(wire))

    def hear(self, wire: int, message: dict[str, Any]) -> None:
        def take() -> None:
            if wire == self._wire:
                self._take_from_wire(message)

        if self.is_alive:
            self._after(0.0, take)

    def cut(self, wire: int) -> None:
        """The rendezvous has closed its connection: it cannot go on when it next waits for an answer."""
        if wire == self._wire:
            self._is_cut = True
            if self.phase in ("waiting", "init", "asking"):
                self._after(0.0, lambda: self._end(1))

    def _notice(self, wire: int) -> None:
        """This process knows that its connection is broken."""
        if wire != self._wire:
            return
        self._is_connected, self._wire = False, -1
        self._broken_s = min(self._broken_s, self._world.story.now)
        self._dial()

    def _dial(self) -> None:
        if self._is_connected or self._is_cut:
            return
        if self._unreachable_until > self._world.story.now:
            self._lose_patience()
            self._after(min(0.5, self._unreachable_until - self._world.story.now) + 1e-3, self._dial)
            return
        self._wire = self._world.new_wire()
        self._greet()

    def _greet(self) -> None:
        hello = {"talk": f"{self.name} {self._token}", "heard": self._talk.heard, "is_new": not self._is_known}
        self._world.hub.dial(self, self._wire, hello)

    def _lose_patience(self) -> None:
        is_over = self._world.story.now - self._broken_s > _PATIENCE_S
        if is_over and self.phase in ("waiting", "init", "asking"):
            self._end(1)

    def _take_from_wire(self, message: dict[str, Any]) -> None:
        if "heard" not in message:
            if is_counted(message) and self._talk.hear():
                self._world.hub.receive(self, self._wire, self._talk.tell())
            self._take(message)
        elif message["heard"] is None:
            self._begin_conversation()
            if self.phase == "waiting":
                self._come()
            elif self.phase in ("init", "asking"):
                self._begin_again("given up")
            else:
                self.fail_in(self.generation)
        elif self._is_connected:
            self._world.lacking(self._talk, message["heard"])
        else:
            self._is_known = self._is_connected = True
            self._broken_s = float("inf")
            for lacking in self._world.lacking(self._talk, message["heard"]):
                self._world.hub.receive(self, self._wire, lacking)

    def _begin_conversation(self) -> None:
        self._token += 1
        self._talk, self._is_known = Conversation(), False
        self._greet()

    def fail_in(self, generation: int) -> None:
        """Another rank of this generation has left: an operation that waits for it fails, or the next one."""

        def fail() -> None:
            if self.generation == generation and self.phase not in ("waiting", "leaving"):
                self.has_heard_of_a_loss = True
                if self.goes_on is not None:
                    self._begin_again("lost another rank")

        self._after(0.0, fail)

    def released(self) -> Callable[[], None]:
        """The action of this process when all ranks have come to the point at which it waits."""
        then, self.goes_on = self.goes_on, None
        generation = self.generation

        def go_on() -> None:
            if self.generation == generation and self._training is not None and then is not None:
                then()

        return lambda: self._after(0.0, go_on)

    # --- what it does -------------------------------------------------------------------------------------------------

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        def act() -> None:
            if not self.is_alive:
                return
            if self.stopped_until > self._world.story.now:
                self._later.append(act)
            else:
                action()

        if seconds == 0.0:
            act()
        else:
            self._world.story.after(seconds, act)

    def _continue(self) -> None:
        if self.is_alive and self.stopped_until <= self._world.story.now:
            self._world.story.trace(self.name, "goes on")
            later, self._later = self._later, []
            for act in later:
                act()

    def _say(self, message: dict[str, Any]) -> None:
        if is_counted(message):
            self._talk.keep(message)  # type: ignore[arg-type]
        if self._is_connected:
            self._world.hub.receive(self, self._wire, message)

    def _begin(self) -> None:
        self._broken_s = self._world.story.now
        self._unreachable_until = float("inf") if self._world.is_launcher_lost else 0.0
        self._dial()
        self._come()

    def _come(self) -> None:
        world = self._world
        if self._is_cut:
            self._end(1)
            return
        self.phase, self._training, self.goes_on = "waiting", None, None
        of_state = world.must_keep_state, self._has_told_of_commit
        arrival = Arrival(self.host, self.number, self.commits, world.patience_s, *of_state)
        self._say({"kind": "come", "member": self.name, "arrival": list(arrival)})

    def _begin_again(self, reason: str) -> None:
        self._world.story.trace(self.name, f"leaves generation {self.generation} at commit {self.commits}: {reason}")
        if self._training is not None:
            self._training.leave(self)
        self.phase, self._training, self.goes_on = "leaving", None, None
        self._after(self._world.random.uniform(0.001, 0.1), self._come)

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "ping":
            self._say({"kind": "pong"})
        elif kind == "news":
            self._has_news = True
        elif kind == "world":
            self._enter(message)
        elif kind == "heard" and self.phase == "init":
            self._exchange(int(self._said) + 1)
        elif kind == "again" and self.phase in ("init", "asking"):
            self._begin_again("again")
        elif kind == "verdict" and self.phase == "asking" and self._training is not None:
            self.phase = "ready"
            self._training.meet(self, "sync", self._sync)
        elif kind == "lost":
            self.fail_in(self.generation)
        elif kind == "over":
            self._end(0)
        elif kind == "failed":
            self._end(1)
        elif kind not in ("again", "heard", "verdict", "beat", "begun", "awaited"):
            self._world.story.find(f"a message that no process knows: {message}")

    def _enter(self, world: dict[str, Any]) -> None:
        if self.phase != "waiting":
            self._world.story.find(
                f"{self.name} gets a place in generation {world['generation']} while it is {self.phase}"
            )
        self.generation, self._has_news, self.has_heard_of_a_loss = world["generation"], False, False
        self.is_given_up = False
        self._world.newest_generation = max(self._world.newest_generation, self.generation)
        self._is_asking = bool(world["may_have_lost_state"])
        self._training = self._world.training(self.generation, world["size"])
        self._training.members.append(self)
        self.phase = "init"
        self._exchange(0)

    def _exchange(self, done: int) -> None:
        self._said = done
        if done < _ROUNDS_OF_INIT:
            self._say({"kind": "say", "generation": self.generation, "value": done})
            return
        assert self._training is not None
        self._training.meet(self, "connected", self._joined)

    def _joined(self) -> None:
        self._say({"kind": "joined", "generation": self.generation})
        generation = self.generation
        slow = self._world.random.random() < self._world.slow_preparations

        def ready() -> None:
            if self.generation == generation and self.phase == "init" and self._training is not None:
                self.phase = "asking" if self._is_asking else "ready"
                message = {"kind": "ready", "generation": generation, "commits": self.commits}
                self._say({**message, "is_asking": self._is_asking})
                if not self._is_asking:
                    self._training.meet(self, "sync", self._sync)

        self._after(self._world.random.uniform(4, 9) if slow else self._world.random.uniform(0.0, 0.2), ready)

    def _sync(self) -> None:
        """The newest state becomes that of all ranks."""
        assert self._training is not None
        self.phase = "sync"
        newest = max(one.commits for one in self._training.members)
        self._world.check_state(self._training.members, newest, self.generation)
        # All ranks take the state before any of them makes a step, so the newest stays the newest meanwhile.
        self._training.meet(self, "state", lambda: self._take_state(newest))

    def _take_state(self, newest: int) -> None:
        self._set_commits(newest)
        self.phase = "train"
        self._step()

    def _set_commits(self, commits: int) -> None:
        self.commits = commits
        if commits > 0 and not self._has_told_of_commit:
            self._has_told_of_commit = True
            self._say({"kind": "committed"})

    def _step(self) -> None:
        if self.commits >= self._world.steps:
            self._complete()
            return
        assert self._training is not None
        training, point = self._training, f"step {self.commits}"
        generation = self.generation

        def submit() -> None:
            if self.generation == generation and self.phase == "train":
                training.meet(self, point, lambda: self._commit(point))

        self._after(self._world.random.uniform(0.01, self._world.step_s), submit)

    def _commit(self, point: str) -> None:
        self._world.check_newest(self)
        self._set_commits(self.commits + 1)
        assert self._training is not None
        # Whether any rank has news is a sum over all ranks.
        news = self._world.news.setdefault((self.generation, point), set())
        if self._has_news:
            news.add(self.name)
        self._training.meet(self, f"news of {point}", lambda: self._look_at_news(bool(news)))

    def _look_at_news(self, is_there: bool) -> None:
        if is_there and self.commits < self._world.steps:
            self._begin_again("news")
        else:
            self._step()

    def _complete(self) -> None:
        self.phase = "done"
        self._world.has_completed = True
        self._say({"kind": "done"})
        self._after(self._world.random.uniform(0.01, 0.5), self._end_well)

    def _end_well(self) -> None:
        """Gives its last word some time."""
        if not self._is_connected and self._world.story.now - self._broken_s < _FAREWELL_S:
            self._after(0.05, self._end_well)
        else:
            self._end(0)

    def _end(self, code: int) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        self._world.story.trace(self.name, f"ends with code {code}")
        self._world.hub.broken(self, self._wire, ConnectionResetError("its process has ended"))
        if self._training is not None and self.phase != "done":
            self._training.leave(self)
        if self._agent is not None:
            self._agent.ended(self, code)


class _World:
    """The world that a seed draws, and that the rules check."""

    may_grow = True

    def __init__(self, story: Story):
        self.story = story
        self.random = random = story.random
        self.processes: list[_Process] = []
        self.agents: dict[str, _Agent] = {}
        self.nobody = _Process(self, None, -1)
        self.hub: Any = None
        self.loop: Any = None
        self.on_report: Callable[[Any, dict[str, Any]], None]
        self.read_mail: Callable[[], None]
        self.news: dict[tuple[int, str], set[str]] = {}
        self.newest_generation = 0
        self.has_completed = False
        self._trainings: dict[int, _Training] = {}
        self.steps = random.choice([3, 10, 40])
        self.step_s = random.choice([0.05, 0.5])
        self.patience_s = random.choice([0.0, 8.0, 20.0])
        self.must_keep_state = random.random() < 0.2
        self.slow_starts = random.choice([0, 0, 0.3])
        self.slow_preparations = random.choice([0, 0, 0.2])
        self._most_delay_s = random.choice([0.001, 0.02, 0.3])
        self._hosts = [Host(f"h{i}", random.randint(1, 3)) for i in range(random.randint(1, 4))]
        slots = sum(host.slots or 1 for host in self._hosts)
        self._first = random.randint(1, slots)
        self._least = random.randint(1, self._first)
        self._most = random.choice([self._first, slots, 2 * slots])
        self._cooldown_s = random.choice([None, (2.0, 10.0)])
        self._reset_limit = random.choice([None, None, 20])
        self._cut_hosts: set[str] = set()
        self.has_hard_faults = False  # others than resets, which a job must not notice
        self.broken_wires: set[int] = set()
        self.is_launcher_lost = False
        self._wires = 0
        self._draw_faults()

    def tell(self) -> None:
        """From the start of the job to its end, or to the end of time."""
        mail = _Mail(self)
        limits = Limits(self._first, self._least, self._most, _TIMEOUT_S, self._reset_limit)
        server = ElasticServer(None, b"", limits, mail.put)  # type: ignore[arg-type]
        fleet = Fleet(self._first, self._most, self._cooldown_s)
        fleet.set_hosts(self._hosts)
        self._mail = mail
        job = ElasticStarter(fleet, server, mail, self, self._least, _GRACE_S)  # type: ignore[arg-type]
        try:
            code = job.run()
        except TimeIsUp:
            return self.story.find(self._unfinished())
        except _LauncherLost:
            return self._go_on_alone()
        self.story.trace("starter", f"the job ends with code {code}")
        if code == 0 and not self.has_completed:
            self.story.find("the job ends with code 0, and the training is not complete")
        if code != 0 and not self.has_hard_faults:
            self.story.find(f"a job without faults but resets ends with code {code}")

    def _go_on_alone(self) -> None:
        """The host of the launcher is lost. Agents and processes of other hosts live."""
        self.story.trace("fault", "the host of the launcher is lost")
        for process in self.processes:
            process.lose_launcher()
        self.story.run_until(self.story.now + _ALONE_S)
        if any(process.is_alive for process in self.processes):
            self.story.find(f"without a launcher, {self._living()}, after {_ALONE_S:g} s")

    # --- rules --------------------------------------------------------------------------------------------------------

    def check_state(self, members: Sequence[_Process], newest: int, generation: int) -> None:
        for process in self.processes:
            is_known = process.is_alive and not process.is_told_to_end and not process.is_given_up
            if is_known and process.commits > newest and process not in members:
                self.story.find(
                    f"generation {generation} trains from commit {newest}, and {process.name} has {process.commits}"
                )

    def check_loss(self, news: StateLost) -> None:
        for process in self.processes:
            if process.is_alive and process.generation == news.generation and process.commits > 0:
                self.story.find(f"the state of {process.name} at commit {process.commits} is said to be lost")

    def lacking(self, conversation: Conversation, heard: int) -> list[Any]:
        try:
            return conversation.lacking(heard)
        except ValueError as error:
            self.story.find(f"a message was lost or has come twice: {error}")
            return []

    def check_left(self, news: Left) -> None:
        (process,) = [one for one in self.processes if one.name == news.member]
        if not self.has_hard_faults and process.phase != "done" and not process.is_told_to_end:
            self.story.find(f"{news.member} is lost by a reset: {news.text}")

    def check_newest(self, process: _Process) -> None:
        if process.generation != self.newest_generation and not process.is_given_up:
            self.story.find(
                f"{process.name} trains in generation {process.generation}, and there is {self.newest_generation}"
            )

    def _unfinished(self) -> str:
        waited_s = _END_S - _HEALED_S
        return f"the job has not ended {waited_s:g} s after the last fault: {self._living() or 'nobody lives'}"

    def _living(self) -> str:
        living = [one for one in self.processes if one.is_alive]
        return ", ".join(f"{one.name} is {one.phase} in generation {one.generation}" for one in living)

    # --- what is drawn ------------------------------------------------------------------------------------------------

    def new_wire(self) -> int:
        self._wires += 1
        return self._wires

    def short(self) -> float:
        return self.random.uniform(1e-5, 1e-3)

    def delay_of_host(self, host: str) -> float:
        return self.random.uniform(1e-5, self._most_delay_s)

    def delay_to(self, process: _Process) -> float:
        return self.delay_of_host(process.host)

    def training(self, generation: int, size: int) -> _Training:
        if generation not in self._trainings:
            self._trainings[generation] = _Training(self, generation, size)
        return self._trainings[generation]

    def wake_starter(self, read: Callable[[], None]) -> None:
        def wake() -> None:
            if not self.is_launcher_lost:
                read()
                self.loop.wake()

        self.story.after(self.short(), wake)

    def open_agent(self, host: str) -> _Agent:
        """As a Placement."""
        agent = _Agent(self, host)
        self.agents[host] = agent
        if host in self._cut_hosts:
            agent.is_alive = False
            self.story.after(_SSH_NOTICES_S, agent._note_end)
        return agent

    def _draw_faults(self) -> None:
        random = self.random
        if random.random() < 0.1:
            return
        all_kinds = ("kill", "stop", "agent", "cut", "blink", "exchange", "shrink", "reset", "link")
        kinds = [kind for kind in all_kinds if random.random() < 0.4]
        for _ in range(random.randint(0, 8) if kinds else 0):
            kind, at = random.choice(kinds), random.uniform(0, _HEALED_S * 0.6)
            place, host = random.random(), random.choice(self._hosts).name
            seconds = random.choice([0.1, 1.0, 5.0, 15.0, 24.0]) * random.uniform(0.5, 1)
            self.has_hard_faults |= kind != "reset"
            count = random.choice([1, 1, 2])
            if self.story.add_fault(f"{kind} at {at:.3f} s for {seconds:.3f} s ({host}, {place:.3f}, {count})"):
                self.story.at(at, lambda f=(kind, place, host, seconds, count): self._strike(*f))  # type: ignore[misc]

        if random.random() < 0.05 and self.story.add_fault("the host of the launcher is lost"):
            self.has_hard_faults = True
            self.story.at(random.uniform(0, _HEALED_S * 0.6), self._lose_launcher)

    def _lose_launcher(self) -> None:
        self.is_launcher_lost = True

    def _strike(self, kind: str, place: float, host: str, seconds: float, count: int) -> None:
        self.story.trace("fault", f"{kind} {host} for {seconds:.3f} s")
        living = [process for process in self.processes if process.is_alive]
        if kind in ("kill", "stop"):
            for i in range(min(count, len(living))):
                process = living[(int(place * len(living)) + i) % len(living)]
                if kind == "kill":
                    process.kill(9)
                else:
                    process.stop(self.story.now + seconds)
        elif kind == "reset":
            for process in living if count == 2 else living[int(place * len(living)) :][:1]:
                process.reset()
        elif kind == "link":
            for process in living if count == 2 else living[int(place * len(living)) :][:1]:
                process.lose_link(seconds)
        elif kind == "agent" and host in self.agents:
            self.agents[host].die()
        elif kind == "cut":
            if host in self.agents:
                self.agents[host].vanish()
            self._cut_hosts.add(host)
            self.story.after(seconds, lambda: self._cut_hosts.discard(host))
        elif kind in ("blink", "exchange", "shrink"):
            now = {
                "blink": [],
                "exchange": [Host(f"{one.name}new", one.slots) for one in self._hosts],
                "shrink": [one for one in self._hosts if one.name != host],
            }[kind]
            self._mail.put(now)
            self.story.after(seconds, lambda: self._mail.put(self._hosts))


def tell(seed: int, without: Sequence[int] = (), trace: bool = False) -> Story:
    """The story of this seed."""
    story = Story(seed, without, trace)
    world = _World(story)

    def write_lines(to: int, lines: Sequence[bytes]) -> None:
        for line in lines:
            story.trace("ringrun", line.decode(errors="replace"))

    with replaced(
        (elastic_server, "time", story),
        (elastic_server, "Hub", lambda sock, secret, listener, silent_s, tick_s: _Hub(world, listener, tick_s)),
        (starter, "time", story),
        (elastic_starter, "time", story),
        (starter, "Loop", lambda on_report: _Loop(world, on_report)),
        (starter, "write_lines", write_lines),
    ):
        world.tell()
    return story
