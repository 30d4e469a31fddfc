"""Starts the processes of a job with servers, failed ones again where allowed, and ends when its workers have.

The starter has an agent on each host, and decides alone how the job ends.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ringtrain.runner.hosts import is_this_host, without_user
from ringtrain.runner.job import SERVER, WORKER, Address, RoleProcess, RoleTerms
from ringtrain.runner.start.links import Link
from ringtrain.runner.start.meeting import Meeting
from ringtrain.runner.start.starter import Starter, end_of, report_to_ringrun, say

# Servers and the scheduler end by themselves when the workers have. This is how long they may take.
_SERVERS_END_S = 5.0


class RolePlace(NamedTuple):
    """A host, and a folder there; of a host that YARN has given in containers, one of these."""

    at: Address
    folder: str
    container: str = ""


class RoleStarter(Starter[RolePlace]):
    """One thread."""

    def __init__(
        self,
        terms: RoleTerms,
        place_of: Callable[[RoleProcess], RolePlace],
        tell: Callable[[RoleProcess, int], Mapping[str, str]],
        open_agent: Callable[[RolePlace], Link],
        grace_s: float,
    ):
        """
        Args:
            place_of: where a process runs.
            tell: the variables of a process that has failed so many times.
            open_agent: starts the agent of a place. May raise OSError.
            grace_s: from SIGTERM to SIGKILL.
        """
        super().__init__(grace_s)
        self._terms = terms
        self._place_of = place_of
        self._tell = tell
        self._open_agent = open_agent
        self._running: set[RoleProcess] = set()
        self._failures: dict[RoleProcess, int] = {}
        self._lost: set[RoleProcess] = set()  # workers that are not started again
        self._servers_stay = False
        self._servers_until = float("inf")

    def run(self) -> int:
        """Runs the job to its end. Returns its exit code."""
        for process in self._terms.cast.processes():
            if not self._is_ending:
                self._start(process)
        return super().run()

    @property
    def _workers(self) -> list[RoleProcess]:
        """Returns the workers that run."""
        return [process for process in self._running if process.role == WORKER]

    # --- what to do next ----------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._workers:
            return
        if not self._running:
            self._finish()
        elif self._is_stopping or self._rule.has_failed:
            self._end(self._grace_s)
        elif self._terms.keeps_servers and self._code == 0:
            self._let_servers_stay()
        elif self._servers_until == float("inf"):
            self._servers_until = time.monotonic() + _SERVERS_END_S
        elif time.monotonic() >= self._servers_until:
            say(f"{self._listed(self._running)} did not end by themselves {_SERVERS_END_S:g} s after the last worker")
            self._end(self._grace_s)

    def _let_servers_stay(self) -> None:
        if not self._servers_stay and self._terms.cast.workers:
            say(f"the workers are done; {self._listed(self._running)} stay until this is interrupted")
        self._servers_stay = True

    def _start(self, process: RoleProcess) -> None:
        place = self._place_of(process)
        if place not in self._links:
            try:
                self._add(place, self._open_agent(place))
            except OSError as error:
                self._note_failure(process, 1, f"cannot be started: {error.filename}: {error.strerror}")
                return
        variables = self._tell(process, self._failures.get(process, 0))
        self._links[place].running.add(process.number)
        self._links[place].order({"start": process.number, "variables": variables})
        self._running.add(process)

    def _signal_ranks(self, number: int) -> None:
        """Signals the workers: servers have no handlers for signals of the user, and workers need them to the end."""
        for process in self._workers:
            self._links[self._place_of(process)].order({"signal": number, "rank": process.number})

    # --- what has happened --------------------------------------------------------------------------------------------

    def _on_report(self, link: Link, report: dict[str, Any]) -> None:
        number, code = report["ended"]
        link.running.discard(number)
        process = self._terms.cast.process(number)
        self._running.discard(process)
        if self._is_over:
            return
        if code == os.EX_TEMPFAIL:  # exit_preempted(): all workers have come to it
            self._fail(code)
        elif code != 0:
            self._note_failure(process, code, end_of(code))

    def _note_end_of_agent(self, at: RolePlace, link: Link, how: str) -> None:
        lost = [self._terms.cast.process(number) for number in sorted(link.running)]
        self._running.difference_update(lost)
        if self._is_over:
            return
        for process in lost:
            self._note_failure(process, 1, f"got lost: {how}")

    def _note_failure(self, process: RoleProcess, code: int, how: str) -> None:
        if self._is_over:
            return
        failures = self._failures[process] = self._failures.get(process, 0) + 1
        what = f"{process} on {self._place_of(process).at.host} {how}"
        if failures <= self._terms.restarts and self._may_restart(process):
            say(f"{what}; it is started again, {failures} of {self._terms.restarts} times")
            self._start(process)
            return
        if process.role == WORKER:
            self._lost.add(process)
        left = self._terms.cast.workers - len(self._lost)
        if process.role == WORKER and left >= self._terms.least:
            say(f"{what}; the job goes on without it")
        else:
            report_to_ringrun({"last": what})
            self._fail(code)

    def _may_restart(self, process: RoleProcess) -> bool:
        """A server that has saved nothing would come back empty, and a scheduler without knowing anybody."""
        return process.role == WORKER or (process.role == SERVER and self._terms.has_snapshots and bool(self._workers))

    @property
    def _is_over(self) -> bool:
        """Whether the job ends, so that the end of another process changes nothing."""
        return self._is_ending or self._is_stopping or self._rule.has_failed

    def _listed(self, processes: Iterable[RoleProcess]) -> str:
        return self._terms.cast.listed(process.number for process in processes)


# --- what each process is told, by the variables that MXNet knows -----------------------------------------------------


# launch.py's first port for the scheduler, and what it tries besides
_PORTS = range(9091, 10000)
_INTERFACE_VARIABLE = "DMLC_INTERFACE"
_URI_VARIABLE, _PORT_VARIABLE = "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"


class Root(NamedTuple):
    """Says where the scheduler listens. No process takes the port while `holder` is open, which does not listen."""

    address: str
    port: int
    holder: socket.socket


def open_root(hosts: Sequence[str], environ: Mapping[str, str]) -> Root:
    """At this host's address towards the others, on the first free port, but for what the user has set.

    Raises OSError where no port is free, and ValueError where the variable is none.
    """
    address = environ.get(_URI_VARIABLE, "").strip("[]")
    address = address or Meeting(hosts, environ.get(_INTERFACE_VARIABLE, "")).address_for("localhost")
    named = environ.get(_PORT_VARIABLE)
    for port in [int(named)] if named else _PORTS:
        holder = _held(address, port)
        if holder is not None:
            return Root(address, port, holder)
    tried = f"port {named}" if named else f"none of the ports {_PORTS[0]}-{_PORTS[-1]}"
    raise OSError(f"{tried} of {address} is free for the scheduler; set {_PORT_VARIABLE} to another one")


def _held(address: str, port: int) -> socket.socket | None:
    """None where it is taken. Another ringlaunch finds it taken, the scheduler may listen there all the same.

    Raises OSError where this host has no such address.
    """
    family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    holder = socket.socket(family, kind)
    try:
        holder.bind(place)
    except OSError as error:
        holder.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise OSError(error.errno, f"{error.strerror}: the scheduler cannot listen at {address}:{port}") from None
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def variables_of(
    process: RoleProcess, attempt: int, host: str, root: Root, terms: RoleTerms, environ: Mapping[str, str]
) -> dict[str, str]:
    """For a process on `host` that has failed `attempt` times."""
    variables = {
        _URI_VARIABLE: root.address,
        _PORT_VARIABLE: str(root.port),
        "DMLC_NUM_WORKER": str(terms.cast.workers),
        "DMLC_NUM_SERVER": str(terms.cast.servers),
        "DMLC_ROLE": process.role,
        "DMLC_TASK_ID": str(process.task),
        "DMLC_NUM_ATTEMPT": str(attempt),
        "DMLC_JOB_CLUSTER": "ssh" if terms.hosts else "local",
    }
    if terms.keeps_servers:
        variables["RINGTRAIN_KV_KEEP"] = "1"
    # who names an interface is asked for the address that this has on each host
    address = None if environ.get(_INTERFACE_VARIABLE) else _address_of(host, root)
    if address is not None:
        variables["DMLC_NODE_HOST"] = address
    own: Mapping[str, Mapping[str, str]] = {WORKER: terms.of_workers, SERVER: terms.of_servers}
    return {**variables, **own.get(process.role, {})}


def _address_of(host: str, root: Root) -> str | None:
    """In digits: a host may know its own name by an address that no other one reaches."""
    if is_this_host(host):
        return root.address
    try:
        return str(socket.getaddrinfo(without_user(host), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None  # a name that ssh alone knows
