"""Starts the processes of a job with servers, failed ones again where they may be, and ends when its workers have.

In the place of the starter of other jobs. It has a keeper on each host, and decides alone how the job ends. Its
standard error is what the keepers send, and frames of its own for ringlaunch.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ringtrain.runner.elastic.chronicle import end_of
from ringtrain.runner.roles.addresses import Address
from ringtrain.runner.roles.cast import SERVER, WORKER, Process
from ringtrain.runner.roles.terms import RoleTerms
from ringtrain.runner.start.agent import write_lines
from ringtrain.runner.start.link import Link
from ringtrain.runner.start.loop import Loop
from ringtrain.runner.start.starter import ENDING_SIGNALS, FOR_RANKS
from ringtrain.runner.supervise.frames import frame_of_report

_LOOK_S = 0.2
# Servers and the scheduler end by themselves when the workers have; this long they have for it.
_SERVERS_END_S = 5.0
# From SIGTERM to SIGKILL: where a process has failed, at most, and where this process is told to end.
_GRACE_AFTER_FAILURE_S = 10.0
_GRACE_OF_END_S = 1.0
# The same where the user has said nothing.
GRACE_S = 10.0
# Keepers that have not ended so long after they were to kill their processes are not waited for.
_KEEPERS_END_S = 1.5


class Place(NamedTuple):
    """A host, and a folder there; of a host that YARN has given in containers, one of these."""

    at: Address
    folder: str
    container: str = ""


class RoleStarter:
    """One thread."""

    def __init__(
        self,
        terms: RoleTerms,
        place_of: Callable[[Process], Place],
        tell: Callable[[Process, int], Mapping[str, str]],
        open_keeper: Callable[[Place], Link],
        grace_s: float,
    ):
        """
        Args:
            place_of: where a process runs.
            tell: the variables of a process that has failed so many times.
            open_keeper: starts the keeper of a place. May raise OSError.
            grace_s: from SIGTERM to SIGKILL.
        """
        self._terms = terms
        self._place_of = place_of
        self._tell = tell
        self._open_keeper = open_keeper
        self._grace_s = grace_s
        self._keepers: dict[Place, Link] = {}
        self._running: set[Process] = set()
        self._failures: dict[Process, int] = {}
        self._lost: set[Process] = set()  # workers that are not started again
        self._code = 0
        self._is_stopping = False
        self._servers_stay = False
        self._servers_until = float("inf")
        self._give_up_at = float("inf")
        self._loop = Loop(self._on_report)
        self._loop.handle_signals((*FOR_RANKS, *ENDING_SIGNALS), self._on_signals)

    def run(self) -> int:
        """To the end of the job. Returns its exit code."""
        for process in self._terms.cast.processes():
            if not self._is_ending:
                self._start(process)
        while not self._is_ending or (self._keepers and time.monotonic() < self._give_up_at):
            self._go_on()
            self._loop.wait(_LOOK_S)
            for place in [place for place, keeper in self._keepers.items() if not keeper.is_open]:
                self._note_end_of_keeper(place)
        for keeper in self._keepers.values():
            keeper.close()
        return self._code

    @property
    def _is_ending(self) -> bool:
        return self._give_up_at < float("inf")

    @property
    def _workers(self) -> list[Process]:
        """Those that run."""
        return [process for process in self._running if process.role == WORKER]

    # --- what to do next ----------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._is_ending or self._workers:
            return
        if not self._running:
            self._finish()
        elif self._is_stopping:
            self._end(self._grace_s)
        elif self._terms.keeps_servers and self._code == 0:
            self._let_servers_stay()
        elif self._servers_until == float("inf"):
            self._servers_until = time.monotonic() + _SERVERS_END_S
        elif time.monotonic() >= self._servers_until:
            _say(f"{self._listed(self._running)} did not end by themselves {_SERVERS_END_S:g} s after the last worker")
            self._end(self._grace_s)

    def _let_servers_stay(self) -> None:
        if not self._servers_stay and self._terms.cast.workers:
            _say(f"the workers are done; {self._listed(self._running)} stay until this is interrupted")
        self._servers_stay = True

    def _start(self, process: Process) -> None:
        place = self._place_of(process)
        if place not in self._keepers:
            try:
                self._keepers[place] = self._open_keeper(place)
            except OSError as error:
                self._note_failure(process, 1, f"cannot be started: {error.filename}: {error.strerror}")
                return
            self._loop.add(self._keepers[place])
        variables = self._tell(process, self._failures.get(process, 0))
        self._keepers[place].running.add(process.number)
        self._keepers[place].order({"start": process.number, "variables": variables})
        self._running.add(process)

    def _finish(self) -> None:
        """Nothing runs any more."""
        self._order_all({"finish": True})
        self._give_up_at = time.monotonic() + _KEEPERS_END_S

    def _end(self, grace_s: float) -> None:
        self._order_all({"end": grace_s})
        self._give_up_at = min(self._give_up_at, time.monotonic() + grace_s + _KEEPERS_END_S)

    def _order_all(self, order: Mapping[str, object]) -> None:
        for keeper in self._keepers.values():
            keeper.order(order)

    def _signal(self, processes: Iterable[Process], number: int) -> None:
        for process in processes:
            self._keepers[self._place_of(process)].order({"signal": number, "rank": process.number})

    # --- what has happened --------------------------------------------------------------------------------------------

    def _on_report(self, keeper: Link, report: dict[str, Any]) -> None:
        number, code = report["ended"]
        keeper.running.discard(number)
        process = self._terms.cast.process(number)
        self._running.discard(process)
        if code != 0 and not self._is_ending and not self._is_stopping:
            self._note_failure(process, code, end_of(code))

    def _note_end_of_keeper(self, place: Place) -> None:
        keeper = self._keepers.pop(place)
        how = keeper.end_in_words()
        self._loop.forget(keeper)
        keeper.close()
        lost = [self._terms.cast.process(number) for number in sorted(keeper.running)]
        self._running.difference_update(lost)
        if self._is_ending or self._is_stopping:
            return
        for process in lost:
            self._note_failure(process, 1, f"got lost: {how}")

    def _note_failure(self, process: Process, code: int, how: str) -> None:
        if self._is_ending:
            return
        failures = self._failures[process] = self._failures.get(process, 0) + 1
        what = f"{process} on {self._place_of(process).at.host} {how}"
        if failures <= self._terms.restarts and self._may_restart(process):
            _say(f"{what}; it is started again, {failures} of {self._terms.restarts} times")
            self._start(process)
            return
        if process.role == WORKER:
            self._lost.add(process)
        left = self._terms.cast.workers - len(self._lost)
        if process.role == WORKER and left >= self._terms.least:
            _say(f"{what}; the job goes on without it")
        else:
            self._fail(code, what)

    def _may_restart(self, process: Process) -> bool:
        """A server that has saved nothing would come back empty, and a scheduler without knowing anybody."""
        return process.role == WORKER or (process.role == SERVER and self._terms.has_snapshots and bool(self._workers))

    def _fail(self, code: int, what: str) -> None:
        self._code = self._code or code
        _report({"last": what})
        self._end(min(self._grace_s, _GRACE_AFTER_FAILURE_S))

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in ENDING_SIGNALS:
                self._code = self._code or 128 + number
                self._end(_GRACE_OF_END_S)
            elif number in FOR_RANKS:
                # servers have no handlers for the user's signals, and workers need them until their own end
                self._signal(self._workers, FOR_RANKS[number])
                self._is_stopping |= FOR_RANKS[number] == signal.SIGTERM

    def _listed(self, processes: Iterable[Process]) -> str:
        return self._terms.cast.listed(process.number for process in processes)


def _say(sentence: str) -> None:
    write_lines(2, [f"ringlaunch: {sentence}".encode()])


def _report(report: Mapping[str, object]) -> None:
    write_lines(2, [frame_of_report(report)])
