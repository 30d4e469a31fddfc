"""The secret of a job: who knows it belongs to it. It is in files that this user alone can read, or a group of it."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from ringtrain._core import hmac_sha256
from ringtrain.record.folders import private_folder

if TYPE_CHECKING:
    from pathlib import Path

FILE_VARIABLE = "RINGTRAIN_SECRET_FILE"
# Set by agents beside it: that file, the descriptor of it that a rank inherits, and its device and inode, by which a
# process knows that the descriptor is still of this file.
DESCRIPTOR_VARIABLE = "_RINGTRAIN_SECRET_DESCRIPTOR"
_BYTES = 32
_MOST_BYTES = 1024


def job_secret(job: str, *, is_of_job: bool = False) -> bytes:
    """Returns the secret of the file that the launcher has named, else one of this user for `job`, or what meets there.

    Args:
        is_of_job: the file that is named is for several jobs, of which each has a secret of its own.

    Raises PermissionError as `read`, and OSError where it cannot be read or made.
    """
    given = _given()
    if given and not is_of_job:
        return given
    secret = given or read(_own_file())
    return hmac_sha256(secret, job.encode())


def _given() -> bytes | None:
    """Returns the secret that the launcher or the user has given; None if neither has."""
    named = os.environ.get(FILE_VARIABLE)
    if not named:
        return None
    path, *numbers = os.environ.get(DESCRIPTOR_VARIABLE, "").split() or [""]
    if path == named and len(numbers) == 3:
        descriptor, device, inode = map(int, numbers)
        with contextlib.suppress(OSError):  # closed, as by subprocess, which closes what it does not know
            state = os.fstat(descriptor)
            if (state.st_dev, state.st_ino) == (device, inode):
                return os.pread(descriptor, _MOST_BYTES, 0)
    from pathlib import Path  # slow, and a rank that has inherited the secret does not need it

    try:
        return read(Path(named))
    except FileNotFoundError as error:
        what = f"{FILE_VARIABLE} names the file of the secret of this job, which is not visible to this process"
        raise type(error)(error.errno, f"{what}; mount it here, or set {FILE_VARIABLE} to where it is", named) from None


def write(path: Path) -> None:
    """A new one. Raises FileExistsError where there is a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(os.urandom(_BYTES))


def read(path: Path) -> bytes:
    """The secret in a file. Raises PermissionError where others may read the file, or a group may change it.

    A group of this process may read it: Kubernetes gives a mounted secret the group of `fsGroup`.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        of_group, of_others = status.st_mode & stat.S_IRWXG, status.st_mode & stat.S_IRWXO
        is_of_own_group = of_group == stat.S_IRGRP and status.st_gid in {os.getegid(), *os.getgroups()}
        if of_others or (of_group and not is_of_own_group):
            raise PermissionError(
                f"{path} holds the secret of a job, but others may read it: chmod 600 {path}, or for a secret that "
                "Kubernetes mounts, defaultMode: 0400"
            )
        secret = file.read(_MOST_BYTES)
    if len(secret) < _BYTES:
        raise ValueError(f"{path} is to hold the secret of a job, but has less than {_BYTES} bytes")
    return secret


def _own_file() -> Path:
    """Returns the file of the user in the home folder; without a writable one, a file of this host.

    Raises OSError where no folder can be written to.
    """
    from pathlib import Path  # slow, as above

    path = Path("secret")
    with contextlib.suppress(RuntimeError, OSError):  # no entry in the list of users; not writable
        path = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "ringtrain" / path
        return _made(path)
    try:
        return _made(Path(private_folder(), "secret"))
    except OSError as error:
        text = f"{error.strerror}: no file for the secret can be made, here or as {path}; set {FILE_VARIABLE} to one"
        raise type(error)(error.errno, text, error.filename) from None


def _made(path: Path) -> Path:
    """The first process that needs the file makes it. Raises OSError."""
    if path.exists():
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"secret.{os.uname().nodename}.{os.getpid()}")
    write(draft)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # whole, and never over that of another process
    finally:
        draft.unlink()
    return path
