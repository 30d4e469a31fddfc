"""Which rank failed first, and the sentences that say why a job ended."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from ringtrain.errors import list_of_ranks
from ringtrain.runner.job import Job
from ringtrain.runner.supervise.frames import Ended, Started, Written
from ringtrain.runner.supervise.output import RANKS, LastLines, Names

_TRACEBACK = "Traceback (most recent call last):"
# Errors of ranks that are the consequence of another rank's; which of several is first may be an accident.
_CONSEQUENCES = (
    "ringtrain.PeerLostError",
    "ringtrain.RemoteError",
    "ringtrain.ShutDownError",
    "ringtrain.StalledError",
)
# The words of a rank whose wait has failed, about the ranks that it waited for.
_STALL = re.compile(
    r"ringtrain\.StalledError: (?P<what>.+): waited \d+ s\. .+, (?P<ranks>ranks? [\d, -]+) did not"
    r"(: (?P<where>.+?))?\. [A-Z]"
)
# Notes of the library while a process ends; after a traceback they would hide the error.
_NOTE = "ringtrain: "
_SHOWN_LINES = 20


class Failure(NamedTuple):
    """A rank that failed; `code` is what a shell would give, 128 + signal where a signal ended it.

    `is_consequence` says that it failed because another rank did: by its own words, or as it was told to end by then.
    """

    rank: int
    host: str
    time: float
    code: int
    is_consequence: bool
    last_lines: list[str]

    def in_words(self, names: Names) -> str:
        where = names.listed([self.rank]) + (f" on {self.host}" if self.host else "")
        number = self.code - 128
        if number in signal.valid_signals():
            return f"{where}, ended by {signal.Signals(number).name} (exit code {self.code})"
        return f"{where}, with exit code {self.code}"


class Ends(NamedTuple):
    """How the ranks ended, other than by a failure of their own.

    `early` ended with exit code 0 without being told to, each with its host, the first one first; `told` were told to
    end and did not return 0; the end of `lost` is not known. `returned_0` counts exit codes of 0, told or not.
    `hosts_of_lost` have lost ranks, and of the `silent_hosts` all ranks are lost.
    """

    early: list[tuple[int, str]]
    told: list[int]
    lost: list[int]
    returned_0: int
    silent_hosts: list[str]
    hosts_of_lost: list[str]


class _Rank:
    def __init__(self) -> None:
        self.host = ""
        self.last_lines = LastLines()
        self.traceback_at: float | None = None
        self.ended: Ended | None = None
        self.ended_at = 0.0

    @property
    def was_ended(self) -> bool:
        """Whether its own end says nothing of it: it was told to end, or killed together with its wrapper."""
        return self.ended is None or self.ended.was_told


class FailureLog:
    """Takes what the ranks send, in the order in which it comes, and tells who failed when.

    A rank that raises prints its traceback at once, but may end after others that failed because of it: its time is
    that of the traceback. A failure that names another one as its cause comes after all others. A
    rank that was told to end and had printed no whole traceback has not failed: one that was stopped wakes up for its
    end, and may begin to print one.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}

    def add(self, event: Started | Written | Ended) -> None:
        rank = self._ranks.setdefault(event.rank, _Rank())
        now = time.monotonic()
        if isinstance(event, Started):
            rank.host = event.host
        elif isinstance(event, Ended):
            rank.ended, rank.ended_at = event, now - event.age_s
        elif event.is_error and any(_begins_words_of_an_end(line) for line in rank.last_lines.add(event.data)):
            rank.traceback_at = now

    def failures(self) -> list[Failure]:
        """The ranks that failed, the first one first."""
        ends = [rank.ended_at for rank in self._ranks.values() if not rank.was_ended and _code(rank) != 0]
        found = [self._failure(number, rank, min(ends, default=float("inf"))) for number, rank in self._ranks.items()]
        return sorted(
            (failure for failure in found if failure is not None),
            key=lambda failure: (failure.is_consequence, failure.time),
        )

    def have_left_preempted(self, ranks: Sequence[int]) -> bool:
        """Returns whether all of `ranks` have ended by `exit_preempted`."""
        ends = [self._ranks[rank].ended for rank in ranks if rank in self._ranks]
        return bool(ranks) and [end.code for end in ends if end is not None] == [os.EX_TEMPFAIL] * len(ranks)

    def ends(self) -> Ends:
        """Returns the ends of the ranks that have started."""
        by_time = sorted(self._ranks.items(), key=lambda item: item[1].ended_at)
        return Ends(
            [(number, rank.host) for number, rank in by_time if not rank.was_ended and _code(rank) == 0],
            [number for number, rank in by_time if rank.ended is not None and rank.ended.was_told and _code(rank) != 0],
            [number for number, rank in by_time if rank.ended is None],
            sum(rank.ended is not None and rank.ended.code == 0 for _, rank in by_time),
            self._silent_hosts(),
            sorted({rank.host for rank in self._ranks.values() if rank.ended is None}),
        )

    def _silent_hosts(self) -> list[str]:
        lost = {rank.host for rank in self._ranks.values() if rank.ended is None}
        return sorted(lost - {rank.host for rank in self._ranks.values() if rank.ended is not None})

    def _failure(self, number: int, rank: _Rank, first_end: float) -> Failure | None:
        """`first_end` is when the first rank ended by a failure of its own, whereupon the others may be told to end."""
        code, lines = _code(rank), rank.last_lines.all()
        if code == 0 or (rank.was_ended and (rank.traceback_at is None or _is_torn(lines))):
            return None
        failed_at = rank.ended_at if rank.traceback_at is None else rank.traceback_at
        is_consequence = any(line.startswith(_CONSEQUENCES) for line in lines)
        is_late = rank.was_ended and failed_at > first_end
        return Failure(number, rank.host, failed_at, code, is_consequence or is_late, _tail(lines))


def report(failures: list[Failure], names: Names = RANKS, silent_hosts: Sequence[str] = ()) -> str:
    """Returns the report of the failures, at least one: the first one, the end of what it wrote, and the ones after it.

    Ranks whose wait for another one failed are not called the first: the other one is named, and where it is.
    """
    first, *later = failures
    lines = [f"the first to fail was {first.in_words(names)}"]
    if (stall := _stall_of(first)) is not None:
        waited = [failure.rank for failure in failures if _stall_of(failure) is not None]
        where = f": {stall['where']}" if stall["where"] else ""
        lines = [f"{stall['ranks']} did not submit {stall['what']}{where}", f"{names.listed(waited)} waited for it"]
    elif later:
        lines[0] += f"; {names.listed([failure.rank for failure in later])} failed after it"
    if first.code == 128 + signal.SIGKILL:
        lines.append("was that the system, for want of memory? `dmesg | tail` says so on its host")
    lines += [f"from {host} nothing was heard any more: it may have failed before" for host in silent_hosts]
    return "\n".join([*lines, *last_lines_of(names.listed([first.rank]), first)])


def _stall_of(failure: Failure) -> re.Match[str] | None:
    return next((found for line in failure.last_lines if (found := _STALL.match(line))), None)


def last_lines_of(who: str, failure: Failure) -> list[str]:
    """Returns the last lines of `who`, which has failed, if there are any."""
    if not failure.last_lines:
        return []
    shown = [f"    {line}" for line in failure.last_lines]
    return [f"the last lines of {who} on standard error were", *shown]


def _code(rank: _Rank) -> int:
    """Returns the exit code that a shell would give."""
    if rank.ended is not None and (rank.ended.code == 0 or not rank.was_ended):
        return rank.ended.code if rank.ended.code >= 0 else 128 - rank.ended.code
    # what ended it came after its own failure; Python would have returned this
    return 1


def _begins_words_of_an_end(line: str) -> bool:
    """Whether a rank begins to say why it ends; of the failure of another rank it says no more than this line."""
    return line == _TRACEBACK or line.startswith(_CONSEQUENCES)


def _last_traceback(lines: list[str]) -> list[str]:
    starts = [index for index, line in enumerate(lines) if line == _TRACEBACK]
    if not starts:
        starts = [index for index, line in enumerate(lines) if line.startswith(_CONSEQUENCES)]
    return [line for line in lines[starts[-1] :] if not line.startswith(_NOTE)] if starts else []


def _is_torn(lines: list[str]) -> bool:
    """Whether the last traceback, if there is one, has no line for its exception."""
    traceback = _last_traceback(lines)
    return bool(traceback) and traceback[0] == _TRACEBACK and all(line.startswith(" ") for line in traceback[1:])


def _tail(lines: list[str]) -> list[str]:
    """The last traceback and what follows it, or the last lines."""
    shown = _last_traceback(lines)
    if not shown:
        return lines[-_SHOWN_LINES:]
    # both ends of a long one: where it began and what it was
    return shown if len(shown) <= 2 * _SHOWN_LINES else [*shown[:5], "...", *shown[-_SHOWN_LINES:]]


# --- jobs that ended without a failure of a rank ----------------------------------------------------------------------


def spoken(text: str, speaker: str = "ringrun") -> str:
    """`text` with the speaker's name before each line that is not indented, as quoted lines are."""
    return "\n".join(line if line.startswith(" ") else f"{speaker}: {line}" for line in text.splitlines())


def of_late_ranks(job: Job, missing: list[int], timeout_s: float, names: Names = RANKS) -> str:
    """For the ranks `missing`, at least one, that did not start within `timeout_s`."""
    remedies = [*_remedies(job), "a longer start timeout"]
    return f"{names.listed(missing)} did not start in {timeout_s:g} s; try {', or '.join(remedies)}"


def of_launcher(job: Job, code: int, missing: list[int], ends: Ends, named_hosts: Sequence[str] = ()) -> str:
    """For a launcher that ended with `code`, negative for a signal, although no rank had failed.

    Args:
        missing: the ranks that did not start.
        ends: how the others ended; if `code` is 0, not all of them with exit code 0.
        named_hosts: other hosts of lost ranks that the launcher has named in its last lines.
    """
    if code < 0:
        return f"the launcher was ended by {signal.Signals(-code).name}"
    if missing:
        remedies = _remedies(job)
        hint = f"try {', or '.join(remedies)}" if remedies else "the launcher's own words say why"
        return f"{list_of_ranks(missing)} did not start; {hint}"
    if ends.returned_0 == job.num_proc:
        return f"all ranks ended with exit code 0, but the launcher with exit code {code}"
    if ends.lost:
        lost = f"{list_of_ranks(ends.lost)} got lost: the launcher ended with exit code {code} before they did"
        has_heard = ends.early or ends.told or ends.returned_0
        hosts = ", ".join(named_hosts or (ends.silent_hosts if has_heard else []))
        if hosts:
            return f"{lost}; is {hosts} up, and the network to it?"
        if len(ends.hosts_of_lost) < 2:
            return lost
        remedy = next(iter(_remedies(job)), "")
        hint = f"; try {remedy}" if remedy else ""
        return f"{lost}. It may have lost one of its hosts {', '.join(ends.hosts_of_lost)}{hint}"
    if ends.early:
        rank, host = ends.early[0]
        return f"rank {rank} on {host} ended early with exit code 0, while the others still ran"
    if ends.told:
        return f"somebody other than ringrun told {list_of_ranks(ends.told)} to end"
    return f"the launcher ended with exit code {code} before any rank had ended"


def exit_code_of_launcher(code: int, num_proc: int, missing: list[int], ends: Ends) -> int:
    """The exit code of a job for which `of_launcher` has the words."""
    if code < 0:
        return 128 - code
    if missing or (ends.returned_0 < num_proc and (ends.lost or (ends.told and not ends.early))):
        return 1
    return code or 1


def of_preemption() -> str:
    """For a job that `exit_preempted` has ended."""
    return f"the job was preempted and has ended by exit_preempted(), with exit code {os.EX_TEMPFAIL}: start it again"


def of_unkillable(pids: list[int]) -> str:
    """For processes of this host, at least one, that outlive SIGKILL."""
    outlive = "process {} outlives" if len(pids) == 1 else "processes {} outlive"
    return f"{outlive.format(', '.join(map(str, pids)))} SIGKILL, waiting in the kernel, perhaps for a disk or a GPU"


def _remedies(job: Job) -> list[str]:
    """Returns advice for ranks that do not start, by the options of the job."""
    found = []
    if job.hosts:
        port = [] if job.ssh_port is None else ["--ssh-port", str(job.ssh_port)]
        identity = [] if job.ssh_identity_file is None else ["--ssh-identity-file", job.ssh_identity_file]
        found.append(" ".join(["ringrun -H", ",".join(map(str, job.hosts)), *port, *identity, "--check"]))
    if job.network_interfaces is not None:
        found.append(f"another network interface than {job.network_interfaces}")
    return found
