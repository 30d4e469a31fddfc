"""Starts the servers and workers of ringlaunch in containers, and the scheduler here.

From the containers' arrival on all is as with ssh: each has a keeper, which starts a process that failed again.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

from ringtrain.job.rendezvous.secret import FILE_VARIABLE, read
from ringtrain.runner.launchers.travelling_variables import travelling
from ringtrain.runner.roles.addresses import Address
from ringtrain.runner.roles.cast import SCHEDULER, Process
from ringtrain.runner.roles.starter import GRACE_S, Place, RoleStarter
from ringtrain.runner.roles.terms import add_terms, terms_of
from ringtrain.runner.roles.variables import open_root, variables_of
from ringtrain.runner.start.agent import Order
from ringtrain.runner.start.link import Link, ProcessLink, Share, command_of_agent
from ringtrain.runner.supervise.rank_wrapper import GRACE_VARIABLE
from ringtrain.runner.yarn.containers import Arrival, Here, add_words, with_containers
from ringtrain.runner.yarn.link import ContainerLink

_SPEAKER = "ringlaunch"
_CLUSTER = {"DMLC_JOB_CLUSTER": "yarn"}


def main() -> int:
    """Returns the exit code of the job."""
    parser = argparse.ArgumentParser(description="What ringlaunch starts for a job on YARN.", allow_abbrev=False)
    add_terms(parser)
    add_words(parser)
    arguments = parser.parse_args()
    terms = terms_of(arguments)
    named = os.environ.get(FILE_VARIABLE)
    try:
        secret = read(Path(named)) if named else secrets.token_bytes(32)
    except (OSError, ValueError) as error:
        print(f"{_SPEAKER}: {error}", file=sys.stderr, flush=True)
        return 1
    environment = {name: os.environ[name] for name in travelling(os.environ, arguments.exported)}
    folder = os.getcwd()

    def run(found: list[Arrival], _here: Here) -> int:
        here = Place(Address("localhost"), folder)
        places = {Place(Address(arrival.host), folder, arrival.container): arrival for arrival in found}
        in_order = list(places)
        root = open_root([arrival.host for arrival in found], os.environ)

        def place_of(process: Process) -> Place:
            return here if process.role == SCHEDULER else in_order[process.number - 1]

        def tell(process: Process, attempt: int) -> dict[str, str]:
            host = place_of(process).at.host
            return {**variables_of(process, attempt, host, root, terms, os.environ), **_CLUSTER}

        def open_keeper(place: Place) -> Link:
            """A container that has gone gives no other one."""
            share = Share(place.at.host, 0, 0, place in places)
            order = Order(arguments.command, 0, 0, 0, "", secret.hex(), environment, folder, place.at.host)
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
        grace_s = float(os.environ.get(GRACE_VARIABLE, GRACE_S))
        with root.holder:
            return RoleStarter(terms, place_of, tell, open_keeper, grace_s).run()

    return with_containers(arguments, terms.cast.size - 1, secret, _SPEAKER, run)
