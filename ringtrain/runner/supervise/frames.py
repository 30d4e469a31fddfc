"""Reads the frames of the ranks' wrappers from the launcher's standard error, between the launcher's own lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ringtrain.runner.supervise.rank_wrapper import COUNTED, ENDED, RECORD, STARTED, STDERR, STDOUT, TOLD

_FRAME = re.compile(rb"(\d+)([stoexnOEr])(.*)", re.DOTALL)


class Written(NamedTuple):
    """A rank has written `data` to its standard output or, with `is_error`, to its standard error."""

    rank: int
    is_error: bool
    data: bytes


class Started(NamedTuple):
    """The process of a rank runs; `slurm_step` is the job step of which it is a task, if Slurm started it."""

    rank: int
    host: str
    pid: int
    slurm_step: str | None = None


class Told(NamedTuple):
    """A rank has got SIGTERM or the like."""

    rank: int


class Ended(NamedTuple):
    """The process of a rank ended `age_s` before this was sent; `code` is negative for a signal.

    `was_told` says that the launcher, or a program that signals the whole job, had told it to end.
    """

    rank: int
    code: int
    age_s: float
    was_told: bool


class Counted(NamedTuple):
    """The numbers of a rank that has left the job, as `metrics.tell_ringrun` writes them."""

    rank: int
    counts: list[float]


class Reported(NamedTuple):
    """Not from a rank, but from the starter of an elastic job."""

    report: dict[str, Any]


class LauncherSaid(NamedTuple):
    """Anything that is not a frame."""

    data: bytes


Event = Written | Started | Told | Ended | Counted | Reported | LauncherSaid
_REPORT = "r"


def frame_of_report(report: Mapping[str, object]) -> bytes:
    """For the starter of an elastic job, without the end of the line."""
    return RECORD + b"0" + _REPORT.encode() + json.dumps(report).encode()


class FrameReader:
    """Makes events of bytes as they come."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield from _events(line + b"\n")

    def close(self) -> Iterator[Event]:
        """The last line, if it has no end."""
        rest, self._rest = self._rest, b""
        if rest:
            yield from _events(rest)


def _events(line: bytes) -> Iterator[Event]:
    said, record, frame = line.partition(RECORD)
    if said:
        yield LauncherSaid(said)
    match = _FRAME.fullmatch(frame.removesuffix(b"\n"))
    if match is not None:
        yield _event(int(match[1]), match[2].decode(), match[3])
    elif record:
        yield LauncherSaid(frame)


def _event(rank: int, letter: str, payload: bytes) -> Event:
    if letter == STARTED:
        host, pid, step = payload.decode().split()
        return Started(rank, host, int(pid), None if step == "-" else step)
    if letter == TOLD:
        return Told(rank)
    if letter == ENDED:
        code, age_s, was_told = payload.decode().split()
        return Ended(rank, int(code), float(age_s), was_told == "1")
    if letter == COUNTED:
        return Counted(rank, json.loads(payload))
    if letter == _REPORT:
        return Reported(json.loads(payload))
    assert letter.lower() in (STDOUT, STDERR)
    return Written(rank, letter.lower() == STDERR, payload + b"\n" if letter.islower() else payload)
