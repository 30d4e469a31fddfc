"""What a server that takes the place of a lost one goes on from: memory that workers shared with it, or a file."""

from __future__ import annotations

import itertools
import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ringtrain._core as _core
from ringtrain.job.world import node_name
from ringtrain.kvstore.servers.directory import MEMORY
from ringtrain.kvstore.servers.python_updates import PythonUpdates
from ringtrain.record.logger import logger
from ringtrain.record.whole_file import whole_file

# So many chunks are read at once: others change no more than these meanwhile.
_CHUNKS = 64
_FORMAT = b"ringtrain kvstore server 1"
# The member with optimizers in Python, where there are some.
_PYTHON = "python"
# In the place of the age of a snapshot: the server goes on with the memory of the one before, so nothing is lost.
KEPT = -1.0
_ENTRIES_AT_ONCE = 16
_IDENTITY_BITS = 40  # of a ticket, below the number of the descriptor

Find = Callable[[int, dict[str, int], float], dict[str, Any]]


def memory_name(server: int, worker: int, place: int) -> str:
    """Of the entry of the directory for the `place`-th part of a server that a worker shares, from 0 on."""
    return f"{server}/{worker}/{place}"


def memory_entry(store: int, number: int, spec: bytes, ticket: int) -> dict[str, Any]:
    """What the directory has of it, told by the process that shares it."""
    about = {"store": store, "number": number, "spec": spec.hex(), "ticket": ticket}
    return {"version": 1, "pid": os.getpid(), "node": node_name(), **about}


def adopt_memory(server: _core.StoreServer, number: int, workers: list[int], find: Find, patience_s: float) -> bool:
    """Have a new server go on with the memory of the one that it replaces, if living workers of this host have it all.
    Every push that a worker was told of is in it. Returns whether it does.
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
    """Whether that process still has the file; see `SharedSegment::ticket`."""
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
    """Of one server. Each is written beside the one before, which it then replaces.

    Args:
        interval_s: between two of them; 0 writes none.
    """

    def __init__(self, folder: str, server: int, interval_s: float) -> None:
        self._path = Path(folder) / f"store.{server}.snapshot"
        self._interval_s = interval_s if folder else 0.0
        self._due_s = time.monotonic() + self._interval_s
        self._has_failed = False  # the last time

    def write_if_due(self, server: _core.StoreServer, updates: PythonUpdates) -> None:
        """A disk that is full ends no training: it is told once, and again when it has been mended since."""
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
        """Give a new server what the last snapshot has. Returns how old that is, in seconds.

        Raises ValueError where there is none, or the file is something else.
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
