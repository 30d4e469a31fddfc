"""A job from the start of its launcher to the end of its last process."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from ringtrain.errors import list_of_ranks
from ringtrain.runner.hosts import place_for_torch
from ringtrain.runner.job import Job
from ringtrain.runner.launchers import Launcher
from ringtrain.runner.supervise import guard, process_tree, rank_wrapper, wrap
from ringtrain.runner.supervise.end_rule import EndRule
from ringtrain.runner.supervise.first_failure import (
    Failure,
    FailureLog,
    exit_code_of_launcher,
    last_lines_of,
    of_late_ranks,
    of_launcher,
    of_preemption,
    of_unkillable,
    report,
)
from ringtrain.runner.supervise.frames import (
    Counted,
    Ended,
    Event,
    FrameReader,
    LauncherSaid,
    Reported,
    Started,
    Told,
    Written,
)
from ringtrain.runner.supervise.output import RANKS, Names, Output, RankFiles, Screen
from ringtrain.runner.supervise.rank_wrapper import END_RANK, JOB_VARIABLE
from ringtrain.runner.supervise.slowest import in_words_of_slowest

# --- what a launcher has left behind on this host ---------------------------------------------------------------------


_KILL_S = 10.0


def processes_of(job: str) -> list[int]:
    """Process ids of the job, zombies excepted: these have no environment any more."""
    entry = f"{JOB_VARIABLE}={job}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # it has just ended, or is another user's
        with contextlib.suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def kill_job(job: str, within_s: float = _KILL_S) -> list[int]:
    """Kill all processes of the job and wait for their end. Returns those that outlive it."""
    return process_tree.kill_all(lambda: processes_of(job), within_s)


# --- signals for all ranks --------------------------------------------------------------------------------------------


_SCANCEL_S = 10.0


class SignalSender:
    """Knows where the ranks run. For the thread that supervises the job."""

    def __init__(self, launcher: Launcher, process: subprocess.Popen[bytes]):
        self._launcher = launcher
        self._process = process
        self._running: dict[int, Started] = {}
        self._slurm_steps: set[str] = set()
        self._told: set[int] = set()

    def note(self, event: Started | Told | Ended) -> None:
        if isinstance(event, Told):
            self._told.add(event.rank)
        elif isinstance(event, Started):
            self._running[event.rank] = event
            if event.slurm_step is not None:
                self._slurm_steps.add(event.slurm_step)
        else:
            self._running.pop(event.rank, None)

    @property
    def running(self) -> list[int]:
        """The ranks that have started and not ended."""
        return sorted(self._running)

    def send(self, number: int) -> list[int]:
        """Signal the process groups of all ranks that run, as launchers do. Returns the ranks that it cannot reach."""
        if number in self._launcher.passes_on:
            self._process.send_signal(self._launcher.passes_on[number])
            return []
        if self._launcher.scancel is not None:
            if number == signal.SIGTERM and self._running and self._told.issuperset(self._running):
                return []  # Slurm itself ends the job
            # the wrapper of each task hands SIGTERM on, unless it has just come from Slurm
            number_of_step = END_RANK if number == signal.SIGTERM else number
            return [] if self._signal_step(self._launcher.scancel, number_of_step) else self.running
        here = [started for started in self._running.values() if started.host == socket.gethostname()]
        for started in here:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(started.pid), number)
        return sorted(self._running.keys() - {started.rank for started in here})

    def _signal_step(self, scancel: str, number: int) -> bool:
        """Returns whether that could be done."""
        if not self._slurm_steps:
            return False
        command = [scancel, f"--signal={int(number)}", *self._slurm_steps]
        try:
            return subprocess.run(command, capture_output=True, timeout=_SCANCEL_S, check=False).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


# --- the steps in which a job is ended --------------------------------------------------------------------------------


# How long a launcher may take to end what still runs, also on other hosts.
_LAUNCHER_S = 3.0
# How long the guard may take to kill everything on this host.
_GUARD_S = 5.0
# A launcher that outlives SIGKILL for so long waits in the kernel, perhaps for ever.
_KILLED_S = 15.0


class Shutdown:
    """For the thread that supervises the job, which calls `go_on` several times in a second."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stop_signal: int,
        signal_sender: SignalSender,
        say: Callable[[str], None],
        names: Names = RANKS,
    ):
        """`process` is the guard of the launcher, whose signal to end the job is `stop_signal`."""
        self._process = process
        self._stop_signal = stop_signal
        self._signal_sender = signal_sender
        self._say = say
        self._names = names
        self._grace_s: float | None = None
        self._launcher_at = float("inf")
        self._kill_at = float("inf")

    @property
    def has_told_launcher(self) -> bool:
        return self._kill_at < float("inf")

    @property
    def has_failed(self) -> bool:
        """The launcher outlives everything."""
        return time.monotonic() > self._kill_at + _KILLED_S

    def ask_ranks(self, grace_s: float) -> None:
        """Send SIGTERM to the ranks. The launcher is told once all have ended, in `grace_s` at the latest."""
        if self._grace_s is None:
            self._grace_s = 0.0 if self._signal_sender.send(signal.SIGTERM) else grace_s
            self._launcher_at = min(self._launcher_at, time.monotonic() + self._grace_s)

    def tell_launcher(self) -> None:
        """Makes the launcher end the job, which gives the ranks as much time as it pleases."""
        self._launcher_at = min(self._launcher_at, time.monotonic())

    def kill(self) -> None:
        self._kill_at = min(self._kill_at, time.monotonic())

    def go_on(self) -> None:
        """Take the next step if it is due."""
        now, running = time.monotonic(), self._signal_sender.running
        if not self.has_told_launcher and (now >= self._launcher_at or (self._grace_s is not None and not running)):
            if self._grace_s and running:
                late = self._names.listed(running)
                self._say(f"{late} did not end within {self._grace_s:g} s of SIGTERM, see --grace-s")
            self._process.send_signal(self._stop_signal)
            self._kill_at = now + _LAUNCHER_S
        if now >= self._kill_at + _GUARD_S:
            self._process.kill()
        elif now >= self._kill_at:
            self._process.send_signal(guard.KILL_ALL)


# --- the supervisor ---------------------------------------------------------------------------------------------------


# How often the launcher is asked whether it has ended: its daemons may hold its pipes open.
_LOOK_S = 0.2
# The pipes of an ended launcher are read for this time at most.
_DRAIN_S = 1.0
# A launcher that ends a job by itself has done so within this time. The wrappers of ranks that somebody else has told
# to end wait for it, else for ringrun. A failure is kept from the launcher, so there ringrun does not wait for it.
_LAUNCHER_ENDS_S = 2.0
_CLEAN_UP_S = 5.0
_REAP_S = 3.0
# Signals to ringrun within this time are one.
_SAME_S = 1.0
# Slurm may have told the ranks to end as well. Within this time ringrun hears of it.
_HEAR_S = 0.5
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNALS_OF_THE_RANKS = (signal.SIGUSR1, signal.SIGUSR2)


class Settings(NamedTuple):
    """How a job is watched.

    `has_prefix` is for the rank before each line, `has_time` for the time before that. `start_timeout_s` is 0 for no
    limit; `output_folder` None writes no files; `grace_s` is from SIGTERM to SIGKILL. `names` are the processes'.
    `has_stdin`: rank 0 reads the standard input of this process.
    """

    has_prefix: bool
    start_timeout_s: float
    output_folder: Path | None
    is_verbose: bool
    grace_s: float = 30.0
    has_time: bool = False
    names: Names = RANKS
    has_stdin: bool = True


class Outcome(NamedTuple):
    """How a job ended.

    `code` is for the shell, `explanation` what there is to say of it, in one or more lines. `failures` are the ranks
    that failed and `ended_well` those that ended with exit code 0 by themselves, the first one first. Of an elastic job
    these are the numbers of its processes, and `generation` those of the last generation, by rank.
    """

    code: int
    explanation: str
    failures: list[Failure]
    ended_well: list[int]
    generation: Sequence[int] = ()


def command_of_wrappers(command: list[str]) -> list[str]:
    """`command` with a wrapper before it. -I and -S: it needs nothing but Python itself, and starts sooner."""
    return [sys.executable, "-I", "-S", wrap.__file__, *command]


class LauncherWords:
    """The last lines that a launcher has written."""

    _MOST_BYTES = 1 << 14

    def __init__(self) -> None:
        self._bytes = b""

    def add(self, data: bytes) -> None:
        self._bytes = (self._bytes + data)[-self._MOST_BYTES :]

    def named(self, hosts: Iterable[str]) -> list[str]:
        """Returns the hosts that the lines name, except this one."""
        words = set(re.findall(r"[\w.-]+", self._bytes.decode(errors="replace")))
        return sorted(set(hosts) & words - {socket.gethostname()})


class Supervisor:
    """Owns the launcher's process and its pipes. Everything happens in the thread that calls `run`."""

    def __init__(self, launcher: Launcher, job: Job, settings: Settings, screen: Screen):
        """Raises OSError if the folder for the output cannot be made."""
        self._id = os.urandom(16).hex()
        # a rank writes into a pipe, where Python would keep its lines back
        environment = {"PYTHONUNBUFFERED": "1", **job.environment, rank_wrapper.JOB_VARIABLE: self._id}
        environment[rank_wrapper.GRACE_VARIABLE] = str(settings.grace_s)
        environment[rank_wrapper.SPEAKER_VARIABLE] = screen.speaker
        if not settings.has_stdin:
            environment[rank_wrapper.NO_STDIN_VARIABLE] = "1"
        if job.elastic is None and job.roles is None:
            environment[rank_wrapper.RANKS_OF_HOSTS_VARIABLE] = ",".join(map(str, job.ranks_of_hosts))
            environment[rank_wrapper.TORCH_PLACE_VARIABLE] = place_for_torch(job.hosts, job.network_interfaces)
        makes_wrappers = launcher.makes_wrappers
        command = job.command if makes_wrappers else command_of_wrappers(job.command)
        self._job = job._replace(command=command, environment=environment, has_wrappers=makes_wrappers)
        self._launcher = launcher
        self._settings = settings
        self._screen = screen
        folder = settings.output_folder
        self._files = RankFiles(folder, job.num_proc, screen.say) if folder else None
        self._output = Output(
            screen, settings.has_prefix, job.may_have_several, self._files, settings.has_time, settings.names
        )
        self._frames = FrameReader()
        self._failures = FailureLog()
        self._launcher_words = LauncherWords()
        self._counts: dict[int, list[float]] = {}
        self._started: set[int] = set()
        self._signals: list[int] = []
        self._signalled_at = 0.0
        self._reported_signals: list[int] = []
        self._last_lines: list[str] = []  # of a starter about a job that has ended
        self._to_pass_on: list[int] = []
        self._is_late = False
        self._rule = EndRule(settings.grace_s)
        self._launcher_code: int | None = None
        self._unkillable: list[int] = []
        self._were_told = False
        self._wrappers_wait_since = float("inf")

    def run(self) -> Outcome:
        """Run the job to its end; nothing of it is left on this host, also if this raises."""
        command, own = self._launcher.arguments(self._job), os.getpid()
        process = subprocess.Popen(
            guard.command_of_guard(own, self._launcher.last_signal, command, self._launcher.shielded, reports=True),
            env=self._launcher.environment(self._job),
            stdin=None if self._settings.has_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C in a terminal is for ringrun, which decides what becomes of it
            start_new_session=True,
        )
        self._signal_sender = SignalSender(self._launcher, process)
        say, names = self._screen.say, self._settings.names
        self._shutdown = Shutdown(process, self._launcher.stop_signal, self._signal_sender, say, names)
        try:
            self._watch(process)
        finally:
            self._clean_up(process)
        # the guard knows better: where this process ignores SIGCHLD, the kernel forgets how a child has ended
        known = process.returncode is None or self._launcher_code is not None
        return self._outcome(self._launcher_code if known else process.returncode or -signal.SIGKILL)

    def end(self, number: int) -> None:
        """End the job because of a signal; may be called by its handler. The second one kills at once.

        Batch systems may send SIGTERM twice at a time; a person presses Ctrl-C twice on purpose.
        """
        now = time.monotonic()
        if not self._signals:
            self._signalled_at = now
        if number == signal.SIGINT or not self._signals or now > self._signalled_at + _SAME_S:
            self._signals.append(number)

    @property
    def _was_signalled(self) -> list[int]:
        """The signals that end the job: those of this process, or of a process of the launcher."""
        return self._signals or self._reported_signals

    @property
    def _wrappers_wait_s(self) -> float:
        return _LAUNCHER_ENDS_S if self._were_told else self._launcher.proxies_end_s

    def pass_on(self, number: int) -> None:
        """Hand a signal to the ranks, once all have started; may be called by its handler."""
        self._to_pass_on.append(number)

    def stop(self) -> None:
        """Stop this process alone, as Ctrl-Z asks for; may be called by its handler. Returns once it goes on.

        Ranks that stop would look lost to those that do not, and after a while to themselves.
        """
        name = self._screen.speaker
        text = (
            f"\n{name}: stopped; the ranks go on, and wait once their output is not read any more: go on with fg or "
            f"kill -CONT {os.getpid()}, end the job with kill -TERM and kill -CONT\n"
        )
        with contextlib.suppress(OSError):
            os.write(2, text.encode())  # what prints may be interrupted right now
        os.kill(os.getpid(), signal.SIGSTOP)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Handle what comes until the launcher has ended and nothing more comes."""
        assert process.stdout is not None and process.stderr is not None
        timeout_s = self._settings.start_timeout_s
        start_before = time.monotonic() + timeout_s if timeout_s else float("inf")
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(process.stderr, selectors.EVENT_READ)
            while process.poll() is None and not self._shutdown.has_failed:
                self._read_once(selector, process, _LOOK_S)
                self._output.refresh()
                if time.monotonic() > start_before and self._missing():
                    self._is_late = True
                self._pass_signals_on()
                self._end_if_due()
            self._drain(selector, process)

    def _missing(self) -> list[int]:
        return sorted(set(range(self._job.num_proc)) - self._started)

    def _pass_signals_on(self) -> None:
        """Not to ranks that have not started: the launcher itself might end by it."""
        while self._to_pass_on and not self._missing():
            number = self._to_pass_on.pop(0)
            unreached = self._signal_sender.send(number)
            if unreached:
                name = signal.Signals(number).name
                self._screen.say(
                    f"this launcher cannot hand {name} to {list_of_ranks(unreached)}; SIGUSR1 reaches all ranks"
                )

    def _end_if_due(self) -> None:
        if len(self._signals) > 1:
            self._shutdown.kill()
        elif self._is_late or (self._was_signalled and self._missing()):
            self._shutdown.tell_launcher()
        elif self._was_signalled:
            if self._launcher.scancel is not None and time.monotonic() < self._signalled_at + _HEAR_S:
                return
            self._shutdown.ask_ranks(self._settings.grace_s)
        elif time.monotonic() >= self._wrappers_wait_since + self._wrappers_wait_s:
            self._shutdown.tell_launcher()
        elif self._rule.is_due(time.monotonic()):
            self._shutdown.ask_ranks(self._rule.grace_s)
        self._shutdown.go_on()

    def _read_once(self, selector: selectors.BaseSelector, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        for key, _ in selector.select(timeout_s):
            data = os.read(key.fd, 1 << 16)
            if not data:
                selector.unregister(key.fileobj)
            elif key.fileobj is process.stdout:
                self._screen.print(data, False)
            else:
                self._handle(self._frames.feed(data))

    def _drain(self, selector: selectors.BaseSelector, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _DRAIN_S
        while selector.get_map() and time.monotonic() < deadline:
            self._read_once(selector, process, _DRAIN_S / 10)
        self._handle(self._frames.close())
        self._output.close()

    def _handle(self, events: Iterator[Event]) -> None:
        for event in events:
            if isinstance(event, LauncherSaid):
                self._launcher_words.add(event.data)
                self._screen.print(event.data, True)
                continue
            if isinstance(event, Reported):
                self._note_report(event.report)
                continue
            if isinstance(event, Counted):
                self._counts[event.rank] = event.counts
                continue
            if isinstance(event, Told):
                self._signal_sender.note(event)
                continue
            self._failures.add(event)
            if isinstance(event, Written):
                self._output.add(event)
                continue
            self._signal_sender.note(event)
            if isinstance(event, Ended):
                self._note_end(event)
            else:
                self._started.add(event.rank)
                if self._settings.is_verbose:
                    self._screen.say(self._in_words(event))

    def _in_words(self, event: Started) -> str:
        return f"rank {event.rank} is process {event.pid} on {event.host}"

    def _note_report(self, report: dict[str, Any]) -> None:
        """Handles a report of the guard or of a starter."""
        self._launcher_code = report.get("launcher", self._launcher_code)
        self._unkillable = report.get("unkillable", self._unkillable)
        if "signalled" in report:
            self._signalled_at = self._signalled_at or time.monotonic()
            self._reported_signals.append(report["signalled"])
        if "last" in report:
            self._last_lines.append(report["last"])

    def _note_end(self, event: Ended) -> None:
        if self._launcher.keeps_end_rule:
            return
        now = time.monotonic()
        if event.code != 0:
            self._rule.fail(now)
        self._were_told |= event.was_told
        if (self._were_told or self._rule.has_failed) and not self._signal_sender.running and not self._missing():
            self._wrappers_wait_since = now

    def _clean_up(self, process: subprocess.Popen[bytes]) -> None:
        """Leave nothing behind. The launcher still runs if this process was interrupted or could not write."""
        if process.poll() is None and not self._shutdown.has_told_launcher:
            process.send_signal(self._launcher.stop_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_CLEAN_UP_S)
        if process.poll() is None:
            process.send_signal(guard.KILL_ALL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GUARD_S)
        if process.poll() is None:
            process.kill()
        unkillable = sorted({*self._unkillable, *kill_job(self._id)})
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_S)
        if unkillable:
            with contextlib.suppress(OSError):
                self._screen.say(of_unkillable(unkillable))
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        if self._files is not None:
            self._files.close()

    def _outcome(self, launcher_code: int | None) -> Outcome:
        """`launcher_code` is None for one that outlives SIGKILL."""
        early = [rank for rank, _ in self._failures.ends().early]
        # Ctrl-C is not a request to queue the job again
        has_left = self._failures.have_left_preempted(self._ranks_at_the_end())
        if has_left and signal.SIGINT not in self._was_signalled:
            return Outcome(os.EX_TEMPFAIL, of_preemption(), [], early)
        if self._was_signalled:
            return Outcome(128 + self._was_signalled[0], "", [], early)
        failures, names = self._failures.failures(), self._settings.names
        if self._is_late:
            late = of_late_ranks(self._job, self._missing(), self._settings.start_timeout_s, names)
            return Outcome(1, f"{late}\n{report(failures, names)}" if failures else late, failures, early)
        return self._judge(launcher_code, failures, early)

    def _ranks_at_the_end(self) -> Sequence[int]:
        return range(self._job.num_proc)

    def _judge(self, launcher_code: int | None, failures: list[Failure], early: list[int]) -> Outcome:
        """Returns how the job ended, where it has begun and no signal has ended it."""
        if launcher_code is None or self._shutdown.has_told_launcher:
            launcher_code = 0  # it says nothing of the ranks
        ends, missing = self._failures.ends(), self._missing()
        # ranks that saw their launcher die are a consequence of that
        if failures and not (launcher_code < 0 and failures[0].is_consequence):
            return Outcome(failures[0].code, report(failures, silent_hosts=ends.silent_hosts), failures, early)
        if launcher_code == 0 and ends.returned_0 == self._job.num_proc:
            is_fixed = self._job.elastic is None and self._job.roles is None
            return Outcome(0, in_words_of_slowest(self._counts, self._job.num_proc) if is_fixed else "", [], early)
        code = exit_code_of_launcher(launcher_code, self._job.num_proc, missing, ends)
        named = self._launcher_words.named(ends.hosts_of_lost)
        return Outcome(code, of_launcher(self._job, launcher_code, missing, ends, named), [], early)


@contextlib.contextmanager
def signals_handled(supervisor: Supervisor, *, is_last: bool = False) -> Iterator[None]:
    """While this lasts, Ctrl-C and its like end the supervisor's job, and its ranks get SIGUSR1 and SIGUSR2.

    Ctrl-Z stops this process alone, and says so.

    A signal that is ignored, as nohup and a shell's `&` leave it, stays ignored. For the main thread.

    Args:
        is_last: this process only returns the code of the job afterwards. Signals that come then, such as the second
            SIGTERM of a batch system, are ignored: they would replace that code.
    """

    def end(number: int, frame: FrameType | None) -> None:
        supervisor.end(number)

    def pass_on(number: int, frame: FrameType | None) -> None:
        supervisor.pass_on(number)

    def stop(number: int, frame: FrameType | None) -> None:
        supervisor.stop()

    handlers = {
        signal.SIGTSTP: stop,
        **dict.fromkeys(_ENDING_SIGNALS, end),
        **dict.fromkeys(_SIGNALS_OF_THE_RANKS, pass_on),
    }
    former = {number: signal.getsignal(number) for number in handlers}
    handled = [number for number, handler in former.items() if handler is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handlers[number])
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_IGN if is_last else former[number])


# --- elastic jobs -----------------------------------------------------------------------------------------------------


class ElasticSupervisor(Supervisor):
    """Reports about processes, not ranks: they have numbers of their own, and others take their place."""

    _generation: tuple[int, ...] = ()

    def _missing(self) -> list[int]:
        """None: the starter knows which there should be."""
        return []

    def _ranks_at_the_end(self) -> Sequence[int]:
        return self._generation

    def _in_words(self, event: Started) -> str:
        return f"process {event.rank} has the id {event.pid} on {event.host}"

    def _note_report(self, report: dict[str, Any]) -> None:
        super()._note_report(report)
        self._generation = tuple(report.get("generation", self._generation))

    def _judge(self, launcher_code: int | None, failures: list[Failure], early: list[int]) -> Outcome:
        code, lines, failures = launcher_code or 0, self._last_lines, _latest_first(failures)
        if code < 0:
            return Outcome(128 - code, f"the launcher was ended by {signal.Signals(-code).name}", [], early)
        if code != 0 and failures:
            lines = [*last_lines_of(f"process {failures[0].rank}", failures[0]), *lines]
        if code != 0 and not lines:
            lines = [f"the launcher ended with exit code {code}"]
        return Outcome(code, "\n".join(lines), failures, early, self._generation)


def _latest_first(failures: list[Failure]) -> list[Failure]:
    """Failures that the job has survived are less interesting; those that a process reports of another one, least."""
    return sorted(failures, key=lambda failure: (failure.is_consequence, -failure.time))


# --- jobs with servers ------------------------------------------------------------------------------------------------


class RoleSupervisor(Supervisor):
    """Reports about a scheduler, servers and workers, not ranks."""

    def _ranks_at_the_end(self) -> Sequence[int]:
        """The workers, which are last."""
        assert self._job.roles is not None
        return range(self._job.num_proc - self._job.roles.cast.workers, self._job.num_proc)

    def _in_words(self, event: Started) -> str:
        return f"{self._settings.names.listed([event.rank])} is process {event.pid} on {event.host}"

    def _judge(self, launcher_code: int | None, failures: list[Failure], early: list[int]) -> Outcome:
        code, names = launcher_code or 0, self._settings.names
        if code < 0:
            return Outcome(128 - code, f"the launcher was ended by {signal.Signals(-code).name}", [], early)
        if code == 0:
            return Outcome(0, "", [], early)
        if failures and all(failure.is_consequence for failure in failures if failure.code == code):
            code = failures[0].code  # the starter has heard of a consequence first
        # of a process that got lost with its host there are no words of its own
        words = report(failures, names) if failures and not failures[0].is_consequence else "\n".join(self._last_lines)
        return Outcome(code, words or f"the launcher ended with exit code {code}", failures, early)
