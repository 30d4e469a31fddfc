"""How Python and PyTorch find ringtrain by a name: which of several copies, whose package `horovod` is, the backend."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_CORE = "ringtrain._core"
_BACKEND = "ringtrain.torch.distributed"


def explain_missing_core() -> None:
    """Makes an import of the core say which copy this is, if it has none: a source tree that was not built."""
    if PathFinder.find_spec(_CORE, [_FOLDER]) is None:
        sys.meta_path.append(_NoCore())


def built_elsewhere() -> str | None:
    """The folder of another copy with a core that Python would find without this one, or None."""
    others = [entry for entry in sys.path if not _is_same(entry or ".", os.path.dirname(_FOLDER))]
    specs = [PathFinder.find_spec("ringtrain", [entry]) for entry in others]
    editable = [finder for finder in sys.meta_path if finder is not PathFinder and not isinstance(finder, _NoCore)]
    specs += [finder.find_spec("ringtrain", None) for finder in editable]
    folders = [os.path.dirname(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
    built = (folder for folder in folders if PathFinder.find_spec(_CORE, [folder]) is not None)
    return next((folder for folder in built if not _is_same(folder, _FOLDER)), None)


def offer_torch_backend() -> None:
    """Registers the backend "ringtrain" of torch.distributed, so that scripts need no import for it.

    Called by PyTorch at the end of its own import. The backend is loaded when a script makes its first group.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or "ringtrain" in dist.Backend.backend_list:
        return

    def create(*options: Any) -> Any:
        return importlib.import_module(_BACKEND)._create(*options)

    def rendezvous(*given: Any, **named: Any) -> Any:
        return importlib.import_module(_BACKEND).meeting.rendezvous(*given, **named)

    class Gloo:
        """Stands for the class of gloo's groups until there is one."""

        def __new__(cls, *given: Any, **named: Any) -> Any:
            importlib.import_module(_BACKEND)
            there = c10d.ProcessGroupGloo
            return (of_torch if there is cls else there)(*given, **named)

    dist.Backend.register_backend("ringtrain", create, extended_api=True, devices=["cpu"])
    sys.modules["torch.distributed.rendezvous"].register_rendezvous_handler("ringtrain", rendezvous)
    c10d = dist.distributed_c10d
    if is_gloo_replaced():
        of_torch, c10d.ProcessGroupGloo = c10d.ProcessGroupGloo, Gloo


def is_gloo_replaced() -> bool:
    """Whether torch makes groups of ringtrain where a program asks for gloo."""
    return os.environ.get("RINGTRAIN_AS_GLOO", "0") not in ("", "0") and "gloo" not in patches_left_out()


# names of ringtrain.torch.distributed.patches
WITHOUT_VARIABLE = "RINGTRAIN_TORCH_WITHOUT"


def patches_left_out() -> set[str]:
    """Returns the patches of PyTorch that the user leaves out, by name."""
    return {name.strip() for name in os.environ.get(WITHOUT_VARIABLE, "").split(",") if name.strip()}


def _is_same(one: str, other: str) -> bool:
    return os.path.exists(one) and os.path.samefile(one, other)


class _NoCore:
    """The last finder: asked for what no other one has found."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _CORE:
            return None
        other = built_elsewhere()
        instead = f", or start Python in another folder to use the copy in {other}" if other is not None else ""
        raise ImportError(
            f"ringtrain was imported from {_FOLDER}, a source tree whose core is not built for this Python; run "
            f"`pip install -e {os.path.dirname(_FOLDER)}`{instead}",
            name=name,
        )


# --- the name `horovod` -----------------------------------------------------------------------------------------------


HOROVOD_FOLDER = os.path.join(_FOLDER, "horovod", "path")

# 1 lets ringtrain take the name although a Horovod is installed.
REPLACE_VARIABLE = "RINGTRAIN_REPLACE_HOROVOD"


def installed_horovod() -> str | None:
    """Returns where `import horovod` would find a Horovod without ringtrain, or None. Does not import Horovod."""
    spec = _horovod_spec()
    # a folder that merely has this name has no origin
    return None if spec is None else spec.origin


def _horovod_spec() -> ModuleSpec | None:
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


def require_free_name(environ: Mapping[str, str] = os.environ) -> None:
    """Raises ImportError where a Horovod is installed and no variable says that ringtrain is to replace it."""
    place = installed_horovod()
    if place is not None and environ.get(REPLACE_VARIABLE) != "1":
        raise ImportError(
            f"Horovod is installed at {place}, and ringtrain does not take its name from it unasked. Set "
            f"{REPLACE_VARIABLE}=1 to use ringtrain in its place, or run `pip uninstall horovod`."
        )


def with_folder(import_path: str | None) -> str:
    """A value of PYTHONPATH with which `import horovod` finds ringtrain's."""
    entries = import_path.split(os.pathsep) if import_path else []
    return os.pathsep.join([HOROVOD_FOLDER, *(entry for entry in entries if not is_folder_of_a_copy(entry))])
