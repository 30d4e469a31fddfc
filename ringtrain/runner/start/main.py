"""From the command line of a starter to its parts: `ranks`, `elastic`, `roles`, and the first and the last on YARN.

Each kind imports what it alone needs, so that ranks start soon.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain.job.host import INTERFACES_VARIABLE, address_towards, addresses_of, usual_address
from ringtrain.job.rendezvous.listener import bound
from ringtrain.job.rendezvous.secret import FILE_VARIABLE, read
from ringtrain.job.rendezvous.server import Server
from ringtrain.runner.hosts import Host, is_this_host, parse_hosts, travelling, without_user
from ringtrain.runner.job import (
    SCHEDULER,
    Address,
    ElasticTerms,
    RoleProcess,
    RoleTerms,
    host_of,
)
from ringtrain.runner.start.agent import Order
from ringtrain.runner.start.links import ContainerLink, LaunchedLink, Link, ProcessLink, Share, command_of_agent
from ringtrain.runner.start.placement import Discovery, DiscoveryError, HostPlacement, Placement
from ringtrain.runner.start.starter import RankStarter, Starter
from ringtrain.runner.supervise.end_rule import MAX_GRACE_S
from ringtrain.runner.supervise.rank_wrapper import GRACE_VARIABLE, speaker

if TYPE_CHECKING:
    from ringtrain.runner.start.role_starter import RolePlace

_NO_LIMIT = 1 << 30
# ssh ends the link to a lost host of an elastic job after 3 s.
_SSH_ALIVE_IF_ELASTIC = ("-oServerAliveInterval=1", "-oServerAliveCountMax=3")
_HERE = Address("localhost")


def main() -> int:
    """Returns the exit code of the job."""
    kind = sys.argv.pop(1)
    mains = {
        "ranks": _ranks,
        "elastic": _elastic,
        "roles": _roles,
        "yarn-ranks": _yarn_ranks,
        "yarn-roles": _yarn_roles,
    }
    with contextlib.suppress(BrokenPipeError):  # the reader has gone, and the agents go with this process
        return mains[kind]()
    return 1


# --- what all of them need --------------------------------------------------------------------------------------------


class Meeting:
    """Has the address where the server listens, and the one by which the processes of each host reach it."""

    def __init__(self, hosts: Sequence[str], interfaces: str, may_others_come: bool = False):
        """
        Args:
            interfaces: those that the user has named, if any.
            may_others_come: whether processes may come from hosts that are not known yet.
        """
        self._remote = [host for host in hosts if not is_this_host(host)]
        self._named = ""
        # this host may have none of them where it has no ranks
        with contextlib.suppress(ValueError):
            self._named = "".join(addresses_of(interfaces)[:1])
        self._is_alone = not self._remote and not may_others_come

    @property
    def listens_at(self) -> str:
        if self._is_alone:
            return "127.0.0.1"
        is_of_6 = any(":" in self.address_for(host) for host in self._remote)
        return self._named or ("::" if is_of_6 else "0.0.0.0")

    def address_for(self, host: str) -> str:
        if self._is_alone:
            return "127.0.0.1"
        if self._named:
            return self._named
        if not is_this_host(host):
            return _address_towards(host)
        # ranks that others are to reach tell them the address that they have met at
        return _address_towards(self._remote[0]) if self._remote else usual_address()


def _address_towards(host: str) -> str:
    try:
        return address_towards(without_user(host))
    except OSError:
        return usual_address()  # ssh will say what is wrong


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


def _environment(exported: Sequence[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in travelling(os.environ, exported)}


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


def _parser(*lists: str) -> argparse.ArgumentParser:
    """Returns a parser of these flags, which may be repeated, and of the command."""
    parser = argparse.ArgumentParser(description="The starter of ringrun and ringlaunch.", allow_abbrev=False)
    for name in (*lists, "--exported"):
        parser.add_argument(name, action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


# --- ranks ------------------------------------------------------------------------------------------------------------


def _ranks() -> int:
    parser = _parser("--ssh-option")
    parser.add_argument("--num-proc", type=int, required=True)
    parser.add_argument("--hosts")
    arguments = parser.parse_args()
    shares = shares_of(arguments.num_proc, parse_hosts(arguments.hosts) if arguments.hosts else [])
    meeting = Meeting([share.host for share in shares], os.environ.get(INTERFACES_VARIABLE, ""))
    secret = secrets.token_bytes(32)
    server = Server(_listener(meeting.listens_at), secret)
    environment = _environment(arguments.exported)

    def order_of(share: Share) -> Order:
        place = _place(meeting.address_for(share.host), server.port)
        words = arguments.command, share.first, share.ranks, arguments.num_proc
        return Order(*words, place, secret.hex(), environment, os.getcwd())

    def link_to(share: Share) -> Link:
        return ProcessLink(share, command_of_agent(share, os.environ, arguments.ssh_option))

    placement = HostPlacement([Host(share.host, share.ranks) for share in shares], link_to, order_of)
    return _run(RankStarter(_links(placement), _grace_s()))


def _links(placement: Placement) -> list[Link]:
    """Returns a link to each host, all of whose slots have ranks."""
    links: list[Link] = []
    first = 0
    for host in placement.hosts():
        links.append(placement.open_agent(host.name, first, host.slots))
        first += host.slots
    return links


def _yarn_ranks() -> int:
    from ringtrain.runner.start import yarn

    parser = _parser("--client-word")
    parser.add_argument("--num-proc", type=int, required=True)
    yarn.add_words(parser)
    arguments = parser.parse_args()
    secret = secrets.token_bytes(32)

    def run(found: list[yarn.Arrival], here: yarn.Here) -> int:
        server = Server(_listener(here.listens_at), secret)
        place, environment = _place(here.address, server.port), _environment(arguments.exported)

        def order_of(share: Share) -> Order:
            """The secret is there already."""
            words = arguments.command, share.first, share.ranks, arguments.num_proc
            return Order(*words, place, "", environment, os.getcwd())

        return _run(RankStarter(_links(yarn.ContainerPlacement(found, order_of)), _grace_s()))

    return yarn.with_containers(arguments, arguments.num_proc, secret, run)


# --- elastic jobs -----------------------------------------------------------------------------------------------------


def _elastic() -> int:
    from ringtrain.job.rendezvous.elastic_server import ElasticServer
    from ringtrain.job.rendezvous.generations import Limits
    from ringtrain.job.sockets import PLACE_VARIABLE
    from ringtrain.runner.start.elastic_starter import ElasticStarter, Fleet, Mail

    parser = _parser("--ssh-option", "--agent-word")
    parser.add_argument("--num-proc", type=int, required=True)
    parser.add_argument("--hosts")
    parser.add_argument("--terms", type=ElasticTerms.from_json, required=True)
    arguments = parser.parse_args()
    terms: ElasticTerms = arguments.terms
    discovery = Discovery(terms.discovery_script, terms.slots) if terms.discovery_script is not None else None
    try:
        # a script that fails the first time is a mistake
        hosts = parse_hosts(arguments.hosts) if discovery is None else discovery.ask()
        secret = _secret()
    except (DiscoveryError, OSError, ValueError) as error:
        return _complain(error)
    may_others_come = discovery is not None or FILE_VARIABLE in os.environ
    interfaces = os.environ.get(INTERFACES_VARIABLE, "")
    meeting = Meeting([host.name for host in hosts], interfaces, may_others_come)
    port = int(os.environ.get(PLACE_VARIABLE, ":0").rpartition(":")[2])
    mail = Mail()
    most = _NO_LIMIT if terms.most is None else terms.most
    limits = Limits(arguments.num_proc, terms.least, most, terms.timeout_s, terms.reset_limit)
    server = ElasticServer(_listener(meeting.listens_at, port), secret, limits, mail.put)
    fleet = Fleet(arguments.num_proc, most, terms.cooldown_s)
    fleet.set_hosts(hosts)
    environment = _environment(arguments.exported)

    def order_of(share: Share) -> Order:
        place = _place(meeting.address_for(share.host), server.port)
        return Order(arguments.command, 0, 0, 0, place, secret.hex(), environment, os.getcwd(), share.host)

    def link_to(share: Share) -> Link:
        if arguments.agent_word and share.is_remote:
            return LaunchedLink(share, arguments.agent_word)
        return ProcessLink(share, command_of_agent(share, os.environ, arguments.ssh_option, _SSH_ALIVE_IF_ELASTIC))

    placement = HostPlacement(hosts, link_to, order_of, discovery, _may_hope(terms))
    starter = ElasticStarter(fleet, server, mail, placement, terms.least, _grace_s())
    placement.watch(mail.put)
    return _run(starter)


def _may_hope(terms: ElasticTerms) -> bool:
    """Whether there may be more processes one day than the hosts have now, also if no other host is named."""
    return terms.cooldown_s is not None or FILE_VARIABLE in os.environ


# --- jobs with servers ------------------------------------------------------------------------------------------------


def _roles() -> int:
    from ringtrain.runner.start.role_starter import RolePlace, RoleStarter, open_root, variables_of

    parser = _parser()
    parser.add_argument("--terms", type=RoleTerms.from_json, required=True)
    arguments = parser.parse_args()
    terms: RoleTerms = arguments.terms
    try:
        secret = _secret()
        root = open_root([address.host for address in terms.hosts], os.environ)
    except (OSError, ValueError) as error:
        return _complain(error)
    environment = _environment(arguments.exported)

    def place_of(process: RoleProcess) -> RolePlace:
        """The scheduler has the current folder, whatever that of the others is."""
        folder = os.getcwd() if process.role == SCHEDULER or terms.folder is None else terms.folder
        return RolePlace(host_of(process, terms.hosts, _HERE), folder)

    def tell(process: RoleProcess, attempt: int) -> dict[str, str]:
        return variables_of(process, attempt, place_of(process).at.host, root, terms, os.environ)

    def open_agent(place: RolePlace) -> Link:
        host = place.at.host
        share = Share(host, 0, 0, not is_this_host(host))
        link = ProcessLink(share, command_of_agent(share, os.environ, place.at.ssh_options))
        link.order(_order_of_roles(arguments.command, secret, environment, place)._asdict())
        return link

    with root.holder:
        return _run(RoleStarter(terms, place_of, tell, open_agent, _grace_s()))


def _order_of_roles(command: list[str], secret: bytes, environment: Mapping[str, str], place: RolePlace) -> Order:
    return Order(command, 0, 0, 0, "", secret.hex(), dict(environment), place.folder, place.at.host)


def _yarn_roles() -> int:
    """Starts the servers and workers in containers, and the scheduler here."""
    from ringtrain.runner.start import yarn
    from ringtrain.runner.start.role_starter import RolePlace, RoleStarter, open_root, variables_of

    parser = _parser("--client-word")
    parser.add_argument("--terms", type=RoleTerms.from_json, required=True)
    yarn.add_words(parser)
    arguments = parser.parse_args()
    terms: RoleTerms = arguments.terms
    try:
        secret = _secret()
    except (OSError, ValueError) as error:
        return _complain(error)
    environment = _environment(arguments.exported)
    folder = os.getcwd()

    def run(found: list[yarn.Arrival], _here: yarn.Here) -> int:
        here = RolePlace(_HERE, folder)
        places = {RolePlace(Address(arrival.host), folder, arrival.container): arrival for arrival in found}
        in_order = list(places)
        root = open_root([arrival.host for arrival in found], os.environ)

        def place_of(process: RoleProcess) -> RolePlace:
            return here if process.role == SCHEDULER else in_order[process.number - 1]

        def tell(process: RoleProcess, attempt: int) -> dict[str, str]:
            told = variables_of(process, attempt, place_of(process).at.host, root, terms, os.environ)
            return {**told, "DMLC_JOB_CLUSTER": "yarn"}

        def open_agent(place: RolePlace) -> Link:
            """A container that has gone gives no other one."""
            share = Share(place.at.host, 0, 0, place in places)
            order = _order_of_roles(arguments.command, secret, environment, place)
            link: Link
            if place == here:
                link = ProcessLink(share, command_of_agent(share, os.environ, []))
            elif place in left:
                link = ContainerLink(share, left.pop(place).way, place.container)
                order = order._replace(secret="")  # it is there already
            else:
                raise OSError(0, "is gone", f"container {place.container}")
            link.order(order._asdict())
            return link

        left = dict(places)
        with root.holder:
            return _run(RoleStarter(terms, place_of, tell, open_agent, _grace_s()))

    return yarn.with_containers(arguments, terms.cast.size - 1, secret, run)
