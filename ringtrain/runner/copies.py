"""Several copies of ringtrain for one Python, such as a source tree in the current folder and an installed package."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).parents[1]
_CORE = "ringtrain._core"


def explain_missing_core() -> None:
    """Have an import of the core say which copy this is, if it has none: a source tree that was not built."""
    if PathFinder.find_spec(_CORE, [str(_FOLDER)]) is None:
        sys.meta_path.append(_NoCore())


def built_elsewhere() -> str | None:
    """The folder of another copy with a core that Python would find without this one, or None."""
    others = [entry for entry in sys.path if not _is_same(Path(entry or "."), _FOLDER.parent)]
    specs = [PathFinder.find_spec("ringtrain", [entry]) for entry in others]
    editable = [finder for finder in sys.meta_path if finder is not PathFinder and not isinstance(finder, _NoCore)]
    specs += [finder.find_spec("ringtrain", None) for finder in editable]
    folders = [str(Path(spec.origin).parent) for spec in specs if spec is not None and spec.origin is not None]
    built = (folder for folder in folders if PathFinder.find_spec(_CORE, [folder]) is not None)
    return next((folder for folder in built if not _is_same(Path(folder), _FOLDER)), None)


def _is_same(one: Path, other: Path) -> bool:
    return one.exists() and one.samefile(other)


class _NoCore:
    """The last finder: asked for what no other one has found."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _CORE:
            return None
        other = built_elsewhere()
        instead = f", or start Python in another folder to use the copy in {other}" if other is not None else ""
        raise ImportError(
            f"ringtrain was imported from {_FOLDER}, a source tree whose core is not built for this Python; run "
            f"`pip install -e {_FOLDER.parent}`{instead}",
            name=name,
        )
