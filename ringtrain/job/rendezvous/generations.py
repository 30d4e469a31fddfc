"""Who belongs to each generation of an elastic job. Knows no sockets, no threads and no clock: time is an argument.

A generation is formed when all processes that live have come for it, so there is one arbiter and no split brain. A
process lives until `lose` or `done` says otherwise. Who comes while a generation is at work waits for the next one,
and the generation is told that there is news if it has room.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

# How long a process that does not answer may keep the others waiting, and then how long whoever ends it may take.
SILENCE_S = 10.0
_PING_S = 1.0


class Limits(NamedTuple):
    """How many processes a generation has."""

    first: int  # that the first one waits for
    least: int
    most: int
    timeout_s: float  # for which there may be fewer than `least`
    reset_limit: int | None = None  # how often the job may begin another generation


class Arrival(NamedTuple):
    """What a process says when it comes for the next generation."""

    host: str
    pid: int
    commits: int  # the more, the newer is its state
    patience_s: float  # how long it may stay away while all others wait, as long as it answers; 0: for ever


class Formed(NamedTuple):
    """A generation has begun; its members by rank."""

    generation: int
    members: list[str]
    size: int


class Left(NamedTuple):
    """A process is gone before it was done."""

    member: str
    text: str


class Done(NamedTuple):
    """The script of a process has ended well."""

    member: str


class Stuck(NamedTuple):
    """A process lives, but does not come to the generation that all others wait for: end it."""

    member: str


class Failed(NamedTuple):
    """The job cannot go on."""

    text: str


class Tell(NamedTuple):
    """To be sent to a process."""

    member: str
    message: dict[str, Any]


class Drop(NamedTuple):
    """A process of which nobody expects anything any more."""

    member: str


Event = Formed | Left | Done | Stuck | Failed
Output = Event | Tell | Drop


class Summary(NamedTuple):
    """What has happened until now."""

    generations: int
    seconds_lost: float  # in which a generation had been broken and the next one not begun
    left: list[Left]


@dataclass
class _Member:
    arrival: Arrival
    number: int  # in the order in which they first came
    heard_s: float
    rank: int | None = None  # in the generation that was formed last
    slot: int | None = None  # among the processes of its host, from when it first has a rank to its end
    is_waiting: bool = True
    has_news: bool = False
    stuck_s: float | None = None  # since when


class Generations:
    """The state machine. Every method returns what is to be done now, in this order."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._members: dict[str, _Member] = {}
        self._retired: set[str] = set()  # for which there is no place in later generations
        self._numbers = itertools.count()
        self._generation = 0
        self._chosen: list[str] = []  # of the generation, by rank
        self._is_broken = True  # until the first is formed
        self._said: dict[str, Any] = {}  # in this round of the generation
        self._is_ending = False  # somebody is done
        self._failure: Failed | None = None
        self._short_since: float | None = None  # nobody is at work, and too few wait
        self._awaited_since: float | None = None  # some of the generation wait for the others of it
        self._pinged_s = 0.0
        self._broken_s: float | None = None
        self._seconds_lost = 0.0
        self._left: list[Left] = []
        self._output: list[Output] = []

    def come(self, member: str, arrival: Arrival, now_s: float) -> list[Output]:
        """A process has come for the next generation, or again for another one."""
        known = self._members.get(member)
        if known is None and (self._failure or self._is_ending):
            self._tell(member, {"kind": "failed", "text": self._failure.text} if self._failure else {"kind": "over"})
            return self._take()
        if known is None:
            known = self._members[member] = _Member(arrival, next(self._numbers), now_s)
        known.arrival, known.heard_s, known.is_waiting, known.stuck_s = arrival, now_s, True, None
        if known.rank is not None:
            self._break(now_s)
        return self._advance(now_s)

    def say(self, member: str, generation: int, value: Any, now_s: float) -> list[Output]:
        """What a process has to tell all others of its generation; the answer is what all have said, or "again"."""
        known = self._members.get(member)
        if known is None:
            return self._take()
        known.heard_s = now_s
        if generation != self._generation or self._is_broken:
            self._tell(member, {"kind": "again"})
            return self._take()
        self._said[member] = value
        if len(self._said) == len(self._chosen):
            values = [self._said[one] for one in self._chosen]
            self._said = {}
            for one in self._chosen:
                self._tell(one, {"kind": "heard", "values": values})
        return self._take()

    def answer(self, member: str, now_s: float) -> None:
        """A process has answered a ping."""
        if member in self._members:
            self._members[member].heard_s = now_s

    def lose(self, member: str, text: str, now_s: float) -> list[Output]:
        """A process is gone."""
        self._forget(member, text, now_s)
        return self._advance(now_s)

    def done(self, member: str, now_s: float) -> list[Output]:
        """A process has come to the end of its script. Nobody new is let in any more."""
        known = self._members.pop(member, None)
        if known is None:
            return self._take()
        self._output.append(Done(member))
        self._is_ending = True
        if known.rank is not None:
            self._break(now_s)
        for spare in [name for name, one in self._members.items() if one.rank is None]:
            del self._members[spare]
            self._tell(spare, {"kind": "over"})
        return self._advance(now_s)

    def hosts_changed(self, now_s: float) -> list[Output]:
        """Those at work are to come when it suits them."""
        self._spread_news()
        return self._advance(now_s)

    def retire(self, members: Collection[str], now_s: float) -> list[Output]:
        """These are to go: the generation is told that there is news, and the next one is formed without them."""
        self._retired.update(members)
        if any(member in self._at_work() for member in members):
            self._spread_news()
        return self._advance(now_s)

    def tick(self, now_s: float) -> list[Output]:
        """Look at the time; several times a second."""
        self._look_at_the_short(now_s)
        self._look_at_the_awaited(now_s)
        return self._advance(now_s)

    def summary(self) -> Summary:
        return Summary(self._generation, self._seconds_lost, list(self._left))

    def _take(self) -> list[Output]:
        output, self._output = self._output, []
        return output

    def _tell(self, member: str, message: dict[str, Any]) -> None:
        self._output.append(Tell(member, message))

    def _forget(self, member: str, text: str, now_s: float) -> None:
        known = self._members.pop(member, None)
        if known is None:
            return
        self._left.append(Left(member, text))
        self._output.append(self._left[-1])
        if known.rank is not None:
            for other in self._at_work():
                self._tell(other, {"kind": "lost", "text": f"rank {known.rank} ({member}) is gone: {text}"})
            self._break(now_s)

    def _at_work(self) -> list[str]:
        """Those of the generation that have not come for the next one."""
        return [name for name, one in self._members.items() if not one.is_waiting]

    def _waiting(self) -> list[str]:
        """Those who have come, and may have a place in the next generation."""
        return [name for name, one in self._members.items() if one.is_waiting and name not in self._retired]

    def _break(self, now_s: float) -> None:
        """Not all of the generation are in it any more, so those who have said something get no other answer."""
        if not self._is_broken:
            self._is_broken, self._broken_s = True, now_s
        for member in [one for one in self._said if one in self._members]:
            self._tell(member, {"kind": "again"})
        self._said = {}

    def _spread_news(self) -> None:
        for name in self._at_work():
            if not self._members[name].has_news:
                self._members[name].has_news = True
                self._tell(name, {"kind": "news"})

    def _enough(self) -> int:
        if self._is_ending:
            return 1
        return self._limits.first if self._generation == 0 else self._limits.least

    def _advance(self, now_s: float) -> list[Output]:
        """Form a generation, or find out what it waits for."""
        at_work, waiting = self._at_work(), self._waiting()
        if self._failure or (self._is_ending and not self._members):
            self._short_since = self._awaited_since = None
        elif at_work:
            self._short_since = None
            has_one_of_it = any(one.is_waiting and one.rank is not None for one in self._members.values())
            if not has_one_of_it:
                self._awaited_since = None
            elif self._awaited_since is None:
                self._awaited_since = now_s
            if waiting and len(at_work) < self._limits.most and not self._is_ending:
                self._spread_news()
        elif len(waiting) >= self._enough():
            self._form(waiting, now_s)
        else:
            self._awaited_since = None
            self._short_since = now_s if self._short_since is None else self._short_since
        return self._take()

    def _form(self, waiting: list[str], now_s: float) -> None:
        limit = self._limits.reset_limit
        if limit is not None and self._generation > limit:
            self._fail(f"the job has begun another generation {limit} times, which is the reset limit")
            return
        chosen = self._in_order(waiting)[: self._limits.most]
        has_newcomers = any(self._members[name].rank is None for name in chosen)
        is_as_before = set(self._chosen) <= set(chosen)  # nobody was lost, and yet the last one has ended
        for one in self._members.values():
            one.rank = None
        for rank, name in enumerate(chosen):
            one = self._members[name]
            one.rank, one.is_waiting, one.has_news = rank, False, False
            one.slot = self._free_slot(one.arrival.host) if one.slot is None else one.slot
        self._generation += 1
        self._chosen, self._is_broken, self._said = chosen, False, {}
        self._short_since = self._awaited_since = None
        if self._broken_s is not None:
            self._seconds_lost += now_s - self._broken_s
            self._broken_s = None
        world = {
            "kind": "world",
            "generation": self._generation,
            "size": len(chosen),
            "has_newcomers": has_newcomers,
            "may_be_cut": self._generation > 1 and (has_newcomers or is_as_before),
            "seconds_lost": self._seconds_lost,
        }
        for rank, name in enumerate(chosen):
            self._tell(name, {**world, "rank": rank, "slot": self._members[name].slot})
        self._output.append(Formed(self._generation, list(chosen), len(chosen)))

    def _in_order(self, waiting: list[str]) -> list[str]:
        """The newest state first, then by their ranks before; those of a host beside each other."""

        def newest(name: str) -> tuple[int, bool, int, int, int]:
            one = self._members[name]
            return -one.arrival.commits, one.rank is None, one.rank or 0, _number_in(name), one.number

        ordered = sorted(waiting, key=newest)[: self._limits.most]
        hosts = {host: place for place, host in reversed(list(enumerate(map(self._host, ordered))))}
        return sorted(ordered, key=lambda name: hosts[self._host(name)])

    def _free_slot(self, host: str) -> int:
        """Where a process of that host was lost, or the next one."""
        taken = {one.slot for one in self._members.values() if one.arrival.host == host}
        return next(slot for slot in itertools.count() if slot not in taken)

    def _host(self, name: str) -> str:
        return self._members[name].arrival.host

    def _fail(self, text: str) -> None:
        self._failure = Failed(text)
        self._short_since = self._awaited_since = None
        for name in self._members:
            self._tell(name, {"kind": "failed", "text": text})
        self._output.append(self._failure)

    def _look_at_the_short(self, now_s: float) -> None:
        if self._short_since is None or now_s - self._short_since < self._limits.timeout_s:
            return
        waiting = self._waiting()
        if self._generation == 0 and len(waiting) >= self._limits.least:
            self._form(waiting, now_s)
            return
        self._fail(
            f"{_processes(len(waiting))} of at least {self._limits.least} have come in {self._limits.timeout_s:g} s "
            "(--elastic-timeout)"
        )

    def _look_at_the_awaited(self, now_s: float) -> None:
        """Those that keep the others waiting: whether they answer, and whether they have been away for too long."""
        if self._awaited_since is None:
            return
        is_ping_due = now_s - self._pinged_s >= _PING_S
        for name in self._at_work():
            one = self._members[name]
            if is_ping_due:
                self._pinged_s = now_s
                self._tell(name, {"kind": "ping"})
            is_silent = now_s - max(one.heard_s, self._awaited_since) > SILENCE_S
            is_late = 0 < one.arrival.patience_s < now_s - self._awaited_since
            if one.stuck_s is None and (is_silent or is_late):
                one.stuck_s = now_s
                self._output.append(Stuck(name))
            elif one.stuck_s is not None and now_s - one.stuck_s > SILENCE_S:
                self._output.append(Drop(name))
                self._forget(name, "it did not come to the generation that all others waited for", now_s)


def _number_in(member: str) -> int:
    """That which whoever starts the processes has given to this one: what is behind the last slash of its name."""
    number = member.rpartition("/")[2]
    return int(number) if number.isdecimal() else 0


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
