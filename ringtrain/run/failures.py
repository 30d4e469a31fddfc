"""Which rank failed first, and the sentence that says so."""

from __future__ import annotations

import signal
import time
from typing import NamedTuple

from ringtrain.run.frames import Ended, Started, Written
from ringtrain.run.output import LastLines

_TRACEBACK = "Traceback (most recent call last):"
# What ranks raise because of another one; which of several comes first here may be an accident.
_CONSEQUENCES = (
    "ringtrain.PeerLostError",
    "ringtrain.RemoteError",
    "ringtrain.ShutDownError",
    "ringtrain.StalledError",
)
_SHOWN_LINES = 20


class Failure(NamedTuple):
    """A rank that failed; `code` is what a shell would give, 128 + signal where a signal ended it.

    `is_consequence` says that by its own words it failed because another rank did.
    """

    rank: int
    host: str
    time: float
    code: int
    is_consequence: bool
    last_lines: list[str]

    def __str__(self) -> str:
        where = f"rank {self.rank}" + (f" on {self.host}" if self.host else "")
        number = self.code - 128
        if number in signal.valid_signals():
            return f"{where}, ended by {signal.Signals(number).name} (exit code {self.code})"
        return f"{where}, with exit code {self.code}"


class _Rank:
    def __init__(self) -> None:
        self.host = ""
        self.last_lines = LastLines()
        self.traceback_at: float | None = None
        self.ended: Ended | None = None
        self.ended_at = 0.0


class FailureLog:
    """Takes what the ranks send, in the order in which it comes, and tells who failed when.

    A rank that raises prints its traceback at once, but may end after others that failed because of it: its time is
    that of the traceback. What says itself that it is the consequence of another failure comes after all others. A
    rank that was told to end and had printed no traceback has not failed.
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
        elif event.is_error and _TRACEBACK in rank.last_lines.add(event.data):
            rank.traceback_at = now

    def failures(self) -> list[Failure]:
        """The ranks that failed, the first one first."""
        found = [self._failure(number, rank) for number, rank in self._ranks.items()]
        return sorted(
            (failure for failure in found if failure is not None),
            key=lambda failure: (failure.is_consequence, failure.time),
        )

    def _failure(self, number: int, rank: _Rank) -> Failure | None:
        ended = rank.ended
        if ended is not None and ended.code == 0:
            return None
        if ended is None or ended.was_told:
            if rank.traceback_at is None:
                return None
            # what ended it came after its own failure; Python would have returned this
            code = 1
        else:
            code = ended.code if ended.code > 0 else 128 - ended.code
        failed_at = rank.ended_at if rank.traceback_at is None else rank.traceback_at
        lines = rank.last_lines.all()
        is_consequence = any(line.startswith(_CONSEQUENCES) for line in lines)
        return Failure(number, rank.host, failed_at, code, is_consequence, _tail(lines))


def report(failures: list[Failure]) -> str:
    """What to print of the failures, at least one: who was first, the end of what it wrote, and who followed."""
    first, *later = failures
    lines = [f"ringrun: the first to fail was {first}"]
    if later:
        lines[0] += f"; {list_of_ranks([failure.rank for failure in later])} failed after it"
    if first.last_lines:
        lines.append(f"ringrun: the last lines of rank {first.rank} on standard error were")
        lines += [f"    {line}" for line in first.last_lines]
    return "\n".join(lines)


def list_of_ranks(ranks: list[int]) -> str:
    """`ranks 0, 2-5`."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    texts = [str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in ranges]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def _tail(lines: list[str]) -> list[str]:
    """From the last traceback on, or the last lines."""
    starts = [index for index, line in enumerate(lines) if line == _TRACEBACK]
    if not starts:
        return lines[-_SHOWN_LINES:]
    shown = lines[starts[-1] :]
    # both ends of a long one: where it began and what it was
    return shown if len(shown) <= 2 * _SHOWN_LINES else [*shown[:5], "...", *shown[-_SHOWN_LINES:]]
