"""What the doctor finds of the job: which network it gets and why, and where its ranks run."""

from __future__ import annotations

import os
import socket
from typing import Any

from ringtrain.doctor import gpus
from ringtrain.doctor.gpus import Data
from ringtrain.errors import RingtrainError
from ringtrain.job import launched_by, network as job_network, sockets
from ringtrain.job.rendezvous.member import meet
from ringtrain.job.rendezvous.secret import job_secret
from ringtrain.job.world import Exchange, node_name
from ringtrain.options import table
from ringtrain.runner.hosts import UsageError
from ringtrain.runner.launchers import choose_network


def network(launch: launched_by.Launch | None) -> Data:
    """The network of this job and, where no launcher has started this process, that of one that ringrun would start.

    `over_mpi` says whether MPI brings the ranks together.
    """
    try:
        wanted = table.resolve({})["network"]
        chosen = job_network.choose(wanted, None, launch)
        of_ringrun = choose_network("auto") if launch is None else None
    except (ValueError, UsageError) as error:
        return {"network": None, "reason": str(error), "over_mpi": False, "of_ringrun": None, "error": str(error)}
    over_mpi = launch is not None and (chosen.network == "mpi" or not sockets.is_met_at_a_place(launch))
    of_ringrun_data = None if of_ringrun is None else of_ringrun._asdict()
    return {**chosen._asdict(), "over_mpi": over_mpi, "of_ringrun": of_ringrun_data, "error": None}


def topology_of_mpi(driver: Data) -> Data:
    """As `topology`, for all ranks of MPI_COMM_WORLD, which call it together."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    leader = node.bcast(world.rank)
    node.Free()
    return topology(world.allgather, world.rank, leader, driver)


def topology_of_sockets(launch: launched_by.Launch, driver: Data) -> Data:
    """As `topology`, for all ranks that meet at the rendezvous, which call it together.

    Raises what `meet` raises, RuntimeError where nothing says where that is, and OSError where there is no secret.
    """
    place, timeout_s = sockets.place_of(launch), float(table.resolve({})["start_timeout_s"])
    if launch.size is None:
        raise RuntimeError(f"{launch.launcher} does not say how many ranks there are")
    with meet(place, job_secret(str(place)), "doctor", launch.rank, launch.size, timeout_s) as member:
        return topology(member.exchange, launch.rank, node_name(), driver)


def topology(exchange: Exchange, rank: int, node: Any, driver: Data) -> Data:
    """The number of ranks, and of each node the host, its ranks, the CPUs that these may run on together, the GPU that
    each of them would take, and how many a rank sees.

    Args:
        node: the same on ranks of one node.
        driver: the topic `cuda`.
    """
    nodes = exchange(node)
    everybody = exchange(
        {
            "host": socket.gethostname(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "gpu": gpus.usual_gpu(nodes[:rank].count(node), driver),
            "visible_gpus": len(driver["gpus"]),
        }
    )
    ranks_of = {one: [rank for rank, its in enumerate(nodes) if its == one] for one in nodes}
    return {"size": len(nodes), "nodes": [_node(ranks, everybody) for ranks in ranks_of.values()]}


def _node(ranks: list[int], everybody: list[Data]) -> Data:
    of_ranks = [everybody[rank] for rank in ranks]
    return {
        "host": of_ranks[0]["host"],
        "ranks": ranks,
        "cpus": len(set().union(*(one["cpus"] for one in of_ranks))),
        "gpus": [one["gpu"] for one in of_ranks],
        "visible_gpus": max(one["visible_gpus"] for one in of_ranks),
    }


def find(launch: launched_by.Launch | None, library: Data, driver: Data, own_network: Data) -> Data | None:
    """The topology of the job; None where there is no launcher, or the ranks do not meet, which is an error then.

    Args:
        library, driver: the topics `mpi` and `cuda`.
        own_network: the topic `network`, whose error it sets.
    """
    if launch is None or own_network["error"]:
        return None
    if own_network["over_mpi"]:
        return topology_of_mpi(driver) if library.get("thread_level") else None
    try:
        return topology_of_sockets(launch, driver)
    except (RingtrainError, RuntimeError, OSError, ValueError) as error:
        own_network["error"] = str(error)
        return None


def text(data: Data) -> str:
    """One line for people."""
    if data["network"] is None:
        return "none"
    own = f"{data['network']}: {data['reason']}"
    of_ringrun = data["of_ringrun"]
    return own if of_ringrun is None else f"{own}; ringrun takes {of_ringrun['network']}: {of_ringrun['reason']}"
