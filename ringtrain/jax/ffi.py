"""Registers with jaxlib once what XLA calls of the core, in a version of XLA's interface that this jaxlib takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import ringtrain._core as _core

try:
    import jax.ffi as jax_ffi
except ImportError:  # before jax 0.5
    import jax.extend.ffi as jax_ffi  # type: ignore[no-redef]

# A jaxlib takes versions that are a year old and older. All that is used exists since this one.
_OWN_MINOR = 1
ffi_lowering: Callable[..., Any] = jax_ffi.ffi_lowering


def register() -> None:
    """Raises ImportError where the interface of this jaxlib is another one.

    To register what XLA refuses would be the end of JAX in this process: no backend would start any more.
    """
    minor = api_version(header().read_text())
    for platform, handlers in _core.xla_handlers(minor).items():
        for name, handler in handlers.items():
            jax_ffi.register_ffi_target(name, handler, platform=platform)


def header() -> Path:
    header = Path(jax_ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.exists():
        raise ImportError(
            f"ringtrain.jax: jax {jax.__version__} does not say which FFI its XLA has: {header} is missing"
        )
    return header


def api_version(header: str) -> int:
    """The minor version of the interface to speak where XLA's header has this text. Raises ImportError for none."""
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR")]
    major, minor = (int(one[1]) if one else -1 for one in found)
    if major != 0 or minor < _OWN_MINOR:
        raise ImportError(
            f"ringtrain.jax speaks version 0.{_OWN_MINOR} of XLA's FFI, and the XLA of jax {jax.__version__} has "
            f"{major}.{minor}: install a ringtrain of the same year, or jax 0.4.38 to 0.12"
        )
    return _OWN_MINOR
