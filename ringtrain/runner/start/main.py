"""From the command line of a starter to its parts: `ranks`, `elastic`, `roles`, and the first and the last on YARN.

Each kind imports what it alone needs, so that ranks start soon.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain.job.host import INTERFACES_VARIABLE
from ringtrain.job.rendezvous.listener import bound
from ringtrain.job.rendezvous.secret import FILE_VARIABLE, read
from ringtrain.job.rendezvous.server import Server
from ringtrain.runner.hosts import Host, is_this_host, travelling
from ringtrain.runner.job import SCHEDULER, Address, ElasticTerms, Job, RoleProcess, host_of
from ringtrain.runner.start.agent import Order
from ringtrain.runner.start.links import ContainerLink, LaunchedLink, Link, ProcessLink, Share, command_of_agent
from ringtrain.runner.start.meeting import Meeting
from ringtrain.runner.start.placement import Discovery, DiscoveryError, HostPlacement
from ringtrain.runner.start.starter import RankStarter, Starter
from ringtrain.runner.supervise import process_tree
from ringtrain.runner.supervise.end_rule import MAX_GRACE_S
from ringtrain.runner.supervise.rank_wrapper import GRACE_VARIABLE, speaker

if TYPE_CHECKING:
    from ringtrain.runner.start.role_starter import RolePlace, Root

_HERE = Address("localhost")


def main() -> int:
    """Returns the exit code of the job."""
    kind, text, *command = sys.argv[1:]
    mains = {
        "ranks": _ranks,
        "elastic": _elastic,
        "roles": _roles,
        "yarn-ranks": _yarn_ranks,
        "yarn-roles": _yarn_roles,
    }
    with contextlib.suppress(BrokenPipeError):  # the reader has gone, and the agents go with this process
        return mains[kind](Job.from_json(text, command, os.environ))
    return 1


# --- what all of them need --------------------------------------------------------------------------------------------


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


def _place(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _order(job: Job, secret: bytes, place: str = "", host: str = "") -> Order:
    """Returns an order that starts nothing yet, in the current folder; `secret` is empty where the agent has it."""
    environment = {name: job.environment[name] for name in travelling(job.environment, job.exported)}
    return Order(job.command, environment, os.getcwd(), place, secret.hex(), host, has_wrappers=job.has_wrappers)


def _order_of_ranks(job: Job, secret: bytes, place: str, share: Share) -> Order:
    return _order(job, secret, place)._replace(first=share.first, ranks=share.ranks, size=job.num_proc)


def _grace_s() -> float:
    return float(os.environ.get(GRACE_VARIABLE, MAX_GRACE_S))


def _secret() -> bytes:
    """Returns that of a file if the user has named one, for processes that others start.

    Raises OSError and ValueError.
    """
    named = os.environ.get(FILE_VARIABLE)
    return read(Path(named)) if named else secrets.token_bytes(32)


def _run(starter: Starter[Any]) -> int:
    """Runs the job to its end, as its launcher. Returns its exit code."""
    starter.obey_signals()
    return starter.run()


def _complain(error: Exception) -> int:
    print(f"{speaker()}: {error}", file=sys.stderr, flush=True)
    return 1


def _listener(address: str, port: int = 0) -> socket.socket:
    """Returns a socket that listens there. Ends this process where it cannot."""
    try:
        return bound(address, port)
    except OSError as error:
        remedy = ""
        if error.errno == errno.EADDRINUSE:
            remedy = "; does another job meet there? Set RINGTRAIN_RENDEZVOUS to another port"
        elif error.errno == errno.EADDRNOTAVAIL and address == "127.0.0.1":
            remedy = "; `ip addr add 127.0.0.1/8 dev lo` gives loopback its address"
        sys.exit(_complain(OSError(f"cannot listen at {address}:{port}: {error.strerror}{remedy}")))


# --- ranks ------------------------------------------------------------------------------------------------------------


def _ranks(job: Job) -> int:
    shares = shares_of(job.num_proc, job.hosts)
    try:  # the pipes of an agent, and the connections of the ranks while they meet
        hosts = f"{len(shares)} host{'s' if len(shares) > 1 else ''}"
        process_tree.require_descriptors(3 * len(shares) + job.num_proc, f"{job.num_proc} ranks on {hosts}")
    except OSError as error:
        return _complain(ValueError(error.strerror))
    meeting = Meeting([share.host for share in shares], os.environ.get(INTERFACES_VARIABLE, ""))
    secret = secrets.token_bytes(32)
    server = Server(_listener(meeting.listens_at), secret)
    links: list[Link] = []
    for share in shares:
        link = ProcessLink(share, command_of_agent(share, os.environ, job.ssh_options))
        place = _place(meeting.address_for(share.host), server.port)
        link.order(_order_of_ranks(job, secret, place, share)._asdict())
        links.append(link)
    return _run(RankStarter(links, _grace_s()))


def _yarn_ranks(job: Job) -> int:
    from ringtrain.runner.start import yarn

    secret = secrets.token_bytes(32)

    def run(found: list[yarn.Arrival], here: yarn.Here) -> int:
        server = Server(_listener(here.listens_at), secret)
        links: list[Link] = []
        for rank, arrival in enumerate(found):
            share = Share(arrival.host, rank, 1, True)
            link = ContainerLink(share, arrival.way, arrival.container)
            link.order(_order_of_ranks(job, b"", _place(here.address, server.port), share)._asdict())
            links.append(link)
        return _run(RankStarter(links, _grace_s()))

    return yarn.with_containers(job.launcher_arguments, job.num_proc, secret, run)


# --- elastic jobs -----------------------------------------------------------------------------------------------------


def _elastic(job: Job) -> int:
    from ringtrain.job.sockets import PLACE_VARIABLE
    from ringtrain.runner.start.elastic_starter import starter_of

    terms = job.elastic
    assert terms is not None
    discovery = Discovery(terms.discovery_script, terms.slots) if terms.discovery_script is not None else None
    try:
        # a script that fails the first time is a mistake
        hosts = job.hosts if discovery is None else discovery.ask()
        secret = _secret()
    except (DiscoveryError, OSError, ValueError) as error:
        return _complain(error)
    may_others_come = discovery is not None or FILE_VARIABLE in os.environ
    interfaces = os.environ.get(INTERFACES_VARIABLE, "")
    meeting = Meeting([host.name for host in hosts], interfaces, may_others_come)
    listener = _listener(meeting.listens_at, int(os.environ.get(PLACE_VARIABLE, ":0").rpartition(":")[2]))

    def open_agent(host: str) -> Link:
        share = Share(host, 0, 0, not is_this_host(host))
        if job.launcher_arguments and share.is_remote:
            link: Link = LaunchedLink(share, job.launcher_arguments)
        else:
            link = ProcessLink(share, command_of_agent(share, os.environ, job.ssh_options))
        place = _place(meeting.address_for(host), listener.getsockname()[1])
        link.order(_order(job, secret, place, host)._asdict())
        return link

    placement = HostPlacement(hosts, open_agent, discovery, _may_hope(terms))
    return _run(starter_of(job.num_proc, terms, listener, secret, placement, _grace_s()))


def _may_hope(terms: ElasticTerms) -> bool:
    """Whether there may be more processes one day than the hosts have now, also if no other host is named."""
    return terms.cooldown_s is not None or FILE_VARIABLE in os.environ


# --- jobs with servers ------------------------------------------------------------------------------------------------


def _roles(job: Job) -> int:
    from ringtrain.runner.start.role_starter import RolePlace, open_root

    terms = job.roles
    assert terms is not None
    try:
        secret = _secret()
        root = open_root([address.host for address in terms.hosts], os.environ)
    except (OSError, ValueError) as error:
        return _complain(error)

    def place_of(process: RoleProcess) -> RolePlace:
        """The scheduler has the current folder, whatever that of the others is."""
        folder = os.getcwd() if process.role == SCHEDULER or terms.folder is None else terms.folder
        return RolePlace(host_of(process, terms.hosts, _HERE), folder)

    return _run_roles(job, secret, root, place_of)


def _yarn_roles(job: Job) -> int:
    """Starts the servers and workers in containers, and the scheduler here."""
    from ringtrain.runner.start import yarn
    from ringtrain.runner.start.role_starter import RolePlace, open_root

    assert job.roles is not None
    try:
        secret = _secret()
    except (OSError, ValueError) as error:
        return _complain(error)

    def run(found: list[yarn.Arrival], _here: yarn.Here) -> int:
        here = RolePlace(_HERE, os.getcwd())
        ways = {RolePlace(Address(arrival.host), os.getcwd(), arrival.container): arrival.way for arrival in found}
        in_order = list(ways)

        def place_of(process: RoleProcess) -> RolePlace:
            return here if process.role == SCHEDULER else in_order[process.number - 1]

        root = open_root([arrival.host for arrival in found], os.environ)
        return _run_roles(job, secret, root, place_of, ways)

    return yarn.with_containers(job.launcher_arguments, job.roles.cast.size - 1, secret, run)


def _run_roles(
    job: Job,
    secret: bytes,
    root: Root,
    place_of: Callable[[RoleProcess], RolePlace],
    ways: dict[RolePlace, socket.socket] | None = None,
) -> int:
    """`ways`: to the containers of YARN, of which one that has gone gives no other one."""
    from ringtrain.runner.start.role_starter import RoleStarter, variables_of

    terms = job.roles
    assert terms is not None
    of_cluster = {} if ways is None else {"DMLC_JOB_CLUSTER": "yarn"}

    def tell(process: RoleProcess, attempt: int) -> dict[str, str]:
        return {**variables_of(process, attempt, place_of(process).at.host, root, terms, os.environ), **of_cluster}

    def open_agent(place: RolePlace) -> Link:
        host = place.at.host
        order = _order(job, secret, host=host)._replace(folder=place.folder)
        if not place.container:
            share = Share(host, 0, 0, not is_this_host(host))
            link: Link = ProcessLink(share, command_of_agent(share, os.environ, place.at.ssh_options))
        elif ways and place in ways:
            link = ContainerLink(Share(host, 0, 0, True), ways.pop(place), place.container)
            order = order._replace(secret="")  # it is there already
        else:
            raise OSError(0, "is gone", f"container {place.container}")
        link.order(order._asdict())
        return link

    with root.holder:
        return _run(RoleStarter(terms, place_of, tell, open_agent, _grace_s()))
