"""Jobs whose processes come and go: this process at their rendezvous, and the generation that it is in."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

import ringtrain._core as _core
from ringtrain.errors import PeerLostError
from ringtrain.job import sockets
from ringtrain.job.interfaces import addresses_of
from ringtrain.job.reach import UnreachableError
from ringtrain.job.rendezvous.generations import Arrival
from ringtrain.job.rendezvous.secret import job_secret
from ringtrain.job.rendezvous.tether import AgainError, OverError, Seat, Tether
from ringtrain.job.world import SettingsError, World, introduce, node_name
from ringtrain.record.logger import logger

SWITCH = "RINGTRAIN_ELASTIC"
MEMBER_VARIABLE = "RINGTRAIN_MEMBER"

_tether: Tether | None = None
_seat: Seat | None = None
_commits = 0


def is_elastic(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process belongs to a job whose processes come and go."""
    return environ.get(SWITCH, "0") not in ("", "0")


def connect(
    comm: Any, settings: dict[str, str], read_tuned: Callable[[], dict[str, str]]
) -> tuple[World, dict[str, str]]:
    """The world of the generation that is formed next. It may take as long as others are at work in the one before.

    Raises:
        ValueError: what an elastic job cannot do.
        RuntimeError: no rendezvous is named, or MPI has been initialised in this process.
        StalledError, RingtrainError: the rendezvous cannot be reached; the job cannot go on, or not with this host.
        SystemExit: the job has come to its end.
    """
    global _seat
    _check(comm, settings)
    settings["network"] = "sockets"  # the same for those that ringrun has told so and those that come from outside
    tether = _tethered(settings)
    hosts = addresses_of(settings["socket_interfaces"]) or [tether.own_address]
    while True:
        must_keep_state = settings["on_state_lost"] == "fail"
        patience_s = float(settings["stall_shutdown_time_s"])
        arrival = Arrival(node_name(), os.getpid(), _commits, patience_s, must_keep_state)
        try:
            seat = tether.come(arrival)
            connected = _connect(tether, seat, hosts, settings, read_tuned)
        except AgainError:
            continue
        except OverError:
            logger.info("the job has come to its end, so this process ends, too")
            raise SystemExit(0) from None
        except (SettingsError, UnreachableError) as error:
            if seat.rank in error.ranks:
                raise
            continue  # without those
        _seat = seat
        return connected


def joined() -> None:
    """The init() of this process returns."""
    if _tether is not None and _seat is not None:
        _tether.joined(_seat.generation)


def ready() -> None:
    """This process waits for the others of its generation to train.

    Raises:
        PeerLostError: another one was lost meanwhile.
        RingtrainError: no rank has the state, and option on_state_lost says that the job ends then.
    """
    if _tether is None or _seat is None:
        return
    if not _seat.may_have_lost_state:
        _tether.ready(_seat.generation, _commits)
        return
    try:
        commits = _tether.verdict(_seat.generation, _commits)
    except AgainError:
        raise PeerLostError("another rank was lost before the training began") from None
    if _seat.rank == 0:
        _warn_of_lost_state(commits)


def set_commits(commits: int, *, are_read: bool = False) -> None:
    """Tell how new the state of this process is: the process with the newest one is rank 0 of the next generation.

    `are_read`: the state comes from a file, not from training.
    """
    global _commits
    _commits = commits
    if commits > 0 and not are_read and _tether is not None:
        _tether.committed()


def has_news() -> bool:
    """Whether this rank knows that others wait for the next generation, or that the hosts have changed."""
    return _tether is not None and _tether.has_news()


def seconds_lost() -> float:
    """In which ranks had been lost and the next generation had not begun to train; 0 in a job that is not elastic."""
    return 0.0 if _tether is None else _tether.seconds_lost()


def seat() -> Seat | None:
    """The place in the generation that this process is in or was in last; None in a job that is not elastic."""
    return _seat


def leave(failure: str) -> None:
    """The script ends: well, or by an exception, `failure`."""
    if _tether is None:
        return
    if failure:
        _tether.fail(failure)
    else:
        _tether.done()


def _check(comm: Any, settings: dict[str, str]) -> None:
    if comm:
        raise ValueError("init(comm=...): an elastic job has all ranks that live; make a process set of some")
    if settings["network"] == "mpi":
        raise ValueError("network=mpi: elastic jobs talk over sockets, since no MPI lets a job go on without a rank")
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_initialized() and MPI.COMM_WORLD.Get_size() > 1:
        raise RuntimeError(
            "this process has initialised MPI, whose launcher ends all ranks when one dies: an elastic job must not "
            "import mpi4py.MPI, or do it with mpi4py.rc.initialize = False"
        )


def _tethered(settings: dict[str, str]) -> Tether:
    global _tether
    if _tether is None:
        place = sockets.named_place()
        if place is None:
            raise RuntimeError(f"{SWITCH} is set, but not {sockets.PLACE_VARIABLE}: start with ringrun --min-np")
        member = os.environ.get(MEMBER_VARIABLE) or f"{socket.gethostname()}/{os.getpid()}-{secrets.token_hex(4)}"
        timeout_s = float(settings["start_timeout_s"])
        _tether = Tether(place, job_secret(str(place)), member, timeout_s, _core.report_loss, _warn_of_waiting)
    return _tether


def _warn_of_waiting(seconds: float) -> None:
    logger.warning(
        "all other ranks have waited %.0f s for this one, which is between init() and the training: do what takes long "
        "before init()",
        seconds,
    )


def _warn_of_lost_state(commits: int) -> None:
    if commits > 0:
        logger.warning("no rank had the state from training: training goes on from a file, at commit %d", commits)
    else:
        logger.warning(
            "no rank had the state: training begins at step 0. Use state.save_to() to go on from a file, or "
            "on_state_lost=fail to end the job"
        )


def _connect(
    tether: Tether,
    seat: Seat,
    hosts: list[str],
    settings: dict[str, str],
    read_tuned: Callable[[], dict[str, str]],
) -> tuple[World, dict[str, str]]:
    def exchange(value: Any) -> list[Any]:
        return tether.exchange(seat.generation, value)

    if seat.size > 1:
        secret, may_be_cut = tether.secret, seat.may_be_cut
        return sockets.connect_by(exchange, seat.rank, hosts, secret, settings, read_tuned, seat.slot, may_be_cut)
    world, tuned, _ = introduce(exchange, seat.rank, node_name(), settings, read_tuned, slot=seat.slot)
    return world, tuned
