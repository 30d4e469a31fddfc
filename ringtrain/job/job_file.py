"""The file by which `ringrun status` finds a job on this host: who its ranks are, and where and how to ask them.

The first rank of each host leaves it in a folder of this user, whatever has started the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import ringtrain._core as _core
from ringtrain.job import launched_by
from ringtrain.job.world import Address, Library, World
from ringtrain.record.folders import private_folder
from ringtrain.record.logger import logger
from ringtrain.version import __version__

# Set by ringrun in all processes of a job, also while its ranks change.
_JOB_VARIABLE = "RINGRUN_JOB"
_FOLDER = "ringtrain"
_ENDING = ".job"
_MANY = 32  # files of jobs in a folder

_own_file: str | None = None


def announce(world: World, generation: int | None) -> None:
    """Called by init(): answers from now on, and leaves the file. A job goes on without if that cannot be."""
    global _own_file
    answering = world.answering
    if answering is None:
        return
    here = [rank for rank, node in enumerate(world.nodes) if node == world.nodes[world.rank]]
    pids = {rank: world.names[rank][1] for rank in here}
    _core.start_answering(answering.listener.detach(), answering.secret, world.rank, pids)
    if world.local_ranks[world.rank] != 0:
        return
    try:
        _own_file = _write(_contents(world, answering.secret, answering.addresses, generation))
    except OSError as error:
        logger.info("`ringrun status` will not find this job on %s: %s", socket.gethostname(), error)


def stop_answering() -> None:
    """Called by shutdown()."""
    _core.stop_answering()


def remove() -> None:
    """Called when this process leaves the job for good."""
    global _own_file
    if _own_file is None:
        return
    with contextlib.suppress(OSError, ValueError, KeyError):
        if read(_own_file).left_by == [socket.gethostname(), os.getpid()]:  # else another host has the same folder
            os.unlink(_own_file)
    _own_file = None


def _contents(world: World, secret: bytes, addresses: list[Address], generation: int | None) -> dict[str, Any]:
    launch = launched_by.detect()
    return {
        "id": os.environ.get(_JOB_VARIABLE) or world.token,
        "command": command_of("self"),
        "folder": os.getcwd(),
        "since_s": time.time(),
        "launcher": launch.launcher if launch is not None else "",
        "network": "" if world.network is None else "mpi" if isinstance(world.network, Library) else "sockets",
        "generation": generation,
        "version": __version__,
        "left_by": [socket.gethostname(), os.getpid()],
        "secret": secret.hex(),
        "ranks": [
            {"host": host, "pid": pid, "node": node, "address": list(address)}
            for (host, pid), node, address in zip(world.names, world.nodes, addresses, strict=True)
        ],
    }


def command_of(pid: int | str) -> list[str]:
    """Returns the words of a command line; of a process that has ended none."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return os.fsdecode(file.read().rstrip(b"\0")).split("\0")
    return []


def _write(contents: dict[str, Any]) -> str:
    folder = _folder_for_writing()
    _remove_old_files(folder)
    path = os.path.join(folder, contents["id"] + _ENDING)
    draft = f"{path}.{socket.gethostname()}.{os.getpid()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(contents, file)
    os.replace(draft, path)
    return path


def _remove_old_files(folder: str) -> None:
    """Removes files of jobs that were killed on this host, if there are many."""
    paths = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(_ENDING)]
    for path in paths if len(paths) > _MANY else ():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            host, pid = read(path).left_by
            if host == socket.gethostname() and not os.path.exists(f"/proc/{pid}"):
                os.unlink(path)


def _folder_for_writing() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and _is_private(runtime):
        folder = os.path.join(runtime, _FOLDER)
        with contextlib.suppress(OSError):  # read-only, as in some containers
            os.makedirs(folder, mode=0o700, exist_ok=True)
            return folder
    return private_folder()


def _is_private(folder: str) -> bool:
    with contextlib.suppress(OSError):
        state = os.stat(folder)
        return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o077
    return False


# --- the side of those who ask ----------------------------------------------------------------------------------------


class Rank(NamedTuple):
    host: str
    pid: int
    node: int
    address: Address


class Job(NamedTuple):
    """The contents of a file."""

    path: str
    id: str
    command: list[str]
    folder: str
    since_s: float
    launcher: str
    network: str
    generation: int | None
    version: str
    left_by: list[Any]
    secret: bytes
    ranks: list[Rank]


def read(path: str) -> Job:
    """Raises OSError, and ValueError or KeyError for a file that is not one of a job."""
    with open(path) as file:
        contents = json.load(file)
    ranks = [Rank(one["host"], one["pid"], one["node"], Address(*one["address"])) for one in contents.pop("ranks")]
    secret = bytes.fromhex(contents.pop("secret"))
    return Job(path=path, secret=secret, ranks=ranks, **contents)


def jobs_here() -> Iterator[Job]:
    """The jobs that have left a file of this user on this host, whether they still run or not; the latest first."""
    found = {}
    for folder in _folders_for_reading():
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if name.endswith(_ENDING):
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    found[path] = read(path)
    yield from sorted(found.values(), key=lambda job: -job.since_s)


def _folders_for_reading() -> list[str]:
    """A batch system may have given the job other variables than this shell has."""
    uid = os.geteuid()
    runtimes = [os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{uid}"]
    temporary = [os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp", "/dev/shm"]
    folders = [os.path.join(folder, _FOLDER) for folder in runtimes if folder]
    folders += [os.path.join(folder, f"ringtrain-{uid}") for folder in temporary if folder]
    real = dict.fromkeys(os.path.realpath(folder) for folder in folders)
    return [folder for folder in real if _is_private(folder)]
