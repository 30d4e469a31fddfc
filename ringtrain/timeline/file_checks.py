"""The place of a timeline before it begins: whether files can be there, and what an earlier job has left there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ringtrain.errors import RingtrainError
from ringtrain.timeline.files import other_parts


def check(path: Path, given_as: str) -> None:
    """Whether this rank can have a file there; `given_as` is the option or argument that the message names.

    Raises:
        RingtrainError: there is something that is no file, or the folder is not there or may not be written to.
    """
    folder = path.absolute().parent
    mode = _mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise RingtrainError(f"{given_as} must be a file, but {path} is {what}")
    if not os.path.isdir(folder):
        raise RingtrainError(f"{given_as} is {path}, but there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RingtrainError(f"{given_as} is {path}, but the folder {folder} may not be written to")


def _mode(path: Path) -> int | None:
    """One look, since another rank may remove an earlier timeline meanwhile; None where nothing is to be seen."""
    try:
        return os.stat(path).st_mode
    except OSError:
        return None


def clear(path: Path, given_as: str) -> None:
    """Remove the file and all parts of an earlier timeline, which may have had more ranks.

    Ranks may have one disk, so this comes before any rank writes.

    Raises:
        RingtrainError: one of them cannot be removed.
    """
    for file in [path, *other_parts(path)]:
        try:
            file.unlink(missing_ok=True)  # another rank may be faster
        except OSError as error:
            raise RingtrainError(
                f"{given_as} is {path}, but {file} of an earlier timeline cannot be removed: {error.strerror}"
            ) from error
