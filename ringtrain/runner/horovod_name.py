"""Whose the name `horovod` is in this Python: that of an installed Horovod, or, where there is none, ringtrain's.

`FOLDER` on the import path gives it to ringtrain. That also reaches the processes that a script starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

FOLDER = str(Path(__file__).parents[1] / "horovod" / "path")

# 1 lets ringtrain take the name although a Horovod is installed.
REPLACE_VARIABLE = "RINGTRAIN_REPLACE_HOROVOD"


def installed() -> str | None:
    """Where a Horovod is that `import horovod` would find without ringtrain, or None. Imports nothing of it."""
    spec = _spec()
    # a folder that merely has this name has no origin
    return None if spec is None else spec.origin


def _spec() -> ModuleSpec | None:
    from_path = PathFinder.find_spec("horovod", [entry for entry in sys.path if not is_folder_of_a_copy(entry)])
    if from_path is not None and from_path.origin is not None:
        return from_path
    others = [finder for finder in sys.meta_path if finder is not PathFinder and not _is_own(finder)]
    found = (finder.find_spec("horovod", None) for finder in others)
    return next((spec for spec in found if spec is not None), None)


def is_folder_of_a_copy(folder: str) -> bool:
    """Whether it is `FOLDER` in this copy of ringtrain or in another one, whose file imports this copy."""
    return os.path.normpath(folder).split(os.sep)[-3:] == ["ringtrain", "horovod", "path"]


def _is_own(finder: object) -> bool:
    return type(finder).__module__.startswith("ringtrain.")


def require_free(environ: Mapping[str, str] = os.environ) -> None:
    """Raises ImportError where a Horovod is installed and nobody has said that ringtrain is to replace it."""
    place = installed()
    if place is not None and environ.get(REPLACE_VARIABLE) != "1":
        raise ImportError(
            f"Horovod is installed at {place}, and ringtrain does not take its name from it unasked. Set "
            f"{REPLACE_VARIABLE}=1 to use ringtrain in its place, or run `pip uninstall horovod`."
        )


def with_folder(import_path: str | None) -> str:
    """A value of PYTHONPATH with which `import horovod` finds ringtrain's."""
    entries = import_path.split(os.pathsep) if import_path else []
    return os.pathsep.join([FOLDER, *(entry for entry in entries if not is_folder_of_a_copy(entry))])
