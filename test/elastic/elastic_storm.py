"""An elastic training whose processes die at random while others come, and what must come out of it."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from elastic_ranks import Failed, Job, Process, Stuck, elastic_job

from ringtrain.job.rendezvous.generations import Released, StateLost

_TRAINING = str(Path(__file__).with_name("elastic_training.py"))
STEPS_OF_STORM = 600

Weights = list[np.ndarray[Any, np.dtype[Any]]]


def training(folder: Path, steps: int = 60, pause_s: float = 0.01, extra_mb: float = 0.0) -> list[str]:
    """The program of each process, which leaves its weights in the folder."""
    return [_TRAINING, str(steps), str(pause_s), str(folder / "weights.npz"), str(extra_mb)]


def weights_in(folder: Path) -> Weights:
    with np.load(folder / "weights.npz") as file:
        return [file[name] for name in file.files]


def undisturbed(folder: Path, steps: int) -> Weights:
    """The weights after so many steps in which nobody dies."""
    with elastic_job(training(folder, steps, pause_s=0.0), folder, 2) as job:
        for process in job.processes:
            process.ends()
    return weights_in(folder)


def require_same_weights(folder: Path, expected: Weights) -> None:
    """But for the order in which the gradients of the samples were added."""
    for own, other in zip(weights_in(folder), expected, strict=True):
        assert np.max(np.abs(own - other) / (np.abs(other) + 1e-12)) < 1e-9


def require_no_lost_step(outputs: list[str]) -> None:
    """No generation begins behind a step that a rank had committed before; each line of the training has its time."""
    lines = [line.split() for output in outputs for line in output.splitlines()]
    whole = [line for line in lines if line[1:2] in (["step"], ["synced"]) and line[3:]]  # a kill may cut the last one
    noted = sorted((float(line[0]), line[1], int(line[2])) for line in whole)
    committed = 0
    for at, what, step in noted:
        assert what == "step" or step >= committed, f"at {at}: begins with step {step} after commit {committed}"
        committed = max(committed, step) if what == "step" else committed


class Storm:
    """Faults drawn from a seed, in one training without a launcher, whose part the storm takes where it has to kill."""

    def __init__(self, job: Job, seed: int):
        self._job = job
        self._chance = random.Random(seed)
        self._wakes: list[tuple[float, Process]] = []  # when a stopped process goes on
        self._doomed: list[tuple[float, Process]] = []  # when a newcomer dies
        self._seen = 0  # events
        self._retired: set[str] = set()
        self.counts: dict[str, int] = {}

    def strike(self, faults: Sequence[str]) -> None:
        """Do one of the faults, if that leaves two that have the state."""
        fault = self._chance.choice(faults)
        if getattr(self, f"_{fault}")():
            self.counts[fault] = self.counts.get(fault, 0) + 1

    def go_on(self) -> None:
        """Returns what is due by now."""
        now = time.monotonic()
        for at, process in [one for one in self._wakes if one[0] < now]:
            self._wakes.remove((at, process))
            self._signal(process, signal.SIGCONT)
        for at, process in [one for one in self._doomed if one[0] < now]:
            self._doomed.remove((at, process))
            process.kill()
        events = self._job.events[self._seen :]
        self._seen += len(events)
        for _, event in events:
            if isinstance(event, Stuck):
                self._job.process(event.member).kill()
            elif isinstance(event, Released):
                for member in event.members:
                    self._job.process(member).kill()

    def calm_down(self) -> None:
        """From here on only consequences."""
        for _, process in self._wakes:
            self._signal(process, signal.SIGCONT)
        self._wakes = []
        self._retire(set())

    def _living(self) -> list[Process]:
        return [process for process in self._job.processes if process.popen.poll() is None]

    def _safe(self) -> list[Process]:
        """Those that have the state, and neither sleep nor go."""
        asleep = [process for _, process in self._wakes]
        return [
            process
            for process in self._living()
            if "synced" in process.output() and process not in asleep and process.member not in self._retired
        ]

    def _signal(self, process: Process, number: int) -> None:
        if process.popen.poll() is None:
            process.popen.send_signal(number)

    def _victims(self, count: int) -> list[Process]:
        """So many, or none if fewer than two others would have the state."""
        living, safe = self._living(), self._safe()
        victims = self._chance.sample(living, min(count, len(living)))
        return victims if len([process for process in safe if process not in victims]) >= 2 else []

    def _kill(self) -> bool:
        victims = self._victims(1)
        for process in victims:
            process.kill()
        return bool(victims)

    def _kill_two(self) -> bool:
        victims = self._victims(2)
        for process in victims:
            self._signal(process, signal.SIGKILL)
        for process in victims:
            process.popen.wait()
        return bool(victims)

    def _stop(self) -> bool:
        """Shorter than all timeouts, or longer than all of them."""
        victims = self._victims(1)
        for process in victims:
            self._signal(process, signal.SIGSTOP)
            self._wakes.append((time.monotonic() + self._chance.choice([0.2, 1.5, 4.0, 9.0]), process))
        return bool(victims)

    def _start(self) -> bool:
        if len(self._living()) < 6:
            self._job.start()
            return True
        return False

    def _start_doomed(self) -> bool:
        """A newcomer that dies in its init() or soon after it."""
        if len(self._living()) < 6:
            (process,) = self._job.start()
            self._doomed.append((time.monotonic() + 2.5 * self._chance.random(), process))
            return True
        return False

    def _start_stopped(self) -> bool:
        """A newcomer that is stopped in its init() or soon after it."""
        if len(self._living()) < 6:
            (process,) = self._job.start()
            time.sleep(1.5 * self._chance.random())
            self._signal(process, signal.SIGSTOP)
            self._wakes.append((time.monotonic() + self._chance.choice([1.5, 9.0]), process))
            return True
        return False

    def _blink(self) -> bool:
        """All hosts are not named for a moment."""
        self._retire({process.member for process in self._living()})
        time.sleep(0.3 * self._chance.random())
        self._retire(set())
        return True

    def _exchange(self) -> bool:
        """All hosts are exchanged."""
        self._retire({process.member for process in self._living()})
        self._job.start(self._chance.choice([2, 3]))
        return True

    def _retire(self, members: set[str]) -> None:
        self._retired = members
        self._job.server.retire(members)


KILLS = ("kill", "start")
FAULTS = (*KILLS, "kill", "kill_two", "stop", "start", "start_doomed", "start_stopped", "blink", "exchange")


def storm(folder: Path, seed: int, memory: str, longest_s: float, faults: Sequence[str] = KILLS) -> dict[str, int]:
    """Train for STEPS_OF_STORM; returns how often there was each of the faults, for so many seconds at most.

    Raises AssertionError where a process that was not killed does not end well within a minute, or where a step is
    lost.
    """
    chance = random.Random(seed)
    with elastic_job(
        training(folder, STEPS_OF_STORM, 0.005),
        folder,
        4,
        least=2,
        RINGTRAIN_SHARED_MEMORY=memory,
        RINGTRAIN_STALL_SHUTDOWN_TIME_S="3",
    ) as job:
        job.processes[0].wait_for("step 1 ")
        of_seed = Storm(job, seed)
        end = time.monotonic() + longest_s

        def are_done() -> bool:
            return any("well" in process.output() for process in job.processes)

        while time.monotonic() < end and not are_done():
            time.sleep(chance.choice([0.003, 0.01, 0.03, 0.1, 0.3]))
            of_seed.strike(faults)
            of_seed.go_on()
        of_seed.calm_down()
        end = time.monotonic() + 90
        while any(process.popen.poll() is None for process in job.processes):
            assert time.monotonic() < end, f"seed {seed} hangs:\n{job.events[-12:]}\n{job.outputs()}"
            of_seed.go_on()
            time.sleep(0.02)
        codes = {process.popen.returncode for process in job.processes}
        assert codes <= {0, -signal.SIGKILL}, f"seed {seed}: {codes}\n{job.outputs()}"
        assert not job.of(StateLost) and not job.of(Failed), f"seed {seed}:\n{job.events}"
        require_no_lost_step([process.output() for process in job.processes])
    return of_seed.counts


class HostStorm:
    """Hosts that come and go under ringrun, and processes that die: all names are of this host."""

    NAMES = ("localhost", "127.0.0.1", "127.0.0.2")

    def __init__(self, folder: Path, seed: int):
        self._folder = folder
        self._chance = random.Random(seed)
        self._quiet_from = 0.0  # since then the hosts stay as they are
        self.counts: dict[str, int] = {}
        self._name([("localhost", 3)])

    def command(self) -> list[str]:
        limits = ["--min-np", "2", "--max-np", "4", "--elastic-timeout", "60", "--blacklist-cooldown-range", "1", "2"]
        hosts = ["--verbose", "--stall-shutdown-time-s", "3", "--host-discovery-script", f"cat {self._folder}/hosts"]
        program = training(self._folder, STEPS_OF_STORM, 0.02)
        return [sys.executable, "-m", "ringtrain.run", *limits, *hosts, sys.executable, *program]

    def strike(self, output: str) -> None:
        fault = self._chance.choice(["blink", "change", "change", "exchange", "kill", "kill", "kill_newcomer", "wait"])
        time.sleep(self._chance.random())
        if getattr(self, f"_{fault}")(output):
            self.counts[fault] = self.counts.get(fault, 0) + 1

    def calm_down(self) -> None:
        self._name([(name, 2) for name in self.NAMES])

    def _name(self, hosts: list[tuple[str, int]]) -> bool:
        (draft := self._folder / "draft").write_text("".join(f"{name}:{slots}\n" for name, slots in hosts))
        draft.rename(self._folder / "hosts")
        self._hosts, self._quiet_from = hosts, time.monotonic()
        return True

    def _wait(self, output: str) -> bool:
        time.sleep(4 * self._chance.random())
        return False

    def _blink(self, output: str) -> bool:
        hosts = self._hosts
        self._name([])
        time.sleep(4 * self._chance.random())
        return self._name(hosts)

    def _change(self, output: str) -> bool:
        names = self._chance.sample(self.NAMES, self._chance.randint(1, 3))
        return self._name([(name, self._chance.randint(1, 3)) for name in names])

    def _exchange(self, output: str) -> bool:
        others = [name for name in self.NAMES if name not in dict(self._hosts)]
        return bool(others) and self._name([(self._chance.choice(others), 3)])

    def _ids(self, output: str, are_trained: bool) -> list[int]:
        """The ids of processes that live, by whether they have the state."""
        trained = set(re.findall(r"^\[(\d+)\] \S+ synced", output, re.MULTILINE))
        found = re.findall(r"process (\d+) has the id (\d+) on", output)
        ids = [int(pid) for number, pid in found if (number in trained) == are_trained]
        return [pid for pid in ids if Path(f"/proc/{pid}/cwd").exists()]

    def _kill(self, output: str) -> bool:
        """While the hosts stay as they are, and two others have the state."""
        trained = self._ids(output, are_trained=True)
        if len(trained) < 3 or time.monotonic() - self._quiet_from < 5:
            return False
        os.kill(self._chance.choice(trained), signal.SIGKILL)
        return True

    def _kill_newcomer(self, output: str) -> bool:
        newcomers = self._ids(output, are_trained=False)
        for pid in newcomers[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(newcomers)


def storm_of_hosts(folder: Path, seed: int, longest_s: float) -> dict[str, int]:
    """As `storm`, under ringrun, which asks for the hosts."""
    of_seed = HostStorm(folder, seed)
    file = folder / "output"
    with file.open("wb") as output:
        job = subprocess.Popen(of_seed.command(), stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while " step 1 " not in file.read_text():
            assert job.poll() is None and time.monotonic() < end, f"seed {seed}:\n{file.read_text()}"
            time.sleep(0.05)
        end = time.monotonic() + longest_s
        while time.monotonic() < end and " well " not in file.read_text():
            of_seed.strike(file.read_text())
        of_seed.calm_down()
        code = job.wait(120)
    finally:
        job.kill()
        job.wait()
    text = file.read_text()
    assert code == 0 and "no rank that had the state" not in text, f"seed {seed}: exit code {code}\n{text}"
    require_no_lost_step([re.sub(r"^\[\d+\] ", "", text, flags=re.MULTILINE)])
    return of_seed.counts
