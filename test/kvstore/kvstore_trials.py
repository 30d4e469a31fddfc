"""Trials of jobs with servers, each drawn from a seed: processes of any role are killed or stopped, once or twice, and
may come back late. The required outcome follows from the trial alone.

A trial fails where a process hangs, where a push that was acknowledged is not in the values, or where somebody whom a
death concerns hears of it too late, or not at all.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvstore_jobs import Process, job

HEARTBEAT_S, TIMEOUT_S, START_TIMEOUT_S, REJOIN_S = 0.5, 3.0, 12.0, 8.0
# An error must come this long after the death of which it tells.
ERROR_WITHIN_S = TIMEOUT_S + HEARTBEAT_S + 2.0
# No process may run for longer after the last event.
_ENDS_WITHIN_S = 60.0
_ATTEMPTS = 3  # to find a free port
_TURNS, _PAUSE_S = 60, 0.05
_TYPED = ("PeerLostError", "StalledError", "ShutDownError", "RemoteError", "ValueError")
# Of a scheduler that is started again while the one before it was only stopped.
_TYPED_OF_SCHEDULER = (*_TYPED, "another process listens")
SCHEDULER = ("scheduler", 0)

_PROGRAM = f"""
import pathlib, sys, time
import numpy as np
kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
def say(*words):
    print(f"{{time.monotonic():.3f}}", *words, flush=True)
say("begins")
from ringtrain import kvstore
try:
    kv = kvstore.create(kind)
    kv.set_optimizer("test", rescale_grad=1.0)
    names = [f"of {{worker}}" for worker in range(kv.num_workers)]
    kv.init(["all", *names], [np.zeros(100_000, np.float32)] * (1 + len(names)))
    say("created", kv.rank, kv.is_recovery)
    own = "all" if kind == "dist_sync" else names[kv.rank]
    first = int(np.array(kv.pull("all")).min()) // kv.num_workers if kind == "dist_sync" else 0
    for turn in range(first + 1, {_TURNS} + 1):
        kv.push(own, np.ones(100_000, np.float32))
        kv.wait()
        value = kv.pull(own)
        assert kind == "dist_async" or (value == turn * kv.num_workers).all(), "a round is wrong"
        say("acked", turn)
        time.sleep({_PAUSE_S})
    say("pushed")
    while not (folder / "stop").exists():
        time.sleep(0.02)
        kv.pull(own)
    say("reads")
    for name in ["all"] if kind == "dist_sync" else names:
        value = np.array(kv.pull(name))
        say("value", name, int(value.min()), int(value.max()))
    kv.wait()
    say("ends")
except Exception as error:
    say("failed", type(error).__name__, str(error).replace("\\n", " ")[:300])
    sys.exit(3)
"""

# A server or the scheduler, which says when it has ended, and of what.
_SERVES = """
import os, sys, time
os.environ["RINGTRAIN_NO_AUTOSERVE"] = "1"
from ringtrain import kvstore
def say(*words):
    print(f"{time.monotonic():.3f}", *words, flush=True)
say("begins")
try:
    kvstore.run_server()
    say("ends")
except Exception as error:
    say("failed", type(error).__name__, str(error).replace("\\n", " ")[:300])
    sys.exit(3)
"""


@dataclass
class Strike:
    """`stop_s` None: the process is killed; else stopped, and continued after so long. `again_s`: another process
    takes its place so long afterwards; None: nobody does."""

    victim: tuple[str, int]
    after_s: float  # after all workers have their store, or, `early`, after the start of the last process
    stop_s: float | None
    again_s: float | None

    def is_death(self) -> bool:
        return self.stop_s is None or self.stop_s > TIMEOUT_S

    def __str__(self) -> str:
        how = "killed" if self.stop_s is None else f"stopped for {self.stop_s:.1f} s"
        again = "" if self.again_s is None else f", started again {self.again_s:.1f} s later"
        return f"{self.victim[0]} {self.victim[1]} {how} after {self.after_s:.2f} s{again}"


@dataclass
class Trial:
    """All that is drawn from a seed."""

    kind: str
    workers: int
    servers: int
    memory: str
    rejoins: bool
    early: bool
    strikes: list[Strike]

    @staticmethod
    def of(seed: int) -> Trial:
        chance = random.Random(seed)
        kind, memory = chance.choice(["dist_async", "dist_sync"]), chance.choice(["auto", "off"])
        workers, servers = chance.choice([2, 3]), chance.choice([0, 1, 1, 2])
        rejoins = servers > 0 and chance.random() < 0.35
        early = chance.random() < 0.15
        places = [SCHEDULER, *(("server", i) for i in range(servers)), *(("worker", i) for i in range(workers))]
        victims = chance.sample(places, chance.choice([1, 1, 2]))
        strikes, after_s = [], 0.0
        for victim in victims:
            after_s += chance.random() * chance.choice([0.2, 1.5, 2.5])
            stop_s = chance.choice([None, None, TIMEOUT_S + 0.7 + 2 * chance.random(), 0.5 * TIMEOUT_S])
            again_s = None
            if rejoins and (stop_s is None or stop_s > TIMEOUT_S):
                again_s = (0.0 if stop_s is None else TIMEOUT_S + 0.7) + chance.random() * chance.choice([0.2, 3.0])
            strikes.append(Strike(victim, after_s, stop_s, again_s))
        return Trial(kind, workers, servers, memory, rejoins, early, strikes)

    def __str__(self) -> str:
        sizes = f"{self.workers} workers and {self.servers} servers"
        when = "while they start" if self.early else "while they train"
        rejoin = f", kv_rejoin_s {REJOIN_S:g}" if self.rejoins else ""
        return f"{self.kind}, {sizes}, shared memory {self.memory}{rejoin}, {when}: {'; '.join(map(str, self.strikes))}"


class Failed(AssertionError):
    """Returns what was not as it must be."""


class PortTaken(Exception):
    """By another job of this machine, since it was found free."""


@dataclass
class _One:
    """A process of a trial; times are those of time.monotonic()."""

    place: tuple[str, int]
    process: Process
    is_again: bool = False
    killed_s: float | None = None
    stops: list[tuple[float, float]] = field(default_factory=list)
    ended_s: float | None = None

    def said(self, word: str) -> list[tuple[float, str]]:
        found = re.findall(rf"^([\d.]+) {word}\b ?(.*)$", self.process.output(), re.MULTILINE)
        return [(float(at), rest) for at, rest in found]

    def acked(self, until_s: float = math.inf) -> int:
        return sum(at_s < until_s for at_s, _ in self.said("acked"))

    def heard_s(self) -> float:
        """When it knew that it has ended. Its exit takes seconds on a busy machine."""
        assert self.ended_s is not None
        return min([self.ended_s, *(at_s for at_s, _ in [*self.said("failed"), *self.said("ends")])])

    def name(self) -> str:
        return f"{self.place[0]} {self.place[1]}{' (again)' if self.is_again else ''}"


class Run:
    """One trial, with real processes."""

    def __init__(self, folder: Path, trial: Trial):
        self._folder, self._trial = folder, trial
        self._all: list[_One] = []
        self._struck: list[tuple[Strike, float, bool]] = []  # and when, and whether the victim still ran
        (folder / "program.py").write_text(_PROGRAM)

    def carry_out(self) -> None:
        """Raises Failed."""
        trial = self._trial
        variables = {
            "RINGTRAIN_KV_HEARTBEAT_S": str(HEARTBEAT_S),
            "RINGTRAIN_KV_TIMEOUT_S": str(TIMEOUT_S),
            "RINGTRAIN_START_TIMEOUT_S": str(START_TIMEOUT_S if trial.early else 60),
            "RINGTRAIN_SHARED_MEMORY": trial.memory,
            "RINGTRAIN_KV_REJOIN_S": str(REJOIN_S if trial.rejoins else 0),
            "PYTHONFAULTHANDLER": "1",  # so that a crash shows where
        }
        with job(self._folder, trial.workers, trial.servers, **variables) as self._job:
            try:
                self._start(SCHEDULER)
                for number in range(trial.servers):
                    self._start(("server", number))
                for number in range(trial.workers):
                    self._start(("worker", number))
                if not trial.early:
                    self._await_begin()
                self._strike_all()
                self._await_end()
                self._require_port()
                self._judge()
            finally:
                for one in self._all:
                    if one.process.popen.poll() is None:
                        os.kill(one.process.pid, signal.SIGCONT)

    def _start(self, place: tuple[str, int], **variables: str) -> None:
        role, number = place
        told = {"DMLC_TASK_ID": str(number), **variables}
        if role == "worker":
            arguments = [str(self._folder / "program.py"), self._trial.kind, str(self._folder)]
            process = self._job.start("worker", arguments, **told)
        else:
            process = self._job.start(role, ["-c", _SERVES], **told)
        self._all.append(_One(place, process, bool(variables)))

    def _await_begin(self) -> None:
        deadline = time.monotonic() + 90
        workers = [one for one in self._all if one.place[0] == "worker"]
        while not all(one.said("created") for one in workers):
            self._require_port()
            if time.monotonic() > deadline or any(one.process.popen.poll() is not None for one in self._all):
                raise Failed(f"{self._trial}: it did not begin\n{self._ends()}")
            time.sleep(0.01)

    def _require_port(self) -> None:
        """Raises PortTaken if the first scheduler did not get its port."""
        if "another process listens" in self._all[0].process.output():
            raise PortTaken

    def _strike_all(self) -> None:
        """Returns what is due, in the order of time, until nothing is left to do."""
        began_s = time.monotonic()
        due: list[tuple[float, int, str, Strike]] = []
        for number, strike in enumerate(self._trial.strikes):
            due.append((began_s + strike.after_s, number, "strike", strike))
            if strike.stop_s is not None:
                due.append((began_s + strike.after_s + strike.stop_s, number, "continue", strike))
            if strike.again_s is not None:
                due.append((began_s + strike.after_s + strike.again_s, number, "again", strike))
        for at_s, _, what, strike in sorted(due, key=lambda one: one[:2]):
            while time.monotonic() < at_s:
                self._look()
                time.sleep(0.01)
            victim = next(one for one in self._all if one.place == strike.victim)
            if what == "again":
                again = {"DMLC_NUM_ATTEMPT": "1", "RINGTRAIN_START_TIMEOUT_S": str(START_TIMEOUT_S)}
                self._start(strike.victim, **again)
                continue
            is_running = victim.process.popen.poll() is None
            now_s = time.monotonic()
            if what == "continue":
                if is_running:
                    os.kill(victim.process.pid, signal.SIGCONT)
                    victim.stops.append((self._struck_s(strike), now_s))
                continue
            self._struck.append((strike, now_s, is_running))
            if is_running and strike.stop_s is None:
                victim.killed_s = now_s
                victim.process.kill()
            elif is_running:
                os.kill(victim.process.pid, signal.SIGSTOP)

    def _struck_s(self, strike: Strike) -> float:
        return next(at_s for one, at_s, _ in self._struck if one is strike)

    def _look(self) -> None:
        for one in self._all:
            if one.ended_s is None and one.process.popen.poll() is not None:
                one.ended_s = time.monotonic()
        living = [one for one in self._all if one.place[0] == "worker" and one.ended_s is None]
        if living and all(one.said("pushed") for one in living) and len(self._struck) == len(self._trial.strikes):
            (self._folder / "stop").touch()

    def _await_end(self) -> None:
        deadline = time.monotonic() + _ENDS_WITHIN_S
        while any(one.ended_s is None for one in self._all):
            if time.monotonic() > deadline:
                hung = [one for one in self._all if one.ended_s is None]
                for one in hung:
                    one.process.popen.send_signal(signal.SIGABRT)  # faulthandler prints the stacks of its threads
                    one.process.popen.wait(10)
                raise Failed(f"{self._trial}: {', '.join(one.name() for one in hung)} hung\n{self._ends(40)}")
            self._look()
            time.sleep(0.02)

    # ---------------------------------------------------------------------------------------------------- judgement

    def _judge(self) -> None:
        for one in self._all:
            if one.killed_s is None:
                self._require_typed_end(one)
        for strike, at_s, was_running in self._struck:
            if was_running and strike.is_death():
                self._require_errors(strike, at_s)
        for one in self._all:
            self._require_expelled_ends(one)
        if not any(self._may_concern_workers(strike) for strike, _, was_running in self._struck if was_running):
            for one in self._all:
                is_victim = any(strike.victim == one.place and strike.is_death() for strike in self._trial.strikes)
                if one.place[0] == "worker" and not is_victim and not one.said("ends") and not self._trial.early:
                    raise Failed(f"{self._trial}: {one.name()} failed without a reason\n{self._ends()}")
        self._require_values()

    def _require_typed_end(self, one: _One) -> None:
        code = one.process.popen.returncode
        text = one.process.output()
        typed = _TYPED_OF_SCHEDULER if one.place == SCHEDULER and one.is_again else _TYPED
        if code != 0 and (code not in (1, 3) or not any(name in text for name in typed)):
            raise Failed(f"{self._trial}: {one.name()} ended with {code} and without a typed error\n{self._ends()}")

    def _may_concern_workers(self, strike: Strike) -> bool:
        """Whether they may fail of it: also where another process comes too late, or a server shared its memory."""
        is_of_async_worker = self._trial.kind == "dist_async" and strike.victim[0] == "worker"
        if strike.victim[0] == "server" and self._trial.memory == "auto" and self._came_again_in_time(strike):
            return False  # another server goes on with the memory
        return strike.is_death() and (not is_of_async_worker or self._trial.servers == 0)

    def _came_again_in_time(self, strike: Strike) -> bool:
        """Whether another process has come in the place of the victim, with time left to join."""
        struck_s = self._struck_s(strike)
        came_s = [
            one.said("begins")[0][0]
            for one in self._all
            if one.place == strike.victim and one.is_again and one.said("begins")
        ]
        return bool(came_s) and came_s[0] < struck_s + REJOIN_S - 2

    def _concerns_workers(self, strike: Strike) -> bool:
        """Whether all workers must hear of this death."""
        if not strike.is_death():
            return False
        role = strike.victim[0]
        # The values of a server outlive it in the memory that it shares with the workers of its host.
        loses_values = self._trial.memory == "off" and (role == "server" or self._trial.servers == 0)
        loses_rounds = self._trial.kind == "dist_sync" and role == "worker" and strike.again_s is None
        return role == "scheduler" or loses_values or loses_rounds

    def _require_errors(self, strike: Strike, at_s: float) -> None:
        """Everybody concerned ends in time, unless it had ended already."""
        within_s = ERROR_WITHIN_S + (REJOIN_S if self._trial.rejoins and strike.victim[0] != "scheduler" else 0)
        roles = ("worker", "server") if strike.victim[0] == "scheduler" else ("worker",)
        if self._trial.early or not self._concerns_workers(strike):
            return  # while they start, others may not know of the victim
        if strike.stop_s is not None and any(one.victim == SCHEDULER != strike.victim for one in self._trial.strikes):
            return  # a scheduler that was stopped at the same time counts less silence
        for one in self._all:
            if one.place == strike.victim or one.place[0] not in roles or one.killed_s is not None:
                continue
            if one.is_again and not one.said("created"):
                continue  # it had no part in the job yet
            from_s = max([at_s, *(time_s for _, time_s in one.stops), *(time_s for time_s, _ in one.said("created"))])
            if one.heard_s() > from_s + within_s:
                late_s = one.heard_s() - from_s
                raise Failed(f"{self._trial}: {one.name()} heard of it after {late_s:.1f} s\n{self._ends()}")

    def _require_expelled_ends(self, one: _One) -> None:
        """Unless the scheduler, which expels, was struck itself."""
        if self._trial.early or any(strike.victim == SCHEDULER for strike in self._trial.strikes):
            return
        for stopped_s, continued_s in one.stops:
            if continued_s - stopped_s < TIMEOUT_S + 0.5 or one.place == SCHEDULER or one.ended_s is None:
                continue
            if one.heard_s() > continued_s + HEARTBEAT_S + 2:
                went_on_s = one.heard_s() - continued_s
                raise Failed(f"{self._trial}: {one.name()} went on for {went_on_s:.1f} s\n{self._ends()}")
            if one.place[0] == "worker" and len([1 for at_s, _ in one.said("acked") if at_s > continued_s]) > 1:
                raise Failed(f"{self._trial}: {one.name()} was expelled and still pushed\n{self._ends()}")

    def _require_values(self) -> None:
        """Every push that was acknowledged before somebody read is in the values, and at most one more of each process
        that died."""
        for one in self._all:
            for _, words in one.said("value"):
                name, least, most = re.fullmatch(r"(.*) (\d+) (\d+)", words).groups()  # type: ignore[union-attr]
                if name == "all":
                    low, high = _TURNS * self._trial.workers, _TURNS * self._trial.workers
                else:
                    pushers = [other for other in self._all if other.place == ("worker", int(name.split()[1]))]
                    low = sum(other.acked(one.said("reads")[0][0]) for other in pushers)
                    high = sum(other.acked() + (not other.said("ends")) for other in pushers)
                if not low <= int(least) <= int(most) <= high:
                    found = f"{name} is {least} to {most}, not {low} to {high}"
                    raise Failed(f"{self._trial}: {one.name()} found that {found}\n{self._ends()}")

    def _ends(self, lines: int = 6) -> str:
        return "\n".join(
            f"--- {one.name()} ({one.process.popen.poll()}, at {one.ended_s}, killed at {one.killed_s}, "
            f"stopped {one.stops})\n" + "\n".join(one.process.output().splitlines()[-lines:])
            for one in self._all
        )


def carry_out(folder: Path, seed: int) -> Trial:
    """Raises Failed."""
    trial = Trial.of(seed)
    for attempt in range(_ATTEMPTS):
        (own := folder / str(attempt)).mkdir()
        with contextlib.suppress(PortTaken):
            Run(own, trial).carry_out()
            break
    return trial
