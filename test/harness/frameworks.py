"""Frameworks take seconds to import, so the process that collects the tests does without them.

    torch = on_demand("torch")
    hvd = on_demand("ringtrain.torch")

skips the module where PyTorch is not installed, and imports each module when a test first takes a name from it. Ranks
import at once, before they call init().
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Any, cast

import pytest

FRAMEWORKS = ("torch", "jax", "optax", "sklearn", "scipy", "matplotlib")
_TITLES = {"torch": "PyTorch", "jax": "JAX"}
# pytest asks all that a test module holds for these while it collects.
_OF_PYTEST = ("__bases__", "__test__")
_is_rank = False


def become_rank() -> None:
    """Called by ranks: on_demand() then returns the module itself."""
    global _is_rank
    _is_rank = True


def is_rank() -> bool:
    """True in a rank, false in the process that collects the tests."""
    return _is_rank


def is_installed(name: str) -> bool:
    """True if the package that contains this module can be imported."""
    return importlib.util.find_spec(name.partition(".")[0]) is not None


def version_of(name: str) -> tuple[int, int]:
    """The first two numbers of an installed package's version, read from its metadata."""
    major, minor = importlib.metadata.version(name).split(".")[:2]
    return int(major), int(minor)


def need(*names: str) -> None:
    """Skips the test module unless all of these are installed. Imports none of them."""
    for name in names:
        if not is_installed(name):
            title = _TITLES.get(name, name)
            pytest.skip(f"{title} is not installed in this environment", allow_module_level=True)


def need_torch_of_backend() -> None:
    """Skips the test module unless the PyTorch is installed with which the backend of torch.distributed is tested."""
    need("torch")
    if version_of("torch") < (2, 13):
        pytest.skip("the backend is tested with PyTorch 2.13", allow_module_level=True)


def on_demand(name: str) -> Any:
    """The module of this name, imported by its first use; skips the test module where it is not installed."""
    need(name)
    return importlib.import_module(name) if _is_rank else _OnDemand(name)


class _OnDemand:
    """Stands for a module. Names are read from the module, set in it and deleted from it."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_PYTEST:
            raise AttributeError(name)
        return getattr(_imported(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_imported(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_imported(self), name)

    def __dir__(self) -> list[str]:
        return dir(_imported(self))


def _imported(module: _OnDemand) -> Any:
    return importlib.import_module(cast(str, object.__getattribute__(module, "_name")))
