"""Which processes an elastic job should have, and where. Starts nothing and uses no clock: the time is an argument.

A host has slots. In each is at most one process; one that ends too early is replaced, by another with a new number. A
slot whose processes fail again and again makes its host one that is given up: it gets no more processes, for a time or
for ever. Processes that still run there go on.

The states of a process: it is *running*; *leaving* when its slot is no longer named, and running again when the slot is
named again before the process was told to end; *ending* from then on, until `ended` or `lost`. The job decides how long
a process is leaving, the launcher's grace how long it is ending.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ringtrain.runner.hosts import Host

# So often within that time a process is replaced, or the agent of a host.
RESTARTS = 3
WITHIN_S = 60.0
# How long a host is left alone whose agent has ended: maybe it has only just begun to be there, or is on its way out.
_PAUSES_S = (1.0, 5.0, 15.0)


class Process(NamedTuple):
    """`number` is its own, and never given again."""

    number: int
    host: str
    slot: int


class Changes(NamedTuple):
    """The consequences of new hosts: the processes that are to leave, each once, and those that may stay after all."""

    leaving: list[Process]
    staying: list[Process]


class _Host:
    def __init__(self) -> None:
        self.slots = 0  # none: it is not there any more
        self.failures: dict[int, list[float]] = {}  # of each slot
        self.losses: list[float] = []  # of its agent
        self.closed_until = 0.0
        self.times_given_up = 0


class Fleet:
    """One thread."""

    def __init__(self, first: int, most: float, cooldown_s: tuple[float, float] | None = None):
        """
        Args:
            first: how many processes the job begins with.
            most: how many a generation has; as many again may wait, so that one is there at once where one is lost.
            cooldown_s: for how long a host is given up, the first time and at most; it doubles. None: for ever.
        """
        self._limit: float = first
        self._most = most
        self._cooldown_s = cooldown_s
        self._next = 0
        self._hosts: dict[str, _Host] = {}
        self._running: dict[int, Process] = {}
        self._leaving: set[int] = set()
        self._ending: set[int] = set()  # of those that are leaving

    @property
    def running(self) -> list[Process]:
        """Those whose end nobody has told of."""
        return list(self._running.values())

    def is_running(self, number: int) -> bool:
        return number in self._running

    def begun(self) -> None:
        """The first generation is there: now there may be more processes."""
        self._limit = 2 * self._most

    def set_hosts(self, hosts: Sequence[Host]) -> Changes:
        """These are the hosts now."""
        slots = {host.name: host.slots for host in hosts}
        for name in slots:
            self._hosts.setdefault(name, _Host())
        for name, known in self._hosts.items():
            was_there, known.slots = known.slots > 0, slots.get(name, 0)
            if not was_there and known.slots > 0:
                # whatever was wrong with it belongs to its former life
                known.failures, known.losses, known.closed_until, known.times_given_up = {}, [], 0.0, 0
        nowhere = {number for number, one in self._running.items() if one.slot >= self._hosts[one.host].slots}
        leaving, staying = nowhere - self._leaving, self._leaving - self._ending - nowhere
        self._leaving = (self._leaving | leaving) - staying
        return Changes(*([self._running[number] for number in sorted(numbers)] for numbers in (leaving, staying)))

    def end(self, number: int) -> None:
        """The process is told to end, which cannot be taken back."""
        self._leaving.add(number)
        self._ending.add(number)

    def has(self, host: str) -> bool:
        """Whether the host is one of those that were named last."""
        return host in self._hosts and self._hosts[host].slots > 0

    def start(self, now: float) -> list[Process]:
        """Processes that are missing; they count as running from now on."""
        left = self._limit - len(self._running.keys() - self._leaving)
        started: list[Process] = []
        for host, slot in self._free_slots(closed_until=now):
            if left < 1:
                break
            started.append(Process(self._next, host, slot))
            self._running[self._next] = started[-1]
            self._next += 1
            left -= 1
        return started

    def ended(self, number: int, now: float, has_failed: bool) -> bool:
        """A process has ended. Returns whether its host is given up for that."""
        process = self._running.pop(number)
        is_expected = number in self._ending
        self._leaving.discard(number)
        self._ending.discard(number)
        if is_expected or not has_failed:
            return False
        host = self._hosts[process.host]
        failures = host.failures.setdefault(process.slot, [])
        return self._fail(host, failures, now)

    def lost(self, name: str, now: float) -> bool:
        """The agent of a host has ended, and all of its processes with it. Returns whether the host is given up."""
        for process in [one for one in self._running.values() if one.host == name]:
            del self._running[process.number]
            self._leaving.discard(process.number)
            self._ending.discard(process.number)
        host = self._hosts[name]
        is_given_up = self._fail(host, host.losses, now)
        if not is_given_up:
            host.closed_until = max(host.closed_until, now + _PAUSES_S[len(host.losses) - 1])
        return is_given_up

    def closed_for_s(self, name: str, now: float) -> float:
        """How long the host gets no more processes."""
        return self._hosts[name].closed_until - now

    def most_from_now_on(self) -> float:
        """How many processes there may be if no other host comes."""
        stay = len(self._running.keys() - self._leaving)
        return stay + sum(1 for _ in self._free_slots(closed_until=sys.float_info.max))

    def _free_slots(self, closed_until: float) -> Iterable[tuple[str, int]]:
        """By host, then by slot; of hosts that are closed until then at most."""
        taken = {(process.host, process.slot) for process in self._running.values()}
        for name, host in self._hosts.items():
            if host.closed_until <= closed_until:
                yield from ((name, slot) for slot in range(host.slots) if (name, slot) not in taken)

    def _fail(self, host: _Host, failures: list[float], now: float) -> bool:
        failures[:] = [*(at for at in failures if at > now - WITHIN_S), now]
        if len(failures) <= RESTARTS:
            return False
        failures.clear()
        host.closed_until = now + self._cooldown_of(host)
        host.times_given_up += 1
        return True

    def _cooldown_of(self, host: _Host) -> float:
        if self._cooldown_s is None:
            return math.inf
        shortest, longest = self._cooldown_s
        return min(longest, shortest * 2.0**host.times_given_up)
