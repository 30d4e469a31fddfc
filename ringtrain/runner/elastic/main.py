"""What ringrun starts for an elastic job: from the command line of the starter to its parts."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ringtrain.job.interfaces import address_towards, addresses_of, usual_address
from ringtrain.job.rendezvous.door import bound
from ringtrain.job.rendezvous.elastic_server import ElasticServer
from ringtrain.job.rendezvous.generations import Limits
from ringtrain.job.rendezvous.secret import FILE_VARIABLE, read
from ringtrain.job.sockets import PLACE_VARIABLE
from ringtrain.runner.allocation.hosts import Host, is_this_host, parse_hosts
from ringtrain.runner.elastic.discovery import Discovery, DiscoveryError
from ringtrain.runner.elastic.fleet import Fleet
from ringtrain.runner.elastic.starter import ElasticStarter, Mail
from ringtrain.runner.elastic.terms import Terms, add_terms, terms_of
from ringtrain.runner.launchers.travelling_variables import travelling
from ringtrain.runner.start.agent import Order
from ringtrain.runner.start.link import Link, ProcessLink, Share, command_by_launcher, command_of_agent
from ringtrain.runner.start.starter import INTERFACES_VARIABLE
from ringtrain.runner.supervise.rank_wrapper import GRACE_VARIABLE

_NO_LIMIT = 1 << 30
_GRACE_S = 10.0
# A host that has vanished is found out in three seconds.
_SSH_ALIVE = ("-oServerAliveInterval=1", "-oServerAliveCountMax=3")


def main() -> int:
    """Returns the exit code of the job."""
    arguments = _parser().parse_args()
    terms = terms_of(arguments)
    discovery = Discovery(terms.discovery_script, terms.slots) if terms.discovery_script is not None else None
    try:
        hosts = _first_hosts(arguments, discovery)
        secret = _secret(os.environ)
    except (DiscoveryError, OSError, ValueError) as error:
        print(f"ringrun: {error}", file=sys.stderr, flush=True)
        return 1
    place = Place(hosts, discovery is not None or FILE_VARIABLE in os.environ, os.environ)
    mail = Mail()
    most = _NO_LIMIT if terms.most is None else terms.most
    limits = Limits(arguments.num_proc, terms.least, most, terms.timeout_s, terms.reset_limit)
    server = ElasticServer(bound(place.listens_at, place.port), secret, limits, mail.put)
    fleet = Fleet(arguments.num_proc, most, terms.cooldown_s)
    fleet.set_hosts(hosts)
    names = travelling(os.environ, arguments.exported)
    environment = {name: os.environ[name] for name in names}

    def order_for(host: str) -> Order:
        at = place.address_for(host)
        where = f"[{at}]:{server.port}" if ":" in at else f"{at}:{server.port}"
        return Order(arguments.command, 0, 0, 0, where, secret.hex(), environment, os.getcwd(), host)

    starter = ElasticStarter(
        fleet,
        server,
        mail,
        _opener(order_for, arguments.ssh_option, arguments.keeper_word),
        terms.least,
        _may_hope(terms, os.environ),
        float(os.environ.get(GRACE_VARIABLE, _GRACE_S)),
    )
    if discovery is not None:
        discovery.watch(mail.put)
    with contextlib.suppress(BrokenPipeError):  # whoever reads has gone, and the keepers with this process
        return starter.run()
    return 1


class Place:
    """Where the server listens, and the address of this host that the processes of each host reach it by."""

    def __init__(self, hosts: Sequence[Host], may_others_come: bool, environ: Mapping[str, str]):
        """Raises ValueError where RINGTRAIN_RENDEZVOUS, for processes that others start, has no port."""
        self._remote = [host.name for host in hosts if not is_this_host(host.name)]
        self._named = ""
        # this host may have none of them where it has no ranks
        with contextlib.suppress(ValueError):
            self._named = "".join(addresses_of(environ.get(INTERFACES_VARIABLE, ""))[:1])
        self._is_alone = not self._remote and not may_others_come
        self.port = int(environ.get(PLACE_VARIABLE, ":0").rpartition(":")[2])

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
        return address_towards(host)
    except OSError:
        return usual_address()  # ssh will say what is wrong


def _first_hosts(arguments: argparse.Namespace, discovery: Discovery | None) -> list[Host]:
    """Raises DiscoveryError: a script that fails the first time is a mistake."""
    if discovery is not None:
        return discovery.ask()
    return parse_hosts(arguments.hosts)


def _secret(environ: Mapping[str, str]) -> bytes:
    """That of a file if the user has named one, for processes that others start. Raises OSError and ValueError."""
    named = environ.get(FILE_VARIABLE)
    return read(Path(named)) if named else secrets.token_bytes(32)


def _may_hope(terms: Terms, environ: Mapping[str, str]) -> bool:
    """Whether there may be more processes one day than the hosts have now."""
    return terms.discovery_script is not None or terms.cooldown_s is not None or FILE_VARIABLE in environ


def _opener(
    order_for: Callable[[str], Order], ssh_options: Sequence[str], words: Sequence[str]
) -> Callable[[str], Link]:
    def open_keeper(host: str) -> Link:
        share = Share(host, 0, 0, not is_this_host(host))
        by_ssh = command_of_agent(share, os.environ, ssh_options, _SSH_ALIVE)
        link = ProcessLink(share, command_by_launcher(share, words) if words else by_ssh)
        link.order(order_for(host)._asdict())
        return link

    return open_keeper


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What ringrun starts for an elastic job.", allow_abbrev=False)
    parser.add_argument("--num-proc", type=int, required=True)
    parser.add_argument("--hosts")
    add_terms(parser)
    parser.add_argument("--ssh-option", action="append", default=[])
    parser.add_argument("--keeper-word", action="append", default=[])
    parser.add_argument("--exported", action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser
