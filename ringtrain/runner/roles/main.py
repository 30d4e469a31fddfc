"""What ringlaunch starts for a job with servers: from the command line of the starter to its parts."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
from pathlib import Path

from ringtrain.job.rendezvous.secret import FILE_VARIABLE, read
from ringtrain.runner.allocation.hosts import is_this_host
from ringtrain.runner.launchers.travelling_variables import travelling
from ringtrain.runner.roles.addresses import Address
from ringtrain.runner.roles.cast import SCHEDULER, Process, host_of
from ringtrain.runner.roles.copies import ssh_options_of
from ringtrain.runner.roles.starter import GRACE_S, Place, RoleStarter
from ringtrain.runner.roles.terms import add_terms, terms_of
from ringtrain.runner.roles.variables import open_root, variables_of
from ringtrain.runner.start.agent import Order
from ringtrain.runner.start.link import Link, ProcessLink, Share, command_of_agent
from ringtrain.runner.supervise.rank_wrapper import GRACE_VARIABLE

_HERE = Address("localhost")


def main() -> int:
    """Returns the exit code of the job."""
    parser = argparse.ArgumentParser(description="What ringlaunch starts.", allow_abbrev=False)
    add_terms(parser)
    parser.add_argument("--exported", action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    terms = terms_of(arguments)
    named = os.environ.get(FILE_VARIABLE)
    try:
        # that of a file if the user has named one, for workers that others start
        secret = read(Path(named)) if named else secrets.token_bytes(32)
        root = open_root([address.host for address in terms.hosts], os.environ)
    except (OSError, ValueError) as error:
        print(f"ringlaunch: {error}", file=sys.stderr, flush=True)
        return 1
    environment = {name: os.environ[name] for name in travelling(os.environ, arguments.exported)}

    def place_of(process: Process) -> Place:
        """The scheduler has the current folder, whatever that of the others is."""
        folder = os.getcwd() if process.role == SCHEDULER or terms.folder is None else terms.folder
        return Place(host_of(process, terms.hosts, _HERE), folder)

    def tell(process: Process, attempt: int) -> dict[str, str]:
        return variables_of(process, attempt, place_of(process).at.host, root, terms, os.environ)

    def open_keeper(place: Place) -> Link:
        host = place.at.host
        share = Share(host, 0, 0, not is_this_host(host))
        link = ProcessLink(share, command_of_agent(share, os.environ, ssh_options_of(place.at)))
        order = Order(arguments.command, 0, 0, 0, "", secret.hex(), environment, place.folder, host)
        link.order(order._asdict())
        return link

    grace_s = float(os.environ.get(GRACE_VARIABLE, GRACE_S))
    with root.holder, contextlib.suppress(BrokenPipeError):  # whoever reads has gone, and the keepers with this process
        return RoleStarter(terms, place_of, tell, open_keeper, grace_s).run()
    return 1
