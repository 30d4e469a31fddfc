"""Processes that are servers or the scheduler of their job, and nothing else."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import ringtrain._core as _core
from ringtrain.errors import PeerLostError, ShutDownError, StalledError
from ringtrain.kvstore.servers import roles
from ringtrain.kvstore.servers.arrival import (
    Arrival,
    arrive,
    make_scheduler,
    name_what_is_needless,
    secret_of,
    serve_metrics,
    socket_of_scheduler,
)
from ringtrain.kvstore.servers.core import make_server
from ringtrain.kvstore.servers.python_updates import COMMAND, PythonUpdates
from ringtrain.kvstore.servers.roles import SCHEDULER, SERVER, WORKER
from ringtrain.kvstore.servers.seat import Notice, World
from ringtrain.kvstore.servers.snapshots import KEPT, Snapshots, adopt_memory
from ringtrain.options import table
from ringtrain.record import metrics
from ringtrain.timeline.files import FIRST_SERVER, part_of_server

# What MXNet's servers do with a command of the user: head and body are those of send_command_to_servers.
Controller = Callable[[int, str], object]

NO_AUTOSERVE_VARIABLE = "RINGTRAIN_NO_AUTOSERVE"
_LOOK_S = 0.2
# The place of a worker that did not know what it was until the scheduler said so.
_worker: Arrival | None = None


def serve_if_told() -> None:
    """At the import of the package: a server or the scheduler serves, and then ends. Others go on."""
    global _worker
    if os.environ.get(NO_AUTOSERVE_VARIABLE, "") not in ("", "0") or "DMLC_PS_ROOT_URI" not in os.environ:
        return
    role = roles.of_environment()
    if role is None or role.name == WORKER:
        return
    if role.name:
        run_server()
        sys.exit(0)
    arrival = arrive(role, secret_of(role), _settings())
    if arrival.name == WORKER:
        _worker = arrival
        return
    serve(arrival)
    sys.exit(0)


def take_worker() -> Arrival | None:
    """The place that this process has already, if it has one; it belongs to the caller now."""
    global _worker
    taken, _worker = _worker, None
    return taken


def run_server(controller: Controller | None = None, *, role: str | None = None) -> None:
    """Serve until the job is over. Mirrors `mxnet.kvstore_server.KVStoreServer.run`.

    Args:
        controller: called with head and body of each command of `send_command_to_servers`.
        role: "server" or "scheduler"; by default DMLC_ROLE.

    Raises:
        ValueError: the environment does not say where the scheduler is, or the job has no place for this process.
        StalledError: not all workers and servers came in time (start_timeout_s).
        PeerLostError: the scheduler has died, or has expelled this process.
    """
    found = roles.of_environment(name=role)
    if found is None or found.name not in (SERVER, SCHEDULER):
        raise ValueError("run_server is for processes whose DMLC_ROLE is server or scheduler")
    settings = _settings()
    if found.name == SERVER:
        name_what_is_needless(int(float(settings["kv_verbose"])))
        serve(arrive(found, secret_of(found), settings), controller)
        return
    scheduler = make_scheduler(found, socket_of_scheduler(found), secret_of(found), settings)
    with _ends_by_signal(scheduler.end):
        while not scheduler.wait(_LOOK_S):
            pass
    scheduler.close()
    if scheduler.failure:
        raise StalledError(scheduler.failure)


def serve(arrival: Arrival, controller: Controller | None = None) -> None:
    """Be the server of this place until the job is over."""
    try:
        world = arrival.world()
        serve_metrics(arrival, world.workers + arrival.number)  # before anybody can ask for them
        server = make_server(arrival, world)
        _start_timeline(arrival, server)
        forget = metrics.count_store("kvstore_server", server.metrics)
        snapshots = _snapshots(arrival)
        updates = PythonUpdates(server, arrival.seat.find, arrival.settings["kv_python_updaters"] == "on")
        if world.is_recovery:
            _take_over(arrival, world, server, snapshots, updates)
    except ShutDownError:  # no worker wants a server
        arrival.seat.leave(0)
        return
    except BaseException as error:
        arrival.seat.fail(f"{type(error).__name__}: {error}")
        raise
    notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
    arrival.seat.listen_with(notices.put)
    try:
        _follow(arrival, server, snapshots, updates, notices, controller)
    except BaseException as error:
        arrival.seat.fail("".join(traceback.format_exception(error)).rstrip())
        raise
    finally:
        forget()
        metrics.stop_serving()
        server.close()
    arrival.seat.leave(0)


def _start_timeline(arrival: Arrival, server: _core.StoreServer) -> None:
    path, limit_mb = arrival.settings["timeline_filename"], float(arrival.settings["timeline_limit_mb"])
    if path:
        own, process = part_of_server(Path(path), arrival.number), f"server {arrival.number} on {socket.gethostname()}"
        server.start_timeline(str(own), FIRST_SERVER + arrival.number, process, limit_mb)


def _snapshots(arrival: Arrival) -> Snapshots:
    settings = arrival.settings
    return Snapshots(settings["kv_snapshot_dir"], arrival.number, float(settings["kv_snapshot_s"]))


def _take_over(
    arrival: Arrival, world: World, server: _core.StoreServer, snapshots: Snapshots, updates: PythonUpdates
) -> None:
    """Go on with what a lost server has left; then the workers may hear where this one is."""
    patience_s = float(arrival.settings["kv_timeout_s"])
    # Where nobody waits for another server, its workers end now, and their memory with them.
    may_adopt = float(arrival.settings["kv_rejoin_s"]) > 0 and arrival.settings["shared_memory"] == "auto"
    if may_adopt and adopt_memory(server, arrival.number, world.living, arrival.seat.find, patience_s):
        age_s, source = KEPT, "the memory that it shared with workers"
    else:
        age_s = snapshots.restore(server, updates)
        source = f"a snapshot of {age_s:.1f} s ago"
    for worker in set(range(world.capacity)) - set(world.living):
        server.lost(worker, world.terms[worker] + 1 if worker in world.terms else 0)
    for worker in world.living:
        server.back(worker, world.terms[worker])
    arrival.say(f"goes on from {source}")
    arrival.seat.be_ready(age_s)


def _follow(
    arrival: Arrival,
    server: _core.StoreServer,
    snapshots: Snapshots,
    updates: PythonUpdates,
    notices: queue.SimpleQueue[Notice],
    controller: Controller | None,
) -> None:
    while True:
        if updates.has_any():
            updates.carry_out()
        with contextlib.suppress(queue.Empty):
            notice = notices.get(timeout=0 if updates.has_any() else _LOOK_S)
            if notice["kind"] == "over":
                return
            _obey(arrival, server, notice, updates, controller)
        snapshots.write_if_due(server, updates)


def _obey(
    arrival: Arrival,
    server: _core.StoreServer,
    notice: Notice,
    updates: PythonUpdates,
    controller: Controller | None,
) -> None:
    kind = notice["kind"]
    if kind == "command":
        arrival.seat.obeyed(notice["order"], _carry_out(notice, updates, controller))
    elif kind == "gone":
        raise PeerLostError(notice["text"])
    elif notice["role"] == WORKER and kind in ("lost", "fenced"):
        server.lost(notice["number"], notice["term"] + 1)
    elif notice["role"] == WORKER and kind == "back":
        server.back(notice["number"], notice["term"])


def _carry_out(notice: Notice, updates: PythonUpdates, controller: Controller | None) -> str:
    """The traceback of what went wrong, or nothing."""
    head, body = int(notice["head"]), str(notice["body"])
    if head != COMMAND and controller is None:
        return "send_command_to_servers: this server has no controller; start servers with run_server(controller)"
    try:
        if head == COMMAND:
            updates.obey(body)
        elif controller is not None:
            controller(head, body)
    except Exception:
        return traceback.format_exc()
    return ""


@contextlib.contextmanager
def _ends_by_signal(end: Callable[[], object]) -> Iterator[None]:
    def on_signal(_number: int, _frame: FrameType | None) -> None:
        end()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _settings() -> dict[str, str]:
    return table.resolve({})
