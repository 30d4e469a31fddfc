"""Ranks that become servers (option kv_servers): init() sets them aside and never returns in them."""

from __future__ import annotations

import secrets
import socket
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from ringtrain.errors import StalledError
from ringtrain.job import network, session
from ringtrain.job.host import usual_address
from ringtrain.job.rendezvous.listener import bound
from ringtrain.kvstore.servers.arrival import arrive, make_scheduler
from ringtrain.kvstore.servers.roles import SERVER, WORKER, Role
from ringtrain.kvstore.servers.scheduler import Scheduler
from ringtrain.kvstore.servers.server import serve

_LOOK_S = 0.005


class Plan(NamedTuple):
    """The facts that init() tells a worker about the servers."""

    role: Role
    secret: bytes
    scheduler: Scheduler | None  # on worker 0


_plan: Plan | None = None
_is_taken = False  # whether there is a store
_is_used = False


def has_plan() -> bool:
    """Whether init() has set ranks aside."""
    return _plan is not None


def take_plan() -> Plan:
    """Returns the plan for the first store; its scheduler is owned by the caller now."""
    global _is_taken
    assert _plan is not None
    _is_taken = True
    return _plan


def set_aside(count: int, settings: dict[str, str]) -> list[int]:
    """Returns the ranks that go on as workers. In a server it serves until the job is over, and ends the process.

    All ranks call it together. Rank 0 is always a worker.

    Raises:
        ValueError: no worker would be left; a second init().
    """
    global _plan, _is_used
    if _is_used:
        raise ValueError("kv_servers: the servers have ended with the shutdown() before this init(); start another job")
    rank = network.rank_of_all()
    listener: socket.socket | None = None
    told: list[str | int] = []
    if rank == 0:
        host = usual_address()
        listener = bound(host, 0)
        told = [host, listener.getsockname()[1], secrets.token_hex(32)]
    said = network.tell_all([socket.gethostname(), told], settings)
    servers = choose_servers([str(host) for host, _ in said], count)
    workers = [one for one in range(len(said)) if one not in servers]
    host, port, secret = str(said[0][1][0]), int(said[0][1][1]), bytes.fromhex(said[0][1][2])
    if rank in servers:
        role = Role(SERVER, host, port, len(workers), count, servers.index(rank), 0, "")
        # The workers make their stores at any time after init().
        serve(arrive(role, secret, {**settings, "start_timeout_s": "0"}))
        sys.exit(0)
    role = Role(WORKER, host, port, len(workers), count, workers.index(rank), 0, "")
    scheduler = make_scheduler(role, listener, secret, settings) if listener is not None else None
    if scheduler is not None:
        _await_servers(scheduler, count, float(settings["start_timeout_s"]))
    _plan, _is_used = Plan(role, secret, scheduler), True
    return workers


def _await_servers(scheduler: Scheduler, count: int, timeout_s: float) -> None:
    """Waits for the servers, so that they hear of the end however early it is. Raises StalledError."""
    end_s = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
    while not scheduler.has(count):
        if time.monotonic() > end_s:
            raise StalledError(f"init() has waited {timeout_s:g} s (start_timeout_s) for the {count} servers")
        time.sleep(_LOOK_S)


def choose_servers(hosts: Sequence[str], count: int) -> list[int]:
    """Chooses the last rank of each host in turn, from the last host on; never rank 0.

    Args:
        hosts: the host of each rank.
    """
    if count >= len(hosts):
        raise ValueError(f"kv_servers={count} of {len(hosts)} ranks leaves no worker; start more of them")
    ranks_of = {host: [rank for rank, one in enumerate(hosts) if one == host and rank > 0] for host in hosts}
    chosen: list[int] = []
    while len(chosen) < count:
        for ranks in reversed(ranks_of.values()):
            if ranks and len(chosen) < count:
                chosen.append(ranks.pop())
    return sorted(chosen)


def _forget() -> None:
    """Ends the servers at shutdown() if no store was made, for which they still wait."""
    global _plan
    if _plan is not None and _plan.scheduler is not None and not _is_taken:
        _plan.scheduler.end()
        _plan.scheduler.close()
    _plan = None


session.at_shutdown(_forget)
