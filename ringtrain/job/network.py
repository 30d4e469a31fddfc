"""Chooses the network of this job, and joins it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from ringtrain import failure
from ringtrain.job import elastic_client, launched_by, mpi, sockets
from ringtrain.job.host import addresses_of
from ringtrain.job.launched_by import NetworkChoice
from ringtrain.job.world import Exchange, World, single_world
from ringtrain.record.logger import logger


class Meeting(NamedTuple):
    """How the workers of a job with servers meet, which no launcher of ranks has started."""

    rank: int
    exchange: Exchange
    address: str  # of this host, as the others know it
    secret: bytes


_count_workers: Callable[[], int] | None = None
_meet_workers: Callable[[dict[str, str]], Meeting] | None = None


def meet_workers_with(count: Callable[[], int], meet: Callable[[dict[str, str]], Meeting]) -> None:
    """Registers a function of a higher floor, called where no launcher of ranks has started this process.

    Args:
        count: returns how many workers the job with servers has that this process is a worker of; 0 if it is none.
        meet: takes part in it, with the options of init().
    """
    global _count_workers, _meet_workers
    _count_workers, _meet_workers = count, meet


class Exchanged(NamedTuple):
    """How the ranks of a job meet that have a way of their own to tell each other where they are."""

    rank: int
    size: int
    exchange: Exchange  # no other job may hear it


_exchanged: Exchanged | None = None


@contextmanager
def met_by(exchanged: Exchanged) -> Iterator[None]:
    """Within, init() makes a job over sockets of these ranks, whatever has started them."""
    global _exchanged
    _exchanged = exchanged
    try:
        yield
    finally:
        _exchanged = None


def workers() -> int:
    """How many workers the job with servers has that this process is a worker of, without a launcher of ranks; or 0."""
    return _count_workers() if _count_workers is not None else 0


def choose(settings: Mapping[str, str], comm: Any, launch: launched_by.Launch | None) -> NetworkChoice:
    """Returns what option `network` means for this process.

    Args:
        settings: every option.
        comm: what init() was given.
        launch: what `launched_by.detect` has found.

    Raises ValueError where connections are to be encrypted, but not to be sockets.
    """
    if elastic_client.is_elastic():
        return NetworkChoice("sockets", "this process belongs to an elastic job")
    if launch is None and not mpi.is_communicator(comm) and workers() > 1:
        return NetworkChoice("sockets", "DMLC_* variables make this process a worker of a job with servers")
    if launch is None and comm is None and "mpi4py.MPI" not in sys.modules:
        return NetworkChoice(
            "none", "a job of one rank, since no launcher such as ringrun or mpirun has started this process"
        )
    wanted, encrypts = settings["network"], settings["socket_encryption"] == "on"
    if encrypts and wanted == "mpi":
        raise ValueError("socket_encryption=on encrypts sockets, and nothing that MPI sends: leave out network=mpi")
    if encrypts:
        return NetworkChoice("sockets", "socket_encryption=on")
    if wanted != "auto":
        return NetworkChoice(wanted, f"network={wanted}")
    if mpi.is_communicator(comm):
        return NetworkChoice("mpi", "init(comm=...) was given a communicator of mpi4py")
    if launch is None:
        return NetworkChoice("mpi", "mpi4py.MPI is imported")
    if sockets.is_started_for_sockets(launch):
        return NetworkChoice("sockets", f"{launch.launcher} has started this process, without an MPI")
    if launch.launcher == launched_by.SlurmStep.NAME and importlib.util.find_spec("mpi4py") is None:
        return NetworkChoice("sockets", "Slurm has started this process, and mpi4py is not installed")
    if sockets.job_without_mpi4py(launch) is not None:
        return NetworkChoice("sockets", "mpirun has started all ranks on this host, and mpi4py is not installed")
    return NetworkChoice("mpi", f"{launch.launcher} has started this process")


def rank_of_all() -> int:
    """This process among all that its launcher has started; 0 without a launcher."""
    launch = launched_by.detect()
    return 0 if launch is None else launch.rank


def tell_all(value: Any, settings: dict[str, str]) -> list[Any]:
    """Returns what all processes that were started say, by rank, before some of them begin a job. All call it together.

    Raises as `mpi.tell_all` and `sockets.tell_all`.
    """
    launch = launched_by.detect()
    if elastic_client.is_elastic():
        raise ValueError("an elastic job has no ranks to set aside; start its servers with ringlaunch")
    if launch is None or choose(settings, None, launch).network == "none":
        return [value]
    failure.tell_exceptions()
    if sockets.is_met_at_a_place(launch) and choose(settings, None, launch).network == "sockets":
        return sockets.tell_all(launch, value, settings)
    return mpi.tell_all(value, settings)


def connect(
    comm: Any, settings: dict[str, str], read_tuned: Callable[[], dict[str, str]]
) -> tuple[World, dict[str, str]]:
    """The world that this process belongs to, and what `read_tuned` has returned on rank 0. All ranks call it together.

    Raises as `mpi.connect`, `sockets.connect` and `elastic_client.connect`.
    """
    if _exchanged is not None:
        if _exchanged.size == 1:
            return single_world(settings), {}
        failure.tell_exceptions()
        return sockets.connect_over(_exchanged.exchange, _exchanged.rank, settings, read_tuned)
    launch = launched_by.detect()
    network = choose(settings, comm, launch).network
    if network == "none":
        _warn_of_tasks()
        return single_world(settings), {}
    failure.tell_exceptions()  # a rank that fails while they meet would keep the others in MPI_Finalize
    if elastic_client.is_elastic():
        return elastic_client.connect(comm, settings, read_tuned)
    if network == "sockets" and launch is None and workers() > 1:
        return _connect_workers(comm, settings, read_tuned)
    if network == "sockets" and launch is not None and launch.size == 1 and comm is None:
        return single_world(settings), {}
    if network == "mpi" or launch is None or mpi.is_communicator(comm) or not sockets.is_met_at_a_place(launch):
        return mpi.connect(comm, settings, read_tuned, over_sockets=network == "sockets")
    if comm and int(float(settings["kv_servers"])):
        return sockets.connect(launch._replace(rank=comm.index(launch.rank), size=len(comm)), settings, read_tuned)
    if comm:
        _warn_of_others(comm, launch.rank)
    return sockets.connect(launch, settings, read_tuned)


def _warn_of_tasks() -> None:
    """sbatch runs its script once, whatever number of tasks was asked for."""
    tasks = os.environ.get("SLURM_NTASKS", "")
    if tasks.isdigit() and int(tasks) > 1:
        logger.warning(
            f"this process is a job of one rank, though Slurm has been asked for {tasks} tasks (SLURM_NTASKS): start "
            "the script with srun, or with ringrun"
        )


def _connect_workers(
    comm: Any, settings: dict[str, str], read_tuned: Callable[[], dict[str, str]]
) -> tuple[World, dict[str, str]]:
    """The workers of a job with servers are the ranks, by the numbers that they have there."""
    if settings["network"] == "mpi":
        raise ValueError(
            "network=mpi, but DMLC_* variables and no MPI have started this worker; leave out network, or start the "
            "workers with mpirun"
        )
    assert _meet_workers is not None
    meeting = _meet_workers(settings)
    if comm:
        _warn_of_others(comm, meeting.rank)
    hosts = addresses_of(settings["socket_interfaces"]) or [meeting.address]
    return sockets.connect_by(meeting.exchange, meeting.rank, hosts, meeting.secret, settings, read_tuned)


def _warn_of_others(comm: Any, rank: int) -> None:
    if rank == 0:
        logger.warning(
            f"init(comm={list(comm)}): over sockets a job has all ranks that were started, as in Horovod without MPI. "
            "Make a process set of some, or start with mpirun"
        )
