"""Starts the processes of an elastic job, and others in their place, until the job is over.

The starter serves the rendezvous, has an agent on each host, and decides alone how the job ends.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ringtrain.job.rendezvous.elastic_server import ElasticServer
from ringtrain.job.rendezvous.generations import (
    Done,
    Event,
    Failed,
    Formed,
    Left,
    Limits,
    Released,
    StateLost,
    Stuck,
    Waiting,
)
from ringtrain.options import horovod_variables
from ringtrain.runner.hosts import Host
from ringtrain.runner.job import ElasticTerms
from ringtrain.runner.start.links import Link
from ringtrain.runner.start.placement import DiscoveryError, Placement
from ringtrain.runner.start.starter import (
    JobLog,
    Starter,
    end_of,
    processes,
    report_to_ringrun,
    say,
    waiting_in_words,
)
from ringtrain.runner.supervise.end_rule import MAX_GRACE_S

# --- which processes an elastic job should have, and where ------------------------------------------------------------


# A slot or an agent is restarted at most RESTARTS times per WITHIN_S.
RESTARTS = 3
WITHIN_S = 60.0
# How long a host is left alone whose agent has ended: maybe it has only just begun to be there, or is on its way out.
_PAUSES_S = (1.0, 5.0, 15.0)


class Process(NamedTuple):
    """`number` is unique and never reused."""

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
    """Which processes the job should have, and where. Starts nothing and uses no clock: the time is an argument.

    A host has slots. In each is at most one process; one that ends too early is replaced by another with a new number.
    A slot whose processes fail again and again makes its host one that is given up: the host gets no more processes,
    for a time or for ever. Processes that still run there go on.

    The states of a process: *running*; *leaving* when its slot is not named any more, and running again when the slot
    is named again before the process was told to end; *ending* from then on, until `ended` or `lost`. The job decides
    how long a process is leaving, the grace of the launcher how long it is ending.

    For one thread.
    """

    def __init__(
        self, first: int, most: float, cooldown_s: tuple[float, float] | None = None, *, has_spares: bool = True
    ):
        """
        Args:
            first: how many processes the job begins with.
            most: how many a generation has.
            cooldown_s: for how long a host is given up, the first time and at most; it doubles. None: for ever.
            has_spares: whether as many again may wait, so that one is there at once where one is lost.
        """
        self._limit: float = first
        self._most = 2 * most if has_spares else most
        self._cooldown_s = cooldown_s
        self._next = 0
        self._hosts: dict[str, _Host] = {}
        self._running: dict[int, Process] = {}
        self._leaving: set[int] = set()
        self._ending: set[int] = set()  # of those that are leaving

    @property
    def running(self) -> list[Process]:
        """Processes not known to have ended."""
        return list(self._running.values())

    def is_running(self, number: int) -> bool:
        return number in self._running

    def begun(self) -> None:
        """The first generation is there: now there may be more processes."""
        self._limit = self._most

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


# --- the starter ------------------------------------------------------------------------------------------------------

News = Event | list[Host] | DiscoveryError
_NO_LIMIT = 1 << 30


def member_of(process: Process) -> str:
    """The name by which the rendezvous knows it."""
    return f"{process.host}/{process.number}"


class Mail:
    """News from other threads for the one that reads."""

    def __init__(self) -> None:
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self.wake_up, self._wake_up_end = os.pipe()
        for descriptor in (self.wake_up, self._wake_up_end):
            os.set_blocking(descriptor, False)

    def put(self, news: News) -> None:
        self._news.put(news)
        with self._closing, contextlib.suppress(BlockingIOError):  # it will wake up
            if self._wake_up_end >= 0:
                os.write(self._wake_up_end, b"\0")

    def take(self) -> list[News]:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_up, 4096)
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._news.get_nowait())
        return taken

    def close(self) -> None:
        """Nothing reads here any more; what is put later is lost."""
        with self._closing:
            os.close(self.wake_up)
            os.close(self._wake_up_end)
            self._wake_up_end = -1


class Driver:
    """Takes the place of ringrun where the driver of an engine runs a starter itself, and keeps its reports."""

    def __init__(self, say: Callable[[str], None], name_of_least: str):
        """`name_of_least`: by which the user has said how many ranks the job needs."""
        self.say = say
        self.name_of_least = name_of_least
        self.generation: list[int] = []  # numbers of its processes by rank
        self.last_lines: list[str] = []

    def report(self, report: Mapping[str, Any]) -> None:
        self.generation = report.get("generation", self.generation)
        if "last" in report:
            self.last_lines.append(report["last"])


class ElasticStarter(Starter[str]):
    """Finds an agent by the name of its host. One thread."""

    def __init__(
        self,
        fleet: Fleet,
        server: ElasticServer,
        mail: Mail,
        placement: Placement,
        least: int,
        grace_s: float,
        driver: Driver | None = None,
    ):
        """
        Args:
            mail: where the server and the placement put their news.
            placement: where the processes are to be.
            least: with fewer ranks the job does not go on.
            grace_s: from SIGTERM to SIGKILL.
            driver: gets a sentence about each event, and reports: {"generation": numbers of its processes by rank}, and
                {"last": line} for each line at the end. None is ringrun.
        """
        super().__init__(min(grace_s, MAX_GRACE_S))
        self._fleet = fleet
        self._server = server
        self._mail = mail
        self._placement = placement
        self._least = least
        self._name_of_least = "--min-np" if driver is None else driver.name_of_least
        self._report = report_to_ringrun if driver is None else driver.report
        self._log = JobLog(say if driver is None else driver.say)
        self._closing: list[Link] = []  # of hosts that are no longer named
        self._numbers: dict[str, int] = {}  # of all processes that there were, by their names at the rendezvous
        self._processes: dict[str, Process] = {}  # that run
        self._last_generation: dict[str, int] = {}  # of all that were in one
        self._leaving: set[str] = set()  # whose hosts are no longer named
        self._ending: set[str] = set()  # that were told to end
        self._awaited: set[str] = set()  # members of the generation, and of others since the first was done
        self._someone_is_done = False
        self._last_complaint = ""
        self._loop.register(mail.wake_up, self._read_mail)

    def run(self) -> int:
        """Runs the job to its end. Returns its exit code."""
        code = super().run()
        for link in self._closing:
            self._close(link)
        for line in self._log.last_lines(self._server.summary().seconds_lost):
            self._report({"last": line})
        return code

    def close(self) -> None:
        """In a process that goes on: the rendezvous ends."""
        self._server.close()
        self._mail.close()

    # --- what to do next ----------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        for link in [link for link in self._closing if not link.is_open]:
            self._closing.remove(link)
            self._close(link)
        if self._is_stopping or self._someone_is_done or self._rule.has_failed:
            if not self._is_anybody_awaited():
                self._end(self._grace_s)
            return
        for process in self._fleet.start(time.monotonic()):
            if self._fleet.is_running(process.number) and self._reach(process.host):
                self._start(process)
        if not self._placement.may_grow and self._fleet.most_from_now_on() < self._least:
            least = f"{self._least} ranks ({self._name_of_least})"
            self._give_up(f"fewer than {least} are left, and no host can have another one")
        for host in [host for host in self._links if not self._fleet.has(host)]:
            if not self._links[host].running:
                self._links[host].order({"finish": True})
                self._closing.append(self._links.pop(host))

    def _is_anybody_awaited(self) -> bool:
        """Whether a process has yet to end. One that is not in the generation would wait for another one."""
        if self._is_stopping or self._rule.has_failed or not self._awaited:
            return bool(self._processes)
        from_outside = self._awaited - self._numbers.keys()
        return bool(self._awaited & self._processes.keys() or from_outside)

    def _reach(self, host: str) -> bool:
        """Whether there is an agent; if not, the host is lost, with all that it should have."""
        if host in self._links:
            return True
        try:
            self._add(host, self._placement.open_agent(host))
        except OSError as error:
            self._log.noted(f"{host} cannot be reached: {error.filename}: {error.strerror}")
            self._note_loss(host)
            return False
        return True

    def _start(self, process: Process) -> None:
        link = self._links[process.host]
        link.running.add(process.number)
        link.order({"start": process.number, "horovod": self._expected_place(process)})
        self._processes[member_of(process)] = process
        self._numbers[member_of(process)] = process.number

    def _expected_place(self, process: Process) -> dict[str, str]:
        """For libraries that look for a rank before init(), which says the right one: after all that run already."""
        hosts: dict[str, int] = {}
        for other in self._fleet.running:
            hosts[other.host] = hosts.get(other.host, 0) + 1
        local_rank = sum(one.host == process.host for one in self._processes.values())
        earlier = list(hosts)[: list(hosts).index(process.host)]
        return horovod_variables.variables_of_place(
            (len(self._processes), sum(hosts.values())),
            (local_rank, hosts[process.host]),
            (sum(hosts[host] > local_rank for host in earlier), sum(ranks > local_rank for ranks in hosts.values())),
        )

    def _give_up(self, reason: str) -> None:
        self._log.failed(reason)
        self._server.fail(reason)  # processes that wait there for others end with that error
        self._fail(1)

    # --- what the agents report ---------------------------------------------------------------------------------------

    def _on_report(self, link: Link, report: dict[str, Any]) -> None:
        number, code = report["ended"]
        link.running.discard(number)
        (process,) = [one for one in self._processes.values() if one.number == number]
        member = member_of(process)
        del self._processes[member]
        is_expected = self._is_ending or self._is_stopping or self._rule.has_failed or member in self._ending
        self._leaving.discard(member)
        self._ending.discard(member)
        self._server.gone(member, end_of(code))
        if code == os.EX_TEMPFAIL:  # exit_preempted(): all processes of the generation have come to it
            self._someone_is_done = is_expected = True
            self._code = self._code or code
        if code != 0 and not is_expected:
            self._note_failure(process, code)
        elif code == 0 and not is_expected:
            self._someone_is_done = True
        if self._fleet.ended(number, time.monotonic(), code != 0 and not is_expected):
            self._note_given_up(process.host, f"{processes([number])} is not the first that fails there")

    def _note_failure(self, process: Process, code: int) -> None:
        if self._someone_is_done and member_of(process) not in self._awaited:
            return  # it has come too late
        generation = self._last_generation.get(member_of(process), 0)
        self._log.left(f"{processes([process.number])} on {process.host}", end_of(code), generation)
        is_killed = code - 128 in signal.valid_signals()
        if self._someone_is_done and not is_killed:
            self._code = self._code or code

    def _note_given_up(self, host: str, reason: str) -> None:
        seconds = self._fleet.closed_for_s(host, time.monotonic())
        how_long = "" if seconds == float("inf") else f" for {seconds:.0f} s"
        self._log.noted(f"{host} gets no more processes{how_long}: {reason}")

    def _note_end_of_agent(self, at: str, link: Link, how: str) -> None:
        if self._is_ending:
            return
        lost = [one for one in self._processes.values() if one.host == at]
        for process in lost:
            del self._processes[member_of(process)]
            self._leaving.discard(member_of(process))
            self._ending.discard(member_of(process))
            self._server.gone(member_of(process), how)
        numbers = [process.number for process in lost]
        if numbers:
            generation = max(self._last_generation.get(member_of(process), 0) for process in lost)
            self._log.left(processes(numbers), f"got lost: {how}", generation)
        else:
            self._log.noted(how)
        self._note_loss(at)

    def _note_loss(self, host: str) -> None:
        if self._fleet.lost(host, time.monotonic()):
            self._note_given_up(host, "it gets lost again and again")

    # --- news from other threads, and signals -------------------------------------------------------------------------

    def _read_mail(self) -> None:
        for news in self._mail.take():
            if isinstance(news, list):
                self._set_hosts(news)
            elif isinstance(news, DiscoveryError):
                self._complain(str(news))
            elif isinstance(news, Formed):
                self._on_formed(news)
            elif isinstance(news, Released):
                for member in news.members:
                    self._end_process(member)
            elif isinstance(news, StateLost):
                self._log.state_lost(news.generation, news.commits)
            elif isinstance(news, Waiting):
                self._on_waiting(news)
            elif isinstance(news, Left):
                self._on_left(news)
            elif isinstance(news, Done):
                self._someone_is_done = True
                self._forget_outsider(news.member)
            elif isinstance(news, Stuck):
                self._order_process(news.member, {"signal": signal.SIGKILL})
            elif isinstance(news, Failed) and not self._is_ending:
                self._log.failed(news.text)
                self._fail(1)

    def _set_hosts(self, hosts: list[Host]) -> None:
        if self._is_ending:  # the agents of lost hosts are forgotten by then, but not their processes
            return
        self._last_complaint = ""
        changes = self._fleet.set_hosts(hosts)
        if not changes.leaving and not changes.staying:
            return
        leaving = [member_of(process) for process in changes.leaving]
        self._leaving.update(leaving)
        self._leaving.difference_update(member_of(process) for process in changes.staying)
        self._server.retire(self._leaving)
        if self._awaited:  # else the hosts may be named again before the first generation
            self._end_unused()

    def _complain(self, text: str) -> None:
        """Once, until it has worked again."""
        if text != self._last_complaint:
            self._log.noted(f"{text}; the hosts stay as they are until it works")
        self._last_complaint = text

    def _on_formed(self, formed: Formed) -> None:
        self._fleet.begun()
        self._log.formed(formed.generation, formed.size)
        self._last_generation.update(dict.fromkeys(formed.members, formed.generation))
        self._awaited = set(formed.members) | (self._awaited if self._someone_is_done else set())
        if not self._someone_is_done:
            self._report(
                {"generation": [self._numbers[member] for member in formed.members if member in self._numbers]}
            )
        self._end_unused()

    def _on_waiting(self, waiting: Waiting) -> None:
        """Tell who is waited for: the rendezvous does not know of processes that have not called init() yet."""
        absent: list[str] = []
        if waiting.what == "processes":
            absent = [member for member in self._processes if member not in (*waiting.came, *self._ending)]
        self._log.noted(waiting_in_words(waiting, self._in_words(absent), self._in_words))

    def _in_words(self, members: Collection[str]) -> str:
        """`process 1 on h1, processes 2-3 on h2`; processes from outside have their names."""
        of_hosts: dict[str, list[int]] = {}
        for member in members:
            if member in self._numbers:
                of_hosts.setdefault(member.rpartition("/")[0], []).append(self._numbers[member])
        ours = [f"{processes(sorted(numbers))} on {host}" for host, numbers in of_hosts.items()]
        return ", ".join([*ours, *(member for member in members if member not in self._numbers)])

    def _on_left(self, left: Left) -> None:
        """Handles a process that has left; the agents report more about their own processes."""
        if self._forget_outsider(left.member):
            self._log.left(left.member, f"is gone: {left.text}", self._last_generation[left.member])

    def _forget_outsider(self, member: str) -> bool:
        """Whether it was one, which somebody else has started."""
        if member in self._numbers or member not in self._awaited:
            return False
        self._awaited.discard(member)
        return True

    def _end_unused(self) -> None:
        """Ends processes whose hosts are no longer named, and which were never in a generation."""
        for member in self._leaving - self._last_generation.keys():
            self._end_process(member)

    def _end_process(self, member: str) -> None:
        process = self._processes.get(member)
        if process is not None and member not in self._ending:
            self._ending.add(member)
            self._leaving.add(member)
            self._fleet.end(process.number)
            self._order_process(member, {"end": self._grace_s})

    def _order_process(self, member: str, order: Mapping[str, object]) -> None:
        process = self._processes.get(member)
        if process is not None:
            self._links[process.host].order({**order, "rank": process.number})


def starter_of(
    first: int,
    terms: ElasticTerms,
    listener: socket.socket,
    secret: bytes,
    placement: Placement,
    grace_s: float,
    driver: Driver | None = None,
) -> ElasticStarter:
    """Returns the starter of a job that begins with the `first` ranks, and whose processes meet at `listener`."""
    most, mail = _NO_LIMIT if terms.most is None else terms.most, Mail()
    name_of_timeout = "--elastic-timeout" if driver is None else "elastic_timeout"
    limits = Limits(first, terms.least, most, terms.timeout_s, terms.reset_limit, name_of_timeout)
    server = ElasticServer(listener, secret, limits, mail.put)
    fleet = Fleet(first, most, terms.cooldown_s, has_spares=driver is None)
    fleet.set_hosts(placement.hosts())
    starter = ElasticStarter(fleet, server, mail, placement, terms.least, grace_s, driver)
    placement.watch(mail.put)
    return starter
