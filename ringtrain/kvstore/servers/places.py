"""A place in a job, and the process that has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Place(NamedTuple):
    role: str
    number: int


@dataclass
class Process:
    """`member` is its connection."""

    member: int
    host: str
    pid: int
    attempt: int
    addresses: list[list[Any]]  # host and port of its server, several with several interfaces; none: it has no server
    waits_until_s: float  # for the others to come
    heartbeat_s: float
    came_s: float
    heard_s: float
    term: int = 0  # how many processes had the place before
    is_recovery: bool = False
    is_done: bool = False
    lost_s: float | None = None
    text: str = ""  # of what it was lost
    snapshot_age_s: float | None = None  # of a server that goes on from one: how old that was
    is_announced: bool = False  # whether the others know that it is lost

    @staticmethod
    def of(member: int, message: dict[str, Any], now_s: float) -> Process:
        """Of what it says when it comes."""
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
        """Whether the others have waited long enough for another one in its place."""
        return self.may_come_back() and self.lost_s is not None and now_s - self.lost_s > rejoin_s

    def is_dead(self, now_s: float, silent_s: float) -> bool:
        return not self.is_done and (self.lost_s is not None or now_s - self.heard_s > silent_s)

    def name(self) -> str:
        return f"{self.host}, pid {self.pid}"


def in_words(place: Place, process: Process) -> str:
    return f"{place.role} {place.number} ({process.name()})"
