"""Preemption: all ranks learn at the same step that the job is about to be ended, so that they checkpoint together.

One rank that knows is enough. A rank knows from a signal (`csrc/base/noted_signals.h` notes its time) or from the
option `preemption_notice`, and tells the others in a small allreduce.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

import ringtrain._core as _core
from ringtrain.job import session
from ringtrain.ops.exchanges import barrier
from ringtrain.ops.reductions import Sum, allreduce
from ringtrain.record import flight_recorder
from ringtrain.record.logger import logger

if TYPE_CHECKING:
    import subprocess

# How long there is from a signal to the end, where the user of ringrun has not said it by --grace-s.
_GRACE_VARIABLE, _GRACE_S = "RINGRUN_GRACE_S", 30.0
_LOOK_S, _RUN_S = 1.0, 5.0


class Preemption(NamedTuple):
    """Says that the job is about to be ended.

    Attributes:
        seconds_left: until then, as far as is known; the same on all ranks.
    """

    seconds_left: float


def preempted() -> Preemption | None:
    """Returns whether the job is about to be ended, the same on all ranks. All ranks call it together, once per step.

        if hvd.preempted():
            if hvd.rank() == 0:
                save(step + 1)
            hvd.exit_preempted()

    Returns None, or what is true where a condition is asked for. The job is about to be ended when any rank has got
    SIGTERM, SIGUSR1 or SIGUSR2, or when the option `preemption_notice` says so. From the first call to shutdown() these
    signals no longer end the process. SIGUSR1 and SIGUSR2 are left alone if the script has handlers for them; a handler
    for SIGTERM runs as well. A call costs as much as an allreduce of two numbers.

    Raises:
        NotInitializedError: before init().
        RingtrainError: one of the ranks is lost, fails or does not arrive.
    """
    global _is_asked, _is_agreed
    if not _is_asked:
        _core.require_initialized()
        _is_asked = True
        _watch(session.settings())
    left_s = _own_seconds_left()
    own = np.array([left_s is not None, left_s or 0.0])
    knowing, total_s = allreduce(own, op=Sum, name="preempted").tolist()  # a sum, since a rank may have joined
    if knowing == 0:
        return None
    found = Preemption(total_s / knowing)
    if not _is_agreed and session.rank() == 0:
        logger.warning("preemption: %.0f s are left", found.seconds_left)
    _is_agreed = True
    return found


def exit_preempted() -> NoReturn:
    """Ends the script with exit code 75, once all ranks have called this: a rank may still write the checkpoint.

    75 is EX_TEMPFAIL, "try again". Batch scripts queue the job again on it.
    """
    global _is_leaving
    barrier()
    _is_leaving = True  # the next signal must not end a process that is about to end with this exit code
    session.shutdown()
    sys.exit(os.EX_TEMPFAIL)


def is_agreed() -> bool:
    """Returns whether a call of `preempted` has been true."""
    return _is_agreed


# --- what this rank knows ---------------------------------------------------------------------------------------------

_is_asked = _is_agreed = _is_leaving = False
_notice: _Notice | None = None


class _Notice:
    """Looks for a file, or runs a program, that announces the preemption of this host."""

    def __init__(self, path: str):
        self._path = path
        self._is_program = os.path.isfile(path) and os.access(path, os.X_OK)
        self._running: subprocess.Popen[str] | None = None
        self._look_at = 0.0
        self._ends_at: float | None = None  # by the monotonic clock

    def seconds_left(self) -> float | None:
        """Returns None where nothing is announced. Does not wait for the program."""
        now = time.monotonic()
        if self._ends_at is None and (now >= self._look_at or self._running is not None):
            self._ends_at = self._run(now) if self._is_program else self._look(now)
        return None if self._ends_at is None else self._ends_at - now

    def _look(self, now: float) -> float | None:
        self._look_at = now + _LOOK_S
        return now + _grace_s() if os.path.exists(self._path) else None

    def _run(self, now: float) -> float | None:
        import subprocess  # which few jobs need

        if self._running is None:
            self._look_at = now + _RUN_S
            self._running = subprocess.Popen(
                [self._path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace"
            )
        if self._running.poll() is None:
            return None
        said, code = self._running.communicate()[0].strip(), self._running.returncode
        self._running = None
        if code != 0:
            return None
        return now + (float(said) if said.replace(".", "", 1).isdecimal() else _grace_s())


def _watch(settings: dict[str, str]) -> None:
    """Called by the first `preempted`, and by each later init()."""
    global _notice
    if not _is_asked:
        return
    _core.note_signal(signal.SIGTERM, True)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if _core.has_default_action(number) or signal.getsignal(number) is flight_recorder.on_signal:
            _core.note_signal(number, False)
    path = settings["preemption_notice"]
    _notice = _notice or (_Notice(path) if path else None)


def _stop_watching() -> None:
    if not _is_leaving:
        _core.stop_noting_signals()


def _own_seconds_left() -> float | None:
    now, noted = time.monotonic(), _core.noted_signals()
    left = [at + _grace_s() - now for at in noted.values()]
    if _notice is not None and session.local_rank() == 0:
        announced = _notice.seconds_left()
        left += [] if announced is None else [announced]
    return max(0.0, min(left)) if left else None


def _grace_s() -> float:
    return float(os.environ.get(_GRACE_VARIABLE, _GRACE_S))


session.at_init(_watch)
session.at_shutdown(_stop_watching)
