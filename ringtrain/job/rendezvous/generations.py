"""The members of each generation of an elastic job. Uses no sockets, threads or clock: time is an argument.

Each message of a process is handled in constant time, whatever their number is, but for the one that forms a generation
and the one that tells of a loss: these take time for each process. A message to all is one object.

A generation is formed when all processes that live have come for it, so there is one arbiter and no split brain. A
process lives until `lose` or `done` says otherwise. A process that comes while a generation is at work waits for the
next one, and the generation is told that there is news if it has room.

The states of a process, and what ends each of them:

waiting     It has come for the next generation. Ends when that is formed, or with the job: `Limits.timeout_s` after
            there were too few processes.
joining     It is in a generation and still in init(). Ends with `joined`. A process that does not answer for
            SILENCE_IN_INIT_S is `Stuck`, and so is one whose word the others have waited for longer than its patience.
at work     It is in a generation and init() has returned. While others that are `ready` to train wait for it, that is
            reported. They give up after their own stall_shutdown_time_s, come for the next generation, and then:
awaited     It is at work, and another process of its generation has come for the next one. It is `Stuck` when it does
            not answer for SILENCE_S, or stays away for longer than its patience.
stuck       The starter of the processes has to kill it. It is forgotten after another SILENCE_S.

A process may be retired in any of these states, since its host is no longer one of the job's, until `retire` says
otherwise. Retired processes stay in the job until enough others live and one of these has the newest state. If none of
these has it, one retired process goes with them into a generation that hands the state over, and which is told at once
that there is news. A retired process that
waits is released when the generation at work has no retired processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringtrain.job.rendezvous.columns import in_columns

# How long a process that does not answer may keep the others waiting, and then how long its starter may take to end it.
SILENCE_S = 10.0
# In init() some libraries that look for GPUs let no other thread of their process run.
SILENCE_IN_INIT_S = 30.0
_PING_S = 1.0
# A process that has not answered for so long is said not to answer.
_QUIET_S = 3.0
# A wait is reported after so many seconds, and again when it lasts twice as long, or by so much longer.
_REPORTED_AFTER_S = 5.0
_FIRST_REPORTED_AFTER_S = 15.0  # processes that start have much to import
_REPORTED_AGAIN_S = 60.0


class Limits(NamedTuple):
    """How many processes a generation has."""

    first: int  # that the first one waits for
    least: int
    most: int
    timeout_s: float  # for which there may be fewer than `least`
    reset_limit: int | None = None  # how often the job may begin another generation
    name_of_timeout: str = "--elastic-timeout"  # what the user knows `timeout_s` by


class Arrival(NamedTuple):
    """The message of a process that comes for the next generation."""

    host: str
    pid: int
    commits: int  # the more, the newer is its state
    patience_s: float  # how long it may stay away while all others wait, as long as it answers; 0: for ever
    must_keep_state: bool = False  # rather than begin anew, the job fails
    has_state: bool = False  # `committed` was said before, perhaps to a member that was lost since


class Formed(NamedTuple):
    """A generation has begun; its members by rank."""

    generation: int
    members: list[str]
    size: int


class Released(NamedTuple):
    """These are retired, and the job needs them no longer."""

    members: list[str]


class StateLost(NamedTuple):
    """There were commits, and no process of this generation has the state from training."""

    generation: int
    commits: int  # of the newest file that a process has read; 0: training begins anew


class Waiting(NamedTuple):
    """Processes have been waiting for so long."""

    generation: int  # the last one that was formed
    seconds: float
    what: str  # "processes": there are too few; "replacements": for those that are retired; or what keeps `late` ones:
    # "init", "train" (between init() and the training), "next" (they have not come for the next generation)
    late: tuple[str, ...]  # those that are waited for; all others wait
    silent: tuple[str, ...]  # of these, the ones that do not answer
    came: tuple[str, ...]  # those that wait for the next generation
    needed: int  # this many processes are needed


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
    """A process of which nothing is expected any more."""

    member: str


Event = Formed | Released | StateLost | Waiting | Left | Done | Stuck | Failed
Output = Event | Tell | Drop


class Summary(NamedTuple):
    """The history of the job until now."""

    generations: int
    seconds_lost: float  # in which a generation had been broken and the next one had not begun to train
    left: list[Left]


@dataclass
class _Member:
    arrival: Arrival
    number: int  # in the order in which they first came
    heard_s: float
    has_committed: bool = False
    last_generation: int = 0  # that it was in
    rank: int | None = None  # in the generation that was formed last
    slot: int | None = None  # among the processes of its host, from when it first has a rank to its end
    is_waiting: bool = True
    is_released: bool = False  # it was retired, and is told to end
    is_ready: bool = False  # to train with the others of the generation
    commits_to_train: int = 0  # that its state had then
    stuck_s: float | None = None  # since when


class Generations:
    """The state machine. Every method returns what is to be done now, in this order."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._members: dict[str, _Member] = {}
        self._retired: set[str] = set()  # that are to go when the job can do without them
        self._numbers = itertools.count()
        self._generation = 0
        self._chosen: list[str] = []  # of the generation, by rank
        self._busy: set[str] = set()  # of these, the ones that have not come for the next generation
        self._joining: set[str] = set()  # and of these, the ones whose init() has not returned
        self._returned: set[str] = set()  # of the generation, the ones that have come for the next
        self._has_spread_news = False  # to all of the generation
        self._is_broken = True  # until the first is formed
        self._said: dict[str, Any] = {}  # in this round of the generation
        self._ready_count = 0  # of the generation
        self._is_state_in_doubt = False  # nobody of the generation has it from training; those that are ready ask
        self._is_ending = False  # somebody is done
        self._failure: Failed | None = None
        self._has_commits = False  # some process has made one since training last began anew
        self._short_since: float | None = None  # too few processes live, without those that are retired
        self._wait = ""  # what some wait for, as Waiting.what; "": none waits
        self._wait_since = 0.0
        self._report_at = 0.0
        self._pinged_s = 0.0
        self._handovers = 0
        self._formed_s = 0.0
        self._lost_since: float | None = None  # when a generation was broken, until another one trains
        self._uses_ready = False  # a script without elastic.run never says that it is ready
        self._seconds_lost = 0.0
        self._latest_s = 0.0
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
        known.has_committed |= arrival.has_state
        self._note_away(member)
        if known.rank is not None:
            self._returned.add(member)
            self._break(now_s)
        return self._advance(now_s)

    def say(self, member: str, generation: int, value: Any, now_s: float) -> list[Output]:
        """Takes a message of a process for all others of its generation; the answer has those of all, or is "again"."""
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
            self._tell_all(self._chosen, {"kind": "heard", "values": in_columns(values)})
        return self._take()

    def joined(self, member: str, generation: int, now_s: float) -> None:
        """The init() of a process has returned."""
        known = self._members.get(member)
        if known is not None and generation == self._generation:
            known.heard_s = now_s
            self._joining.discard(member)

    def ready(self, member: str, generation: int, commits: int, is_asking: bool, now_s: float) -> list[Output]:
        """A process has called the function that trains, and waits there for the others of its generation.

        Args:
            commits: of its state, which it may have read from a file since it came.
            is_asking: it was told that its generation may have lost the state, and waits for the verdict, or "again".
        """
        known = self._members.get(member)
        if known is None:
            return self._take()
        known.heard_s, self._uses_ready = now_s, True
        if generation != self._generation or self._is_broken:
            if is_asking:
                self._tell(member, {"kind": "again"})
        elif not known.is_ready:
            known.is_ready, known.commits_to_train = True, commits
            self._ready_count += 1
            if self._ready_count == len(self._chosen):
                self._begin_to_train(now_s)
        return self._take()

    def committed(self, member: str) -> None:
        """A process has made its first commit, or has got the state from others."""
        if member in self._members:
            self._members[member].has_committed = self._has_commits = True

    def answer(self, member: str, now_s: float) -> None:
        """A process has answered a ping."""
        if member in self._members:
            self._members[member].heard_s = now_s

    def lose(self, member: str, text: str, now_s: float) -> list[Output]:
        """A process is gone."""
        self._forget(member, text, now_s)
        return self._advance(now_s)

    def done(self, member: str, now_s: float) -> list[Output]:
        """A process has come to the end of its script. No newcomers are let in from here on."""
        known = self._members.pop(member, None)
        if known is None:
            return self._take()
        self._note_away(member)
        self._output.append(Done(member))
        self._is_ending = True
        if known.rank is not None:
            self._break(now_s)
        self._dismiss([name for name, one in self._members.items() if one.rank is None])
        return self._advance(now_s)

    def hosts_changed(self, now_s: float) -> list[Output]:
        """Asks the processes at work to join when it suits them."""
        self._spread_news()
        return self._advance(now_s)

    def retire(self, members: Collection[str], now_s: float) -> list[Output]:
        """These are to go as soon as the job can do without them, and all others stay."""
        self._retired = set(members)
        return self._advance(now_s)

    def fail(self, text: str, now_s: float) -> list[Output]:
        """The job cannot go on, for a reason that its starter knows."""
        if not self._failure:
            self._fail(text)
        return self._advance(now_s)

    def tick(self, now_s: float) -> list[Output]:
        """Look at the time; several times a second."""
        self._look_at_the_short(now_s)
        self._look_at_the_late(now_s)
        output = self._advance(now_s)
        self._report_the_wait(now_s)
        return output + self._take()

    def summary(self) -> Summary:
        lost_s = self._seconds_lost
        if self._lost_since is not None:
            lost_s += max(0.0, (self._latest_s if self._uses_ready else self._formed_s) - self._lost_since)
        return Summary(self._generation, lost_s, list(self._left))

    def _take(self) -> list[Output]:
        output, self._output = self._output, []
        return output

    def _tell(self, member: str, message: dict[str, Any]) -> None:
        self._output.append(Tell(member, message))

    def _tell_all(self, members: Iterable[str], message: dict[str, Any]) -> None:
        """One object, so that the server packs it once."""
        self._output += [Tell(member, message) for member in members]

    def _note_away(self, member: str) -> None:
        """The process is not at work any more."""
        for those in (self._busy, self._joining, self._returned):
            those.discard(member)

    def _dismiss(self, members: list[str]) -> None:
        """The job ends without these."""
        for name in members:
            del self._members[name]
            self._note_away(name)
        self._tell_all(members, {"kind": "over"})

    def _forget(self, member: str, text: str, now_s: float) -> None:
        known = self._members.pop(member, None)
        if known is None:
            return
        self._note_away(member)
        self._left.append(Left(member, text))
        self._output.append(self._left[-1])
        if known.rank is not None:
            lost = {"kind": "lost", "text": f"rank {known.rank} ({member}) is gone: {text}"}
            self._tell_all(self._at_work(), lost)
            self._break(now_s)

    def _at_work(self) -> list[str]:
        """Returns the processes of the generation that have not come for the next one."""
        return [name for name in self._members if name in self._busy] if self._busy else []

    def _waiting(self) -> list[str]:
        """Returns the processes that have come and may stay in the job."""
        return [name for name, one in self._members.items() if one.is_waiting and name not in self._retired]

    def _waiting_retired(self) -> list[str]:
        """Returns the processes that have come, and stay in the job until it can do without them."""
        retired = [(name, one) for name, one in self._members.items() if one.is_waiting and name in self._retired]
        return [name for name, one in retired if one.last_generation > 0 and not one.is_released]

    def _break(self, now_s: float) -> None:
        """Not all of the generation are in it any more, so those who have said something get no other answer."""
        if not self._is_broken:
            self._is_broken = True
            if self._lost_since is not None and not self._uses_ready:
                self._seconds_lost += self._formed_s - self._lost_since
                self._lost_since = None
            self._lost_since = now_s if self._lost_since is None else self._lost_since
        asking = [name for name in self._at_work() if self._members[name].is_ready] if self._is_state_in_doubt else []
        self._tell_all([*(one for one in self._said if one in self._members), *asking], {"kind": "again"})
        self._said, self._is_state_in_doubt = {}, False

    def _spread_news(self) -> None:
        if not self._has_spread_news:
            self._has_spread_news = True
            self._tell_all(self._at_work(), {"kind": "news"})

    def _enough(self) -> int:
        if self._is_ending:
            return 1
        return self._limits.first if self._generation == 0 else self._limits.least

    def _advance(self, now_s: float) -> list[Output]:
        """Form a generation, or find out what it waits for."""
        self._latest_s = now_s
        if not self._failure and not self._busy:
            chosen = self._choice()
            if chosen:
                self._form(chosen, now_s)
        if not self._failure and self._may_have_others():
            self._spread_news()
        if self._busy and self._retired and not self._has_retired(self._chosen):
            self._release()
        self._note_short(now_s)
        self._note_wait(now_s)
        return self._take()

    def _choice(self) -> list[str]:
        """Chooses the members of the next generation, by rank, among those that have come; none if too few have."""
        if len(self._members) - len(self._busy) < self._enough():
            return []
        others, retired = self._waiting(), self._waiting_retired()
        if len(others) >= self._enough():
            newest = self._in_order(retired)[:1]
            if newest and self._newest_commits(newest) > self._newest_commits(others):
                most = max(self._limits.most, 2)  # one that has the state and one that gets it
                return self._beside_each_other([*newest, *self._in_order(others)][:most])
            return self._beside_each_other(self._in_order(others)[: self._limits.most])
        if retired and len(others) + len(retired) >= self._enough():
            return self._beside_each_other(self._in_order([*others, *retired])[: self._limits.most])
        return []

    def _may_have_others(self) -> bool:
        """Whether the generation at work should end for another one: there is room, or retired members may go."""
        if self._is_ending or not self._busy:
            return False
        if self._has_retired(self._busy):
            return self._stay_count() >= self._enough()
        has_waiting = bool(self._waiting()) if self._retired else len(self._members) > len(self._busy)
        return len(self._busy) < self._limits.most and has_waiting

    def _has_retired(self, members: Collection[str]) -> bool:
        return bool(self._retired) and any(name in self._retired for name in members)

    def _stay_count(self) -> int:
        return sum(name not in self._retired for name in self._members)

    def _form(self, chosen: list[str], now_s: float) -> None:
        limit = self._limits.reset_limit
        if limit is not None and self._generation - self._handovers > limit:
            self._fail(f"the job has begun another generation {limit} times, which is the reset limit")
            return
        may_have_lost_state = self._has_commits and not any(map(self._has_state, chosen))
        if may_have_lost_state and self._is_ending:
            self._dismiss(list(self._members))  # others have completed the training
            return
        has_newcomers = any(self._members[name].rank is None for name in chosen)
        is_as_before = set(self._chosen) <= set(chosen)  # none was lost, and yet the last one has ended
        for one in self._members.values():
            one.rank = None
        self._generation += 1
        for rank, name in enumerate(chosen):
            one = self._members[name]
            one.rank, one.last_generation = rank, self._generation
            one.is_waiting = one.is_ready = False
        self._assign_slots(chosen)
        self._chosen, self._is_broken, self._said = chosen, False, {}
        self._busy, self._joining, self._returned = set(chosen), set(chosen), set()
        self._has_spread_news = False
        self._formed_s, self._ready_count = now_s, 0
        lost_s = self._seconds_lost + (0.0 if self._lost_since is None else now_s - self._lost_since)
        world = {
            "kind": "world",
            "generation": self._generation,
            "size": len(chosen),
            "has_newcomers": has_newcomers,
            "may_be_cut": self._generation > 1 and (has_newcomers or is_as_before),
            "may_have_lost_state": may_have_lost_state,
            "seconds_lost": lost_s,
        }
        for rank, name in enumerate(chosen):
            self._tell(name, {**world, "rank": rank, "slot": self._members[name].slot})
        self._handovers += self._has_retired(chosen) and self._stay_count() >= self._enough()
        self._output.append(Formed(self._generation, list(chosen), len(chosen)))
        self._is_state_in_doubt = may_have_lost_state

    def _release(self) -> None:
        """The generation has no retired processes that hand over the state or fill a gap, so the job needs none."""
        released = self._waiting_retired()
        for name in released:
            self._members[name].is_released = True
        if released:
            self._output.append(Released(released))

    def _has_state(self, name: str) -> bool:
        """Whether it has it from training, not from a file."""
        one = self._members[name]
        return one.has_committed and one.arrival.commits > 0

    def _newest_commits(self, names: list[str]) -> int:
        return max(self._members[name].arrival.commits for name in names)

    def _in_order(self, waiting: list[str]) -> list[str]:
        """The newest state first, then by their ranks before."""

        def newest(name: str) -> tuple[int, bool, int, int, int]:
            one = self._members[name]
            return -one.arrival.commits, one.rank is None, one.rank or 0, _number_in(name), one.number

        return sorted(waiting, key=newest)

    def _beside_each_other(self, ordered: list[str]) -> list[str]:
        """Groups processes by host, in the order of the first of each host."""
        hosts = {host: place for place, host in reversed(list(enumerate(map(self._host, ordered))))}
        return sorted(ordered, key=lambda name: hosts[self._host(name)])

    def _assign_slots(self, chosen: list[str]) -> None:
        """Gives those without a slot the one of a process of their host that was lost, or the next one."""
        taken: dict[str, set[int]] = {}
        for one in self._members.values():
            if one.slot is not None:
                taken.setdefault(one.arrival.host, set()).add(one.slot)
        free: dict[str, Iterator[int]] = {}
        for member in (self._members[name] for name in chosen):
            if member.slot is None:
                host = member.arrival.host
                slots = free.setdefault(
                    host, itertools.filterfalse(taken.get(host, set()).__contains__, itertools.count())
                )
                member.slot = next(slots)

    def _host(self, name: str) -> str:
        return self._members[name].arrival.host

    def _begin_to_train(self, now_s: float) -> None:
        """All members of the generation are ready."""
        if self._is_state_in_doubt:
            self._is_state_in_doubt = False
            self._judge_state()
        if self._lost_since is not None and not self._failure:
            self._seconds_lost += now_s - self._lost_since
            self._lost_since = None
            self._tell_all(self._chosen, {"kind": "begun", "seconds_lost": self._seconds_lost})

    def _judge_state(self) -> None:
        """Nobody has it from training: the training goes on from a file, begins anew, or ends."""
        members = [self._members[name] for name in self._chosen]
        commits = max(one.commits_to_train for one in members)
        if commits == 0 and any(one.arrival.must_keep_state for one in members):
            self._fail(
                "no process has the state any more, and training must not begin anew (on_state_lost=fail): start the "
                "job again, with state.save_to() for the next time"
            )
            return
        self._has_commits = False
        self._output.append(StateLost(self._generation, commits))
        self._tell_all(self._chosen, {"kind": "verdict", "commits": commits})

    def _fail(self, text: str) -> None:
        self._failure = Failed(text)
        self._tell_all(self._members, {"kind": "failed", "text": text})
        self._output.append(self._failure)

    # --- too few processes --------------------------------------------------------------------------------------------

    def _note_short(self, now_s: float) -> None:
        """Too few is what has come where nobody is at work, and what may stay where retired ones are."""
        if self._failure or (self._is_ending and not self._members):
            is_short = False
        elif self._busy:
            is_short = self._has_retired(self._busy) and self._stay_count() < self._enough()
        else:
            is_short = True
        if not is_short:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now_s

    def _look_at_the_short(self, now_s: float) -> None:
        if self._short_since is None or now_s - self._short_since < self._limits.timeout_s:
            return
        waiting = self._waiting()
        if self._generation == 0 and len(waiting) >= self._limits.least:
            self._form(self._beside_each_other(self._in_order(waiting)[: self._limits.most]), now_s)
            return
        least, seconds = self._limits.least, f"{self._limits.timeout_s:g} s ({self._limits.name_of_timeout})"
        if self._busy:
            self._fail(f"{_processes(self._stay_count())} of at least {least} have been on named hosts for {seconds}")
        else:
            self._fail(f"{_processes(len(waiting))} of at least {least} have come in {seconds}")

    # --- processes that keep the others waiting -----------------------------------------------------------------------

    def _note_wait(self, now_s: float) -> None:
        what = self._what_is_awaited()
        if what == self._wait:
            return
        is_start = self._generation == 0
        self._wait, self._wait_since = what, now_s
        self._report_at = now_s + (_FIRST_REPORTED_AFTER_S if is_start else _REPORTED_AFTER_S)

    def _what_is_awaited(self) -> str:
        if self._failure or (self._is_ending and not self._members):
            return ""
        if not self._busy:
            return "processes"
        if self._returned:
            return "next"
        if self._said or self._joining:
            return "init"
        if 0 < self._ready_count < len(self._chosen):
            return "train"
        return "replacements" if self._short_since is not None else ""  # all of them go on

    def _late(self) -> list[str]:
        """Returns the processes that the others wait for."""
        at_work = self._at_work()
        if self._wait == "next":
            return at_work
        if self._wait == "init":
            said = self._said
            return [name for name in at_work if (name not in said if said else name in self._joining)]
        if self._wait == "train":
            return [name for name in at_work if not self._members[name].is_ready]
        if self._wait == "replacements":
            return [name for name in at_work if name in self._retired]
        return []

    def _look_at_the_late(self, now_s: float) -> None:
        """Whether they answer, and whether they have been away for too long."""
        late = self._late()
        if late and self._wait != "replacements" and now_s - self._pinged_s >= _PING_S:
            self._pinged_s = now_s
            self._tell_all(late, {"kind": "ping"})
        if self._wait == "replacements" or (self._wait == "train" and not self._is_state_in_doubt):
            return  # the others have a deadline of their own
        for name in late:
            one = self._members[name]
            # what a script does between init() and the training may keep it from answering
            longest_s = {"init": SILENCE_IN_INIT_S, "next": SILENCE_S}.get(self._wait, float("inf"))
            is_silent = self._silent_s(name, now_s) > longest_s
            # ranks that connect to each other have deadlines of their own
            is_patience_over = 0 < one.arrival.patience_s < now_s - self._wait_since
            is_late = is_patience_over and (self._wait != "init" or bool(self._said))
            if one.stuck_s is None and (is_silent or is_late):
                one.stuck_s = now_s
                self._output.append(Stuck(name))
            elif one.stuck_s is not None and now_s - one.stuck_s > SILENCE_S:
                self._output.append(Drop(name))
                self._forget(name, "it did not come to the generation that all others waited for", now_s)

    def _silent_s(self, name: str, now_s: float) -> float:
        return now_s - max(self._members[name].heard_s, self._wait_since)

    def _report_the_wait(self, now_s: float) -> None:
        if not self._wait or now_s < self._report_at:
            return
        waited_s = now_s - self._wait_since
        self._report_at = now_s + min(max(waited_s, _REPORTED_AFTER_S), _REPORTED_AGAIN_S)
        late = self._late()
        silent = [name for name in late if self._silent_s(name, now_s) > _QUIET_S]
        if self._wait == "replacements":
            silent = []
        if self._wait == "init" and not self._said:
            late = silent  # the others may have much to prepare
            if not late:
                return
        if self._wait == "train":
            self._tell_all(late, {"kind": "awaited", "seconds": waited_s})
        here = self._waiting() if self._wait == "processes" else []
        needed = max(0, self._enough() - (len(here) if self._wait == "processes" else self._stay_count()))
        came = tuple(name for name, one in self._members.items() if one.is_waiting)
        self._output.append(Waiting(self._generation, waited_s, self._wait, tuple(late), tuple(silent), came, needed))


def _number_in(member: str) -> int:
    """Returns the number that the starter has given to this process: the part of its name behind the last slash."""
    number = member.rpartition("/")[2]
    return int(number) if number.isdecimal() else 0


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
