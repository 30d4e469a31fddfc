"""Starts a rank in each container, and ends with the last of them.

From the containers' arrival on all is as without YARN, where agents are reached by ssh.
"""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Mapping

from ringtrain.job.rendezvous.door import bound
from ringtrain.job.rendezvous.server import Server
from ringtrain.runner.launchers.travelling_variables import travelling
from ringtrain.runner.start.agent import Order
from ringtrain.runner.start.link import Share
from ringtrain.runner.start.starter import GRACE_AFTER_FAILURE_S, Starter
from ringtrain.runner.supervise.rank_wrapper import GRACE_VARIABLE
from ringtrain.runner.yarn.containers import Arrival, Here, add_words, with_containers
from ringtrain.runner.yarn.link import ContainerLink


def main() -> int:
    """Returns 0 where all ranks did."""
    parser = argparse.ArgumentParser(description="What ringrun starts for a job on YARN.", allow_abbrev=False)
    parser.add_argument("--num-proc", type=int, required=True)
    add_words(parser)
    arguments = parser.parse_args()
    secret = secrets.token_bytes(32)

    def run(found: list[Arrival], here: Here) -> int:
        server = Server(bound(here.listens_at, 0), secret)
        place = f"[{here.address}]:{server.port}" if ":" in here.address else f"{here.address}:{server.port}"
        environment = {name: os.environ[name] for name in travelling(os.environ, arguments.exported)}
        links = [_link(rank, arrival, place, environment, arguments) for rank, arrival in enumerate(found)]
        return Starter(links, float(os.environ.get(GRACE_VARIABLE, GRACE_AFTER_FAILURE_S))).run()

    return with_containers(arguments, arguments.num_proc, secret, "ringrun", run)


def _link(
    rank: int, arrival: Arrival, place: str, environment: Mapping[str, str], arguments: argparse.Namespace
) -> ContainerLink:
    link = ContainerLink(Share(arrival.host, rank, 1, True), arrival.way, arrival.container)
    # the secret is there already
    order = Order(arguments.command, rank, 1, arguments.num_proc, place, "", dict(environment), os.getcwd())
    link.order(order._asdict())
    return link
