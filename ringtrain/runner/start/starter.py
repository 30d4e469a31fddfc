"""Starts the processes of a job without MPI, and ends them: what mpirun does for a job with MPI.

A starter has an agent on each host. It writes the lines of the agents to standard error, and frames of its own for
ringrun. `Starter` has what all jobs need, and notices a lost host; a subclass decides what follows from the end of a
process: `RankStarter` here, `ElasticStarter` and `RoleStarter` in files of their own.
"""

from __future__ import annotations

import base64
import os
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ringtrain.errors import list_of_ranks, ranges_of
from ringtrain.runner.start.agent import write_lines
from ringtrain.runner.start.links import HasDescriptor, Link, Loop
from ringtrain.runner.supervise import process_tree
from ringtrain.runner.supervise.end_rule import EndRule
from ringtrain.runner.supervise.frames import frame_of_report
from ringtrain.runner.supervise.rank_wrapper import END_NOW, END_RANK, speaker

if TYPE_CHECKING:
    from ringtrain.job.rendezvous.generations import Waiting

At = TypeVar("At")

_LOOK_S = 0.2
# How long processes have from SIGTERM to SIGKILL where ringrun ends the job now.
_GRACE_NOW_S = 1.0
# How long agents may take to end after they have killed their processes.
_AGENTS_END_S = 1.5
_STDIN_BYTES = 1 << 15
FOR_RANKS: dict[int, int] = {END_RANK: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1, signal.SIGUSR2: signal.SIGUSR2}
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Starter(ABC, Generic[At]):
    """Follows the agents of a job and ends it. `At` is what an agent is found by, such as the name of its host.

    One thread.
    """

    def __init__(self, grace_s: float):
        """`grace_s` is from SIGTERM to SIGKILL."""
        self._grace_s = grace_s
        self._rule = EndRule(grace_s)
        self._links: dict[At, Link] = {}
        self._code = 0
        self._is_stopping = False  # all processes were sent SIGTERM
        self._give_up_at = float("inf")
        self._loop = Loop(self._on_report)

    def obey_signals(self) -> None:
        """Signals of this process are for the ranks, or end the job. Main thread."""
        process_tree.reset_signals()
        self._loop.handle_signals((*FOR_RANKS, *ENDING_SIGNALS), self._on_signals, (END_RANK, END_NOW))

    def run(self) -> int:
        """Runs the job to its end. Returns its exit code."""
        while True:
            if not self._is_ending:
                self._go_on()
            # processes that were told to end have the time that ringrun gives them
            if self._rule.is_due(time.monotonic()) and not self._is_ending and not self._is_stopping:
                self._end(self._rule.grace_s)
            if self._is_ending and (not self._links or time.monotonic() >= self._give_up_at):
                break
            self._loop.wait(_LOOK_S, self._inputs())
            for at in [at for at, link in self._links.items() if not link.is_open]:
                link = self._links.pop(at)
                how = link.end_in_words()
                self._close(link)
                again = None if self._is_ending or self._is_stopping else link.again()
                if again is None:
                    self._note_end_of_agent(at, link, how)
                else:
                    self._add(at, again)
        for link in self._links.values():
            self._close(link)
        return self._code

    @abstractmethod
    def _go_on(self) -> None:
        """Does what is due. Called several times a second until the job ends."""

    @abstractmethod
    def _on_report(self, link: Link, report: dict[str, Any]) -> None:
        """Handles a report of an agent."""

    @abstractmethod
    def _note_end_of_agent(self, at: At, link: Link, how: str) -> None:
        """Handles the end of an agent, also by the loss of its host. `how`: the end in words."""

    def _inputs(self) -> Mapping[HasDescriptor, Callable[[], None]]:
        """Returns further descriptors to read now, each with its reader."""
        return {}

    def _signal_ranks(self, number: int) -> None:
        self._order_all({"signal": number})

    @property
    def _is_ending(self) -> bool:
        return self._give_up_at < float("inf")

    def _add(self, at: At, link: Link) -> None:
        self._links[at] = link
        self._loop.add(link)

    def _close(self, link: Link) -> None:
        self._loop.forget(link)
        link.close()

    def _finish(self) -> None:
        """Ends the agents; no process runs any more."""
        self._order_all({"finish": True})
        self._give_up_at = time.monotonic() + _AGENTS_END_S

    def _fail(self, code: int) -> None:
        """The job has failed: the other processes learn it by themselves, and may go on for a while."""
        self._code = self._code or code
        self._rule.fail(time.monotonic())

    def _end(self, grace_s: float) -> None:
        self._order_all({"end": grace_s})
        self._give_up_at = min(self._give_up_at, time.monotonic() + grace_s + _AGENTS_END_S)

    def _order_all(self, order: Mapping[str, object]) -> None:
        for link in self._links.values():
            link.order(order)

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in FOR_RANKS:
                self._signal_ranks(FOR_RANKS[number])
                self._is_stopping |= FOR_RANKS[number] == signal.SIGTERM
            elif number == END_NOW:
                self._code = self._code or 128 + signal.SIGTERM
                self._end(_GRACE_NOW_S)
            elif number in ENDING_SIGNALS:  # not from ringrun, which decides how the job ends
                report_to_ringrun({"signalled": number})


def say(sentence: str) -> None:
    """Writes a sentence in the name of the command that was typed."""
    write_lines(2, [f"{speaker()}: {sentence}".encode()])


def report_to_ringrun(report: Mapping[str, object]) -> None:
    write_lines(2, [frame_of_report(report)])


# --- ranks ------------------------------------------------------------------------------------------------------------


class StandardInput:
    """The standard input of this process. That of a terminal may be read in the foreground only."""

    def __init__(self) -> None:
        self._is_terminal = os.isatty(0)
        self.is_open = True

    def fileno(self) -> int:
        return 0

    def may_be_read(self) -> bool:
        return self.is_open and (not self._is_terminal or _is_in_foreground())

    def read(self) -> bytes:
        """Returns nothing at its end."""
        try:
            data = os.read(0, _STDIN_BYTES)
        except OSError:
            data = b""
        self.is_open = bool(data)
        return data


def _is_in_foreground() -> bool:
    """Whether ringrun is in the foreground, the parent of the guard. This process is in another session."""
    try:
        _, ringrun, *_ = _fields_of(os.getppid())
        _, _, group, _, _, group_in_foreground, *_ = _fields_of(int(ringrun))
    except OSError:
        return False
    return group == group_in_foreground


def _fields_of(pid: int) -> list[str]:
    """Returns the state of a process, its parent, and so on, as /proc has them."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class RankStarter(Starter[int]):
    """Ends with the last rank. Its standard input is that of rank 0."""

    def __init__(self, links: Sequence[Link], grace_s: float):
        """The first link has rank 0."""
        super().__init__(grace_s)
        self._input = StandardInput()
        self._input_is_on_its_way = False
        for number, link in enumerate(links):
            self._add(number, link)

    def _go_on(self) -> None:
        if not self._links:
            self._finish()

    def _inputs(self) -> Mapping[HasDescriptor, Callable[[], None]]:
        may_read = self._input.may_be_read() and not self._input_is_on_its_way and 0 in self._links
        return {self._input: self._read_input} if may_read else {}

    def _read_input(self) -> None:
        data = self._input.read()
        self._input_is_on_its_way = bool(data)
        self._links[0].order({"stdin": base64.b64encode(data).decode() if data else None})

    def _on_report(self, link: Link, report: dict[str, Any]) -> None:
        if "ended" in report:
            rank, code = report["ended"]
            link.running.discard(rank)
            if code != 0:
                self._fail(code)
        elif "took" in report:
            self._input_is_on_its_way = False

    def _note_end_of_agent(self, at: int, link: Link, how: str) -> None:
        if link.running:
            if not self._is_ending:
                say(f"{how}, and with it {list_of_ranks(sorted(link.running))}")
            self._fail(1)
            # Its ranks have not begun, and so no other rank is past init() and has something to save.
            if not link.has_begun:
                self._end(_GRACE_NOW_S)


# --- the log of a job, in words: each event is printed at once, and again at the end ----------------------------------


# How many lines about lost processes the end of a job repeats.
_MAX_DEPARTURES = 20


def processes(numbers: Sequence[int]) -> str:
    """`processes 0, 2-5`, or `process 1`."""
    return f"process{'es' if len(numbers) > 1 else ''} {ranges_of(numbers)}"


def ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def end_of(code: int) -> str:
    """How a process ended whose exit code this is, as a shell gives it."""
    if code - 128 in signal.valid_signals():
        return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"


def waiting_in_words(waiting: Waiting, absent: str, in_words: Callable[[Sequence[str]], str]) -> str:
    """Reports the processes that are waited for, and where.

    Args:
        absent: processes that run and have not called init() yet, in words; or nothing.
        in_words: names processes.
    """
    seconds = f"{waiting.seconds:.0f} s"
    late = in_words(waiting.late)
    if waiting.what == "processes":
        more = "1 more process" if waiting.needed == 1 else f"{waiting.needed} more processes"
        reason = f"{absent}: no call of init() yet" if absent else "no other process is starting"
        return f"generation {waiting.generation + 1} has waited {seconds} for {more} ({reason})"
    if waiting.what == "replacements":
        return f"the hosts of {late} have not been named for {seconds}; the ranks go on until others replace them"
    where = {
        "init": f"generation {waiting.generation} has waited {seconds} for {late} in init()",
        "train": f"generation {waiting.generation} has waited {seconds} for {late}, between init() and the training",
        "next": f"generation {waiting.generation + 1} has waited {seconds} for {late} to leave the one before",
    }[waiting.what]
    silent = in_words(waiting.silent)
    return where + (f"; no answer from {silent}: stopped?" if silent else "")


class JobLog:
    """The log of a job: reports events of its processes in sentences. `say` gets each sentence at once."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._generation = 0
        self._size = 0
        self._departures: deque[str] = deque(maxlen=_MAX_DEPARTURES)
        self._count = 0
        self._reason = ""

    def formed(self, generation: int, size: int) -> None:
        """Reports a new generation, but not the first one."""
        self._generation, self._size = generation, size
        if generation > 1:
            self._say(f"generation {generation}: {ranks(size)}")

    def left(self, who: str, how: str, generation: int) -> None:
        """Reports processes that ended too early, such as `process 3 on h1`, which `was ended by SIGKILL`.

        `generation` is the last one that they were in, or 0.
        """
        sentence = f"{who} {how}" + (f" in generation {generation}" if generation else "")
        self._departures.append(sentence)
        self._count += 1
        self._say(sentence)

    def noted(self, sentence: str) -> None:
        """Reports what the last lines of the job need not repeat."""
        self._say(sentence)

    def state_lost(self, generation: int, commits: int) -> None:
        """Reports that training begins anew, or from a file with `commits` commits."""
        sentence = f"generation {generation} has no rank that had the state: training "
        if commits > 0:
            sentence += f"goes on from a file, at commit {commits}"
        else:
            sentence += "begins at step 0 (to prevent that, use state.save_to() or --on-state-lost fail)"
        self._departures.append(sentence)
        self._count += 1
        self._say(sentence)

    def failed(self, reason: str) -> None:
        """Notes why the job cannot go on. The first reason is kept."""
        self._reason = self._reason or reason

    def last_lines(self, seconds_lost: float) -> list[str]:
        """Returns the last lines of the job; none if nothing happened."""
        lines = list(self._departures)
        if self._count > len(lines):
            lines.insert(0, f"{self._count - len(lines)} more such lines came before these:")
        if self._generation > 1:
            lines.append(
                f"there were {self._generation} generations, the last one of {ranks(self._size)}; "
                f"{seconds_lost:.2f} s were lost between them"
            )
        return [*lines, *([self._reason] if self._reason else [])]
