"""A file that is always whole: written aside, and renamed when it is on the disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` at the end; after an exception `path` is as before."""
    draft = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.unfinished")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
