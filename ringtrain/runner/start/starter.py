"""Starts the ranks of a job without an MPI, and ends with the last of them: what mpirun is in a job with one.

It serves the rendezvous where the ranks meet, and has an agent on each host, which it reaches by ssh. Its standard
error is what the agents send, in whole lines; its standard input is that of rank 0.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringtrain.failure.ranks_in_words import list_of_ranks
from ringtrain.job.interfaces import address_towards, addresses_of, usual_address
from ringtrain.job.rendezvous.door import bound
from ringtrain.job.rendezvous.server import Server
from ringtrain.runner.allocation.hosts import Host, is_this_host, parse_hosts
from ringtrain.runner.launchers.travelling_variables import travelling
from ringtrain.runner.start.agent import Order
from ringtrain.runner.start.link import Link, ProcessLink, Share, command_of_agent
from ringtrain.runner.start.loop import Loop
from ringtrain.runner.supervise.rank_wrapper import END_RANK, GRACE_VARIABLE, speaker

INTERFACES_VARIABLE = "RINGTRAIN_SOCKET_INTERFACES"
_LOOK_S = 0.5
# From SIGTERM to SIGKILL: where a rank has failed, at most, and where this process is told to end.
GRACE_AFTER_FAILURE_S = 10.0
_GRACE_OF_END_S = 1.0
# Agents that have not ended so long after they were to kill their ranks are not waited for.
_AGENTS_END_S = 1.5
_STDIN_BYTES = 1 << 15
FOR_RANKS: dict[int, int] = {END_RANK: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1, signal.SIGUSR2: signal.SIGUSR2}
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def shares_of(num_proc: int, hosts: Sequence[Host]) -> list[Share]:
    """Fills the slots of the hosts, one after another; no hosts means this host."""
    shares: list[Share] = []
    left = num_proc
    for host in hosts or [Host("localhost", num_proc)]:
        count = min(left, host.slots)
        if count > 0:
            shares.append(Share(host.name, num_proc - left, count, not is_this_host(host.name)))
        left -= count
    return shares


class Meeting(NamedTuple):
    """Where the server listens, and the address of this host that the ranks of each share reach it by."""

    listens_at: str
    addresses: list[str]


def meeting_of(shares: Sequence[Share], interfaces: str) -> Meeting:
    """`interfaces` are those that the user has named, if any."""
    remote = [share.host for share in shares if share.is_remote]
    if not remote:
        return Meeting("127.0.0.1", ["127.0.0.1"] * len(shares))
    # this host may have none of them where it has no ranks
    with contextlib.suppress(ValueError):
        named = addresses_of(interfaces)
        if named:
            return Meeting(named[0], named[:1] * len(shares))
    addresses = [_address_towards(share.host if share.is_remote else remote[0]) for share in shares]
    return Meeting("::" if any(":" in address for address in addresses) else "0.0.0.0", addresses)


def _address_towards(host: str) -> str:
    try:
        return address_towards(host)
    except OSError:
        return usual_address()  # ssh will say what is wrong


class StandardInput:
    """That of this process, as far as it may be read now: of a terminal it belongs to whoever is in the foreground."""

    def __init__(self) -> None:
        self._is_terminal = os.isatty(0)
        self.is_open = True

    def fileno(self) -> int:
        return 0

    def may_be_read(self) -> bool:
        return self.is_open and (not self._is_terminal or _is_in_foreground())

    def read(self) -> bytes:
        """Nothing is its end."""
        try:
            data = os.read(0, _STDIN_BYTES)
        except OSError:
            data = b""
        self.is_open = bool(data)
        return data


def _is_in_foreground() -> bool:
    """Whether ringrun is: this process is in a session of its own, where nothing is."""
    try:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    _, _, group, _, _, group_in_foreground, *_ = fields
    return group == group_in_foreground


class Starter:
    """One thread."""

    def __init__(self, links: Sequence[Link], grace_s: float):
        self._links = links
        self._grace_s = grace_s
        self._loop = Loop(self._on_report)
        self._input = StandardInput()
        self._input_is_on_its_way = False
        self._code = 0
        self._is_ending = False
        self._give_up_at = float("inf")
        for link in links:
            self._loop.add(link)
        self._loop.handle_signals((*FOR_RANKS, *ENDING_SIGNALS), self._on_signals)

    def run(self) -> int:
        """To the end of all ranks, or of the time that they had for it. Returns the code of the first that failed."""
        while any(link.is_open for link in self._links) and time.monotonic() < self._give_up_at:
            may_read = self._input.may_be_read() and not self._input_is_on_its_way
            self._loop.wait(_LOOK_S, {self._input: self._read_input} if may_read else {})
            for link in self._links:
                if not link.is_open and link.running:
                    self._note_loss(link)
        for link in self._links:
            link.close()
        return self._code

    def _on_report(self, link: Link, report: dict[str, Any]) -> None:
        if "ended" in report:
            rank, code = report["ended"]
            link.running.discard(rank)
            if code != 0:
                self._fail(code)
        elif "took" in report:
            self._input_is_on_its_way = False

    def _read_input(self) -> None:
        data = self._input.read()
        self._input_is_on_its_way = bool(data)
        # the first link has rank 0
        self._links[0].order({"stdin": base64.b64encode(data).decode() if data else None})

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in FOR_RANKS:
                self._order_all({"signal": FOR_RANKS[number]})
            elif number in ENDING_SIGNALS:
                self._code = self._code or 128 + number
                self._end(_GRACE_OF_END_S)

    def _note_loss(self, link: Link) -> None:
        ranks = sorted(link.running)
        link.running.clear()
        if not self._is_ending:
            link.say(f"{speaker()}: {link.end_in_words()}, and with it {list_of_ranks(ranks)}")
        self._fail(1)

    def _fail(self, code: int) -> None:
        self._code = self._code or code
        if not self._is_ending:
            self._end(min(self._grace_s, GRACE_AFTER_FAILURE_S))

    def _end(self, grace_s: float) -> None:
        self._is_ending = True
        self._order_all({"end": grace_s})
        self._give_up_at = min(self._give_up_at, time.monotonic() + grace_s + _AGENTS_END_S)

    def _order_all(self, order: dict[str, object]) -> None:
        for link in self._links:
            link.order(order)


def main() -> int:
    """Returns 0 where all ranks did."""
    arguments = _parser().parse_args()
    shares = shares_of(arguments.num_proc, parse_hosts(arguments.hosts) if arguments.hosts else [])
    meeting = meeting_of(shares, os.environ.get(INTERFACES_VARIABLE, ""))
    secret = secrets.token_bytes(32)
    server = Server(bound(meeting.listens_at, 0), secret)
    names = travelling(os.environ, arguments.exported)
    environment = {name: os.environ[name] for name in names}
    links: list[Link] = []
    for share, address in zip(shares, meeting.addresses, strict=True):
        host = f"[{address}]" if ":" in address else address
        order = Order(
            arguments.command,
            share.first,
            share.ranks,
            arguments.num_proc,
            f"{host}:{server.port}",
            secret.hex(),
            environment,
            os.getcwd(),
        )
        links.append(ProcessLink(share, command_of_agent(share, os.environ, arguments.ssh_option)))
        links[-1].order(order._asdict())
    starter = Starter(links, float(os.environ.get(GRACE_VARIABLE, GRACE_AFTER_FAILURE_S)))
    with contextlib.suppress(BrokenPipeError):  # whoever reads has gone, and the agents with this process
        return starter.run()
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What ringrun starts in a job without an MPI.", allow_abbrev=False)
    parser.add_argument("--num-proc", type=int, required=True)
    parser.add_argument("--hosts")
    parser.add_argument("--ssh-option", action="append", default=[])
    parser.add_argument("--exported", action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser
