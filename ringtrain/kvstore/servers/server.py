"""Processes that are only a server or the scheduler of their job."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import socket
import sys
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import ringtrain._core as _core
from ringtrain.errors import PeerLostError, ShutDownError, StalledError
from ringtrain.job.world import node_name
from ringtrain.kvstore.servers import roles
from ringtrain.kvstore.servers.arrival import (
    Arrival,
    arrive,
    make_scheduler,
    make_server,
    name_what_is_needless,
    secret_of,
    serve_metrics,
    socket_of_scheduler,
)
from ringtrain.kvstore.servers.membership import MEMORY
from ringtrain.kvstore.servers.python_updates import COMMAND, PythonUpdates
from ringtrain.kvstore.servers.roles import SCHEDULER, SERVER, WORKER
from ringtrain.kvstore.servers.scheduler_client import Notice, World
from ringtrain.options import table
from ringtrain.pickling import whole_file
from ringtrain.record import metrics
from ringtrain.record.logger import logger
from ringtrain.record.timeline_files import FIRST_SERVER, part_of_server

# Chunks that are read at once: others change no more than these meanwhile.
_CHUNKS = 64
_FORMAT = b"ringtrain kvstore server 2"
# The member with optimizers in Python, if any.
_PYTHON = "python"
# Instead of the age of a snapshot: the server continues with the memory of its predecessor, so nothing is lost.
KEPT = -1.0
_ENTRIES_AT_ONCE = 16
_IDENTITY_BITS = 40  # of a ticket, below the number of the descriptor

Find = Callable[[int, dict[str, int], float], dict[str, Any]]


def memory_name(server: int, worker: int, place: int) -> str:
    """Returns the name of the directory's entry for the `place`-th part of a server that a worker shares, from 0 on."""
    return f"{server}/{worker}/{place}"


def memory_entry(store: int, number: int, spec: bytes, ticket: int) -> dict[str, Any]:
    """Returns the entry of the directory for memory that this process shares."""
    about = {"store": store, "number": number, "spec": spec.hex(), "ticket": ticket}
    return {"version": 1, "pid": os.getpid(), "node": node_name(), **about}


def adopt_memory(server: _core.StoreServer, number: int, workers: list[int], find: Find, patience_s: float) -> bool:
    """Makes a new server continue with the memory of its predecessor, if living workers of this host have all of it.

    The memory has every push that a worker knows to be complete. Returns whether the server uses it.
    """
    found: dict[tuple[int, int], tuple[int, int, bytes, int, int]] = {}
    for worker in workers:
        for one in _memory_of(number, worker, find, patience_s):
            if one["node"] == node_name() and _is_there(int(one["pid"]), int(one["ticket"])):
                place = int(one["store"]), int(one["number"])
                found[place] = (*place, bytes.fromhex(one["spec"]), int(one["pid"]), int(one["ticket"]))
    if not found:
        return False
    try:
        server.adopt([found[place] for place in sorted(found)])
    except RuntimeError as error:
        logger.warning(f"server {number} cannot go on with the memory of the one before it: {error}")
        return False
    return True


def _is_there(pid: int, ticket: int) -> bool:
    """Whether that process still has the file open; see `SharedSegment::ticket`."""
    return os.path.exists(f"/proc/{pid}/fd/{ticket >> _IDENTITY_BITS}")


def _memory_of(server: int, worker: int, find: Find, patience_s: float) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for first in itertools.count(0, _ENTRIES_AT_ONCE):
        names = [memory_name(server, worker, first + i) for i in range(_ENTRIES_AT_ONCE)]
        known = find(MEMORY, dict.fromkeys(names, 0), patience_s)
        entries += [known[name] for name in names if known[name] is not None]
        if known[names[-1]] is None:
            break
    return entries


class Snapshots:
    """The snapshots of one server. Each is written beside the previous one, which it then replaces.

    Args:
        interval_s: the time between two snapshots; 0 writes none.
    """

    def __init__(self, folder: str, server: int, interval_s: float) -> None:
        self._path = Path(folder) / f"store.{server}.snapshot"
        self._interval_s = interval_s if folder else 0.0
        self._due_s = time.monotonic() + self._interval_s
        self._has_failed = False  # at the last attempt

    def write_if_due(self, server: _core.StoreServer, updates: PythonUpdates) -> None:
        """Writes a snapshot if one is due. Warns of a full disk once, and again after a snapshot that was written."""
        if self._interval_s == 0 or time.monotonic() < self._due_s:
            return
        try:
            self.write(server, updates)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    f"{self._path} cannot be written: {error.strerror or error}; this server goes on with the snapshot "
                    "before, and tries again"
                )
            self._has_failed = True
        self._due_s = time.monotonic() + self._interval_s

    def write(self, server: _core.StoreServer, updates: PythonUpdates) -> None:
        """Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(self._path) as file, zipfile.ZipFile(file, "w") as members:
            members.writestr("format", _FORMAT)
            if updates.has_any():
                members.writestr(_PYTHON, updates.saved())
            for part, (store, chunks) in enumerate(server.parts()):
                members.writestr(f"{part}/store", str(store))
                members.writestr(f"{part}/description", server.describe(part))
                with members.open(f"{part}/chunks", "w", force_zip64=True) as member:
                    for first in range(0, chunks, _CHUNKS):
                        data = server.read(part, first, min(chunks, first + _CHUNKS))
                        member.write(len(data).to_bytes(8, "big") + data)

    def restore(self, server: _core.StoreServer, updates: PythonUpdates) -> float:
        """Gives a new server the values of the last snapshot. Returns its age in seconds.

        Raises ValueError without a snapshot, or if the file is not a snapshot.
        """
        if self._interval_s == 0 or not self._path.exists():
            raise ValueError(
                "another server cannot come in the place of a lost one without a snapshot: its values are gone; set "
                "kv_snapshot_dir and kv_snapshot_s from the beginning"
            )
        age_s = time.time() - self._path.stat().st_mtime
        try:
            with zipfile.ZipFile(self._path) as members:
                self._restore(server, members)
                if _PYTHON in members.namelist():
                    updates.restore(members.read(_PYTHON))
        except (zipfile.BadZipFile, KeyError, RuntimeError) as error:
            raise ValueError(f"{self._path} is no snapshot of a server: {error}") from None
        return age_s

    def _restore(self, server: _core.StoreServer, members: zipfile.ZipFile) -> None:
        if members.read("format") != _FORMAT:
            raise KeyError("it has another format")
        names, part = set(members.namelist()), 0
        while f"{part}/store" in names:
            server.restore(int(members.read(f"{part}/store")), members.read(f"{part}/description"))
            first = 0
            with members.open(f"{part}/chunks") as member:
                while size := member.read(8):
                    first = server.write(part, first, member.read(int.from_bytes(size, "big")))
            part += 1


# Called with a command of the user: head and body of send_command_to_servers.
Controller = Callable[[int, str], object]

NO_AUTOSERVE_VARIABLE = "RINGTRAIN_NO_AUTOSERVE"
_LOOK_S = 0.2
# The place of a worker whose role the scheduler has chosen.
_worker: Arrival | None = None


def serve_if_told() -> None:
    """Called at the import of the package: a server or the scheduler serves and ends. Other processes go on."""
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
    """Returns the place that this process already has, if any; owned by the caller now."""
    global _worker
    taken, _worker = _worker, None
    return taken


def run_server(controller: Controller | None = None, *, role: str | None = None) -> None:
    """Serve until the job is over. Mirrors `mxnet.kvstore_server.KVStoreServer.run`.

    Args:
        controller: called with head and body of each command of `send_command_to_servers`.
        role: "server" or "scheduler"; by default DMLC_ROLE.

    Raises:
        ValueError: a variable for the scheduler is missing, or the job has no place for this process.
        StalledError: not all workers and servers came in time (start_timeout_s), or, in the scheduler, none of them.
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
    secret = secret_of(found)
    scheduler = make_scheduler(found, socket_of_scheduler(found, secret, settings), secret, settings)
    with _ends_by_signal(scheduler.end):
        while not scheduler.wait(_LOOK_S):
            pass
    scheduler.close()
    if scheduler.failure:
        raise StalledError(scheduler.failure)


def serve(arrival: Arrival, controller: Controller | None = None) -> None:
    """Serves until the job is over."""
    try:
        world = arrival.world()
        serve_metrics(arrival, world.workers + arrival.number)  # before the first request for them
        server = make_server(arrival, world)
        _start_timeline(arrival, server)
        forget = metrics.count_store("kvstore_server", server.metrics)
        snapshots = _snapshots(arrival)
        updates = PythonUpdates(server, arrival.scheduler_client.find, arrival.settings["kv_python_updaters"] == "on")
        if world.is_recovery:
            _take_over(arrival, world, server, snapshots, updates)
    except ShutDownError:  # no worker needs a server
        arrival.scheduler_client.leave(0)
        return
    except BaseException as error:
        arrival.scheduler_client.fail(f"{type(error).__name__}: {error}")
        raise
    notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
    arrival.scheduler_client.listen_with(notices.put)
    try:
        _follow(arrival, server, snapshots, updates, notices, controller)
    except BaseException as error:
        arrival.scheduler_client.fail("".join(traceback.format_exception(error)).rstrip())
        raise
    finally:
        forget()
        metrics.stop_serving()
        server.close()
    arrival.scheduler_client.leave(0)


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
    """Continues with the values of a lost server, and then tells the workers where this one is."""
    patience_s = float(arrival.settings["kv_timeout_s"])
    server.begin_recovery()
    # Without kv_rejoin_s the workers end with a lost server, and their memory with them.
    may_adopt = float(arrival.settings["kv_rejoin_s"]) > 0 and arrival.settings["shared_memory"] == "auto"
    if may_adopt and adopt_memory(server, arrival.number, world.living, arrival.scheduler_client.find, patience_s):
        age_s, source = KEPT, "the memory that it shared with workers"
    else:
        age_s = snapshots.restore(server, updates)
        source = f"a snapshot of {age_s:.1f} s ago"
    for worker in set(range(world.capacity)) - set(world.living):
        first_term = world.terms[worker] + 1 if worker in world.terms else 0
        server.lost(worker, first_term)
    for worker in world.living:
        server.back(worker, world.terms[worker])
    arrival.say(f"goes on from {source}")
    arrival.scheduler_client.be_ready(age_s)


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
        arrival.scheduler_client.obeyed(notice["order"], _carry_out(notice, updates, controller))
    elif kind == "gone":
        raise PeerLostError(notice["text"])
    elif notice["role"] == WORKER and kind in ("lost", "fenced"):
        server.lost(notice["number"], notice["term"] + 1)
    elif notice["role"] == WORKER and kind == "left":
        server.left(notice["number"])
    elif notice["role"] == WORKER and kind == "back":
        server.back(notice["number"], notice["term"])


def _carry_out(notice: Notice, updates: PythonUpdates, controller: Controller | None) -> str:
    """Carries out a command. Returns the traceback of its error, or an empty string."""
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
