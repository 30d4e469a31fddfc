"""Tells the core when threads of this rank wait in programs of JAX, so that a deadlock of programs is found.

A thread that calls an operation of ringtrain says that it waits. One that calls a program, or reads its result, waits
within JAX and says nothing. So while a program waits for an operation, a thread looks at the others: one that sleeps in
a lock of the kernel, at the same place of the script as before, and not in Python's own library, waits for the program.

That is a guess, which may be wrong where a thread sleeps in a lock of another library and then goes on. So it is made
only by ranks that have compiled a program with a message: whose ranks run other programs can wait for each other.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from typing import NamedTuple

import ringtrain._core as _core
from ringtrain import failure

_PERIOD_S = 0.1
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine(), "")


class _Place(NamedTuple):
    """Where a thread is: it has not run while this stays the same."""

    frame: int
    instruction: int
    system_call: str
    switches: str


class _Watcher:
    """The thread that looks. It begins with the first program that has a message, and lives as long as the process.

    It sleeps in Python, never in the core: a thread in C++ at the end of Python would end the process with an error.
    """

    def __init__(self) -> None:
        self._process = 0
        self._places: dict[int, _Place | None] = {}
        self._has_said = False

    def start(self) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            threading.Thread(target=self._watch, name="ringtrain-jax-waits", daemon=True).start()

    def _watch(self) -> None:
        never = threading.Event()
        while not never.wait(_PERIOD_S):
            awaited = _core.awaited_by_xla()
            if awaited or self._has_said:
                self._has_said = failure.say_blocked_outside(awaited, self._sleeps)
            if not awaited:
                self._places.clear()

    def _sleeps(self, thread: threading.Thread) -> bool:
        assert thread.ident is not None
        before, now = self._places.get(thread.ident), _place_of(thread)
        self._places[thread.ident] = now
        return now is not None and now == before


def _place_of(thread: threading.Thread) -> _Place | None:
    """Returns None for a thread that does not sleep in a lock, or in one of Python's library."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or failure.is_of_standard_library(frame):
        return None
    folder = f"/proc/self/task/{thread.native_id}"
    try:
        with open(f"{folder}/syscall") as file:
            call = file.read()
        with open(f"{folder}/status") as file:
            switches = file.read().partition("voluntary_ctxt_switches")[2]
    except OSError:  # the kernel does not tell, or the thread has ended
        return None
    return _Place(id(frame), frame.f_lasti, call, switches) if call.split(" ")[0] == _FUTEX else None


watcher = _Watcher()
