"""The public names of a package that users import: all that are in it, but no modules that imports have left there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ringtrain.errors import missing

Face = tuple[list[str], Callable[[], list[str]], Callable[[str], Any]]


def face(package: dict[str, Any], *modules: str) -> Face:
    """Returns `__all__`, `__dir__` and `__getattr__` of a package that has all its names. `modules` are public, too."""
    names = sorted(name for name, it in package.items() if not name.startswith("_") and not inspect.ismodule(it))

    def listed() -> list[str]:
        """Lists the public names, which completion shows."""
        return sorted({*names, *modules, *(name for name in package if name.startswith("__"))})

    def not_there(name: str) -> Any:
        raise missing(package["__name__"], name, names)

    return names, listed, not_there
