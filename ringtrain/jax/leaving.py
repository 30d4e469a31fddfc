"""The end of the job while programs of JAX are under way: they may need the other ranks, and these this one."""

from __future__ import annotations

import contextlib
import threading

import jax

import ringtrain._core as _core
from ringtrain.job import session

# What JAX was told to compute has so long before this rank leaves.
_LONGEST_S = 5.0


def register() -> None:
    session.at_shutdown(_let_programs_end)


def _let_programs_end() -> None:
    """Programs that have not begun yet, too. If the engine has failed, they fail as well, and at once."""
    waiting = threading.Thread(target=_wait_for_arrays, daemon=True)
    waiting.start()
    waiting.join(_LONGEST_S)
    _core.wait_for_xla(0 if waiting.is_alive() else _LONGEST_S)


def _wait_for_arrays() -> None:
    for array in jax.live_arrays():
        with contextlib.suppress(RuntimeError):  # what it has failed with is told to who wants it
            array.block_until_ready()
