"""Folders for files of this process and this user, also in containers without a home folder or a writable one."""

from __future__ import annotations

import functools
import os
import stat
import sys

IN_MEMORY = "/dev/shm"


def temporary_folder() -> str:
    """Returns the folder for temporary files; where none can be written to, that of shared memory.

    It is the folder that tempfile would choose, which is slow to import and writes a file in each.
    """
    chosen = getattr(sys.modules.get("tempfile"), "tempdir", None)
    if chosen:
        return os.fsdecode(chosen)
    named = map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))
    for folder in filter(None, (*named, "/tmp", "/var/tmp", "/usr/tmp")):
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            return os.path.abspath(folder)
    return IN_MEMORY


@functools.cache
def private_folder() -> str:
    """Returns a folder of this user on this host that nobody else can read or write, below the one for temporary files.

    Raises OSError where it cannot be made.
    """
    parent = temporary_folder()
    folder = os.path.join(parent, f"ringtrain-{os.geteuid()}")
    try:
        os.mkdir(folder, mode=0o700)
    except FileExistsError:
        state = os.lstat(folder)
        # Another user may have made it first, to have us obey the files in it.
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
            import tempfile  # slow

            return tempfile.mkdtemp(prefix="ringtrain-", dir=parent)
    return folder
