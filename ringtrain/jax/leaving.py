"""The end of the job while programs of JAX are under way: they may need the other ranks, and these this one."""

from __future__ import annotations

import contextlib
import time

import jax

import ringtrain._core as _core
from ringtrain.job import session

# What JAX was told to compute has so long before this rank leaves.
_LONGEST_S = 5.0
_PAUSE_S = 0.002


def register() -> None:
    session.at_shutdown(_let_programs_end)


def _let_programs_end() -> None:
    """Programs that have not begun yet, too. If the engine has failed, they fail as well, and at once.

    No thread waits here: one that was still within jaxlib at the end of Python would end the process with an error.
    """
    deadline = time.monotonic() + _LONGEST_S
    for array in jax.live_arrays():
        with contextlib.suppress(RuntimeError):  # it was donated meanwhile
            while not array.is_ready() and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
    _core.wait_for_xla(max(0.0, deadline - time.monotonic()))
