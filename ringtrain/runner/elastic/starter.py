"""Starts the processes of an elastic job, and others in their place, until the job is over.

In the place of the starter of other jobs. It serves the rendezvous, has a keeper on each host, and decides alone how
the job ends. Its standard error is what the keepers send, and frames of its own for ringrun.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ringtrain.job.rendezvous.elastic_server import ElasticServer
from ringtrain.job.rendezvous.generations import (
    Done,
    Event,
    Failed,
    Formed,
    Left,
    Released,
    StateLost,
    Stuck,
    Waiting,
)
from ringtrain.options import horovod_variables
from ringtrain.runner.allocation.hosts import Host
from ringtrain.runner.elastic.chronicle import Chronicle, end_of, processes, waiting_in_words
from ringtrain.runner.elastic.discovery import DiscoveryError
from ringtrain.runner.elastic.fleet import Fleet, Process
from ringtrain.runner.start.agent import write_lines
from ringtrain.runner.start.link import Link
from ringtrain.runner.start.loop import Loop
from ringtrain.runner.start.starter import ENDING_SIGNALS, FOR_RANKS
from ringtrain.runner.supervise.frames import frame_of_report

_LOOK_S = 0.2
# From SIGTERM to SIGKILL: at the end of the job, at most, and where this process is told to end.
_GRACE_AT_END_S = 10.0
_GRACE_OF_END_S = 1.0
# Keepers that have not ended so long after they were to kill their processes are not waited for.
_KEEPERS_END_S = 1.5

News = Event | list[Host] | DiscoveryError


def member_of(process: Process) -> str:
    """What the rendezvous calls it."""
    return f"{process.host}/{process.number}"


class Mail:
    """News from other threads for the one that reads."""

    def __init__(self) -> None:
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self.wake_up, self._wake_up_end = os.pipe()
        for descriptor in (self.wake_up, self._wake_up_end):
            os.set_blocking(descriptor, False)

    def put(self, news: News) -> None:
        self._news.put(news)
        with contextlib.suppress(BlockingIOError):  # it will wake up
            os.write(self._wake_up_end, b"\0")

    def take(self) -> list[News]:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_up, 4096)
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._news.get_nowait())
        return taken


class ElasticStarter:
    """One thread."""

    def __init__(
        self,
        fleet: Fleet,
        server: ElasticServer,
        mail: Mail,
        open_keeper: Callable[[str], Link],
        least: int,
        may_hope: bool,
        grace_s: float,
    ):
        """
        Args:
            mail: where the server and the discovery put their news.
            open_keeper: starts the keeper of a host.
            least: with fewer ranks the job does not go on.
            may_hope: whether there may be other hosts one day, or those that were given up again.
            grace_s: from SIGTERM to SIGKILL.
        """
        self._fleet = fleet
        self._server = server
        self._mail = mail
        self._open_keeper = open_keeper
        self._least = least
        self._may_hope = may_hope
        self._grace_s = min(grace_s, _GRACE_AT_END_S)
        self._chronicle = Chronicle(_say)
        self._keepers: dict[str, Link] = {}
        self._closing: list[Link] = []  # keepers of hosts that are not there any more
        self._numbers: dict[str, int] = {}  # of all processes that there were, by what the rendezvous calls them
        self._processes: dict[str, Process] = {}  # that run
        self._last_generation: dict[str, int] = {}  # of all that were in one
        self._leaving: set[str] = set()  # whose hosts are no longer named
        self._ending: set[str] = set()  # that were told to end
        self._awaited: set[str] = set()  # members of the generation, and of others since the first was done
        self._code = 0
        self._someone_is_done = False
        self._is_stopping = False
        self._give_up_at = float("inf")
        self._last_complaint = ""
        self._loop = Loop(self._on_report)
        self._loop.register(mail.wake_up, self._read_mail)
        self._loop.handle_signals((*FOR_RANKS, *ENDING_SIGNALS), self._on_signals)

    @property
    def _is_ending(self) -> bool:
        return self._give_up_at < float("inf")

    def run(self) -> int:
        """To the end of the job. Returns its exit code."""
        while not self._is_ending or (self._keepers and time.monotonic() < self._give_up_at):
            self._go_on()
            self._loop.wait(_LOOK_S)
            for host in [host for host, keeper in self._keepers.items() if not keeper.is_open]:
                self._note_end_of_keeper(host)
            for keeper in [keeper for keeper in self._closing if not keeper.is_open]:
                self._closing.remove(keeper)
                self._close(keeper)
        for keeper in (*self._keepers.values(), *self._closing):
            self._close(keeper)
        for line in self._chronicle.last_lines(self._server.summary().seconds_lost):
            _report({"last": line})
        return self._code

    # --- what to do next ----------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._is_ending:
            return
        if self._is_stopping or self._someone_is_done:
            if not self._is_anybody_awaited():
                self._end(self._grace_s)
            return
        for process in self._fleet.start(time.monotonic()):
            if self._fleet.is_running(process.number) and self._reach(process.host):
                self._start(process)
        if not self._may_hope and self._fleet.most_from_now_on() < self._least:
            self._fail(f"fewer than {self._least} ranks (--min-np) are left, and no host can have another one")
        for host in [host for host in self._keepers if not self._fleet.has(host)]:
            if not self._keepers[host].running:
                self._keepers[host].order({"finish": True})
                self._closing.append(self._keepers.pop(host))

    def _is_anybody_awaited(self) -> bool:
        """Whether somebody has yet to come to an end. Who is not in the generation would wait for another one."""
        if self._is_stopping or not self._awaited:
            return bool(self._processes)
        from_outside = self._awaited - self._numbers.keys()
        return bool(self._awaited & self._processes.keys() or from_outside)

    def _reach(self, host: str) -> bool:
        """Whether there is a keeper; if not, the host is lost, with all that it should have."""
        if host in self._keepers:
            return True
        try:
            self._keepers[host] = self._open_keeper(host)
        except OSError as error:
            self._chronicle.noted(f"{host} cannot be reached: {error.filename}: {error.strerror}")
            self._note_loss(host)
            return False
        self._loop.add(self._keepers[host])
        return True

    def _start(self, process: Process) -> None:
        keeper = self._keepers[process.host]
        keeper.running.add(process.number)
        keeper.order({"start": process.number, "horovod": self._expected_place(process)})
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

    def _close(self, keeper: Link) -> None:
        self._loop.forget(keeper)
        keeper.close()

    def _fail(self, reason: str) -> None:
        self._code = self._code or 1
        self._chronicle.failed(reason)
        self._end(self._grace_s)

    def _end(self, grace_s: float) -> None:
        for keeper in self._keepers.values():
            keeper.order({"end": grace_s})
        self._give_up_at = min(self._give_up_at, time.monotonic() + grace_s + _KEEPERS_END_S)

    # --- what the keepers report --------------------------------------------------------------------------------------

    def _on_report(self, keeper: Link, report: dict[str, Any]) -> None:
        number, code = report["ended"]
        keeper.running.discard(number)
        (process,) = [one for one in self._processes.values() if one.number == number]
        member = member_of(process)
        del self._processes[member]
        is_expected = self._is_ending or self._is_stopping or member in self._ending
        self._leaving.discard(member)
        self._ending.discard(member)
        self._server.gone(member, end_of(code))
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
        self._chronicle.left(f"{processes([process.number])} on {process.host}", end_of(code), generation)
        is_killed = code - 128 in signal.valid_signals()
        if self._someone_is_done and not is_killed:
            self._code = self._code or code

    def _note_given_up(self, host: str, reason: str) -> None:
        seconds = self._fleet.closed_for_s(host, time.monotonic())
        how_long = "" if seconds == float("inf") else f" for {seconds:.0f} s"
        self._chronicle.noted(f"{host} gets no more processes{how_long}: {reason}")

    def _note_end_of_keeper(self, host: str) -> None:
        keeper = self._keepers.pop(host)
        how = keeper.end_in_words()
        self._close(keeper)
        if self._is_ending:
            return
        lost = [one for one in self._processes.values() if one.host == host]
        for process in lost:
            del self._processes[member_of(process)]
            self._leaving.discard(member_of(process))
            self._ending.discard(member_of(process))
            self._server.gone(member_of(process), how)
        numbers = [process.number for process in lost]
        if numbers:
            generation = max(self._last_generation.get(member_of(process), 0) for process in lost)
            self._chronicle.left(processes(numbers), f"got lost: {how}", generation)
        else:
            self._chronicle.noted(how)
        self._note_loss(host)

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
                self._chronicle.state_lost(news.generation, news.commits)
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
                self._fail(news.text)

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
            self._chronicle.noted(f"{text}; the hosts stay as they are until it works")
        self._last_complaint = text

    def _on_formed(self, formed: Formed) -> None:
        self._fleet.begun()
        self._chronicle.formed(formed.generation, formed.size)
        self._last_generation.update(dict.fromkeys(formed.members, formed.generation))
        self._awaited = set(formed.members) | (self._awaited if self._someone_is_done else set())
        if not self._someone_is_done:
            _report({"generation": [self._numbers[member] for member in formed.members if member in self._numbers]})
        self._end_unused()

    def _on_waiting(self, waiting: Waiting) -> None:
        """Tell who is waited for: the rendezvous does not know of processes that have not called init() yet."""
        absent: list[str] = []
        if waiting.what == "processes":
            absent = [member for member in self._processes if member not in (*waiting.came, *self._ending)]
        self._chronicle.noted(waiting_in_words(waiting, self._in_words(absent), self._in_words))

    def _in_words(self, members: Collection[str]) -> str:
        """`process 1 on h1, processes 2-3 on h2`; processes from outside have their names."""
        of_hosts: dict[str, list[int]] = {}
        for member in members:
            if member in self._numbers:
                of_hosts.setdefault(member.rpartition("/")[0], []).append(self._numbers[member])
        ours = [f"{processes(sorted(numbers))} on {host}" for host, numbers in of_hosts.items()]
        return ", ".join([*ours, *(member for member in members if member not in self._numbers)])

    def _on_left(self, left: Left) -> None:
        """Of its own processes the keepers tell more."""
        if self._forget_outsider(left.member):
            self._chronicle.left(left.member, f"is gone: {left.text}", self._last_generation[left.member])

    def _forget_outsider(self, member: str) -> bool:
        """Whether it was one, which somebody else has started."""
        if member in self._numbers or member not in self._awaited:
            return False
        self._awaited.discard(member)
        return True

    def _end_unused(self) -> None:
        """Those whose hosts are no longer named, and which were never in a generation."""
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
            self._keepers[process.host].order({**order, "rank": process.number})

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in FOR_RANKS:
                for keeper in self._keepers.values():
                    keeper.order({"signal": FOR_RANKS[number]})
                self._is_stopping |= FOR_RANKS[number] == signal.SIGTERM
            elif number in ENDING_SIGNALS:
                self._code = self._code or 128 + number
                self._end(_GRACE_OF_END_S)


def _say(sentence: str) -> None:
    write_lines(2, [f"ringrun: {sentence}".encode()])


def _report(report: Mapping[str, object]) -> None:
    write_lines(2, [frame_of_report(report)])
