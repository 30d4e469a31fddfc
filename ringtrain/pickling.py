"""Objects as bytes, by cloudpickle where it is installed, which takes lambdas and local classes too; whole files."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path


def pickler() -> Any:
    """cloudpickle if it is installed, else pickle. Both have `dumps`; `pickle.loads` reads what either wrote."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def dumps(obj: Any) -> bytes:
    """The object for another rank, which runs the same script: by pickle where that is enough.

    It refers to the classes of the script, where cloudpickle sends copies of them. An instance of a copy is not one
    of the receiver's class.
    """
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        chosen = pickler()
        if chosen is pickle:
            raise
    data: bytes = chosen.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    return data


# --- a file that is always whole: written aside, and renamed when it is on the disk -----------------------------------


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
