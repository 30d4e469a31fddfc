"""The program of each rank: `python -m measure.faults.rank FOLDER`.

One rank strikes itself as FOLDER says; the others write there what they get and when, and then end of it as any script
would. Times are those of the machine's monotonic clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ringtrain as hvd
import ringtrain._core as _core
from measure.faults.injection import FROM_OUTSIDE, Injection
from ringtrain.job import launched_by, world

_LARGE = 4_000_000
_VICTIM_WAITS_S = 60.0


class InjectedError(Exception):
    """The error of a rank that was told to raise one."""


class Striker:
    """Carries out the injection, if it is meant for this rank."""

    def __init__(self, injection: Injection, rank: int, folder: Path):
        self.injection = injection
        self.is_victim = rank in injection.victims()
        self._has_struck = False
        self._struck = folder / "struck"

    def enter(self, phase: str) -> None:
        """The phase begins."""
        injection = self.injection
        self._due_s = time.monotonic() + injection.after_s
        if not self.is_victim or phase != injection.phase or injection.step is not None or not self._is_from_outside():
            return
        if injection.after_s == 0:
            self.strike()
        else:
            threading.Timer(injection.after_s, self.strike).start()

    def enter_step(self, step: int) -> None:
        """In the phase that goes on in steps, and whose script looks for what it is to do."""
        is_due = time.monotonic() > self._due_s and not self._is_from_outside()
        if self.is_victim and (step == self.injection.step if self.injection.step is not None else is_due):
            self.strike()

    def strike_or_wait(self) -> None:
        """The work of a victim that the others wait for."""
        if not self._is_from_outside():
            time.sleep(self.injection.after_s)
            self.strike()
        time.sleep(_VICTIM_WAITS_S)

    def strike(self) -> None:
        if self._has_struck:  # a stopped process goes on when its launcher ends the job
            return
        self._has_struck = True
        _write(self._struck, str(time.monotonic()))
        kind = self.injection.kind
        if kind == "raise":
            raise InjectedError("told to fail")
        if kind == "exit":
            sys.exit(3)
        if kind == "vanish":
            os._exit(3)
        if kind == "exhaust memory":
            _exhaust_memory()
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
        os.kill(os.getpid(), signals[kind])

    def wait_for_strike(self) -> None:
        deadline = time.monotonic() + _VICTIM_WAITS_S
        while not self._struck.exists():
            assert time.monotonic() < deadline, "the victim was not struck"
            time.sleep(0.01)

    def _is_from_outside(self) -> bool:
        return self.injection.kind in FROM_OUTSIDE


def _exhaust_memory() -> None:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), resource.RLIM_INFINITY))
    kept = []
    while True:
        kept.append(np.ones(1 << 20))


def _strikes_inside(striker: Striker, phase: str, module: Any, name: str) -> None:
    """Begins the injection where init() calls this function."""
    if striker.injection.phase != phase:
        return
    original = getattr(module, name)

    def struck(*arguments: Any, **keywords: Any) -> Any:
        striker.enter(phase)
        if striker.is_victim and striker.injection.kind not in FROM_OUTSIDE:
            striker.strike()
        return original(*arguments, **keywords)

    setattr(module, name, struck)


def _start(striker: Striker) -> None:
    if striker.injection.phase == "start":
        striker.enter("start")
        if striker.is_victim:
            striker.strike_or_wait()
    _strikes_inside(striker, "connect", world, "own_share")
    _strikes_inside(striker, "share", _core, "init")
    hvd.init()


def _idle(striker: Striker) -> None:
    striker.enter("idle")
    if striker.is_victim:
        striker.strike_or_wait()
    striker.wait_for_strike()
    time.sleep(0.1)
    hvd.allreduce(np.ones(8), name="next")


def _negotiate(striker: Striker) -> None:
    striker.enter("negotiate")
    if striker.is_victim:
        striker.strike_or_wait()
    hvd.allreduce(np.ones(8), name="next")


def _stream(striker: Striker, array: Any, finish: Callable[[], None] = lambda: None) -> None:
    for step in range(1_000_000):
        handle = hvd.allreduce_async_(array, name="stream")
        striker.enter_step(step)
        hvd.synchronize(handle)
        finish()


def _reduce(striker: Striker, array: Any, finish: Callable[[], None] = lambda: None) -> None:
    striker.enter(striker.injection.phase)
    _stream(striker, array, finish)


def _call(striker: Striker, name: str | None) -> None:
    """Calls that wait: those of a repeated name are run by the thread that calls."""
    array = np.ones(8)
    striker.enter(striker.injection.phase)
    for step in range(1_000_000_000):
        hvd.allreduce_(array, name=name)
        hvd.allreduce(array)
        striker.enter_step(step)


def _scatter(striker: Striker) -> None:
    arrays = [np.ones(count, "float32") for count in (1000, _LARGE, 7)]
    striker.enter("scatter")
    for step in range(1_000_000):
        handles = [hvd.reducescatter_async(array, name=f"scatter {i}") for i, array in enumerate(arrays)]
        striker.enter_step(step)
        for handle in handles:
            hvd.synchronize(handle)


def _connect_on_gpu(striker: Striker) -> None:
    from measure import cupy

    _reduce(striker, cupy.ones(_LARGE), cupy.finish)


def _reduce_on_gpu(striker: Striker) -> None:
    from measure import cupy

    array = cupy.ones(_LARGE)
    hvd.allreduce_(array, name="warm on a GPU")  # all ranks have imported CuPy, and are connected
    cupy.finish()
    _reduce(striker, array, cupy.finish)


def _shutdown(striker: Striker) -> None:
    striker.enter("shutdown")
    if striker.is_victim:
        striker.strike_or_wait()
    striker.wait_for_strike()
    hvd.shutdown()


_PHASES: dict[str, Callable[[Striker], None]] = {
    "idle": _idle,
    "negotiate": _negotiate,
    "reduce": lambda striker: _reduce(striker, np.ones(_LARGE, "float32")),
    "reduce float16": lambda striker: _reduce(striker, np.ones(_LARGE, "float16")),
    "reduce in place": lambda striker: _reduce(striker, hvd.empty(_LARGE, "float32")),
    "scatter": _scatter,
    "connect on a GPU": _connect_on_gpu,
    "reduce on a GPU": _reduce_on_gpu,
    "step": lambda striker: _reduce(striker, np.ones(8)),
    "call": lambda striker: _call(striker, "call"),
    "call without a name": lambda striker: _call(striker, None),
    "shutdown": _shutdown,
}


def _run(striker: Striker) -> None:
    _start(striker)
    hvd.allreduce(np.ones(8), name="warm")
    if striker.injection.phase in _PHASES:
        _PHASES[striker.injection.phase](striker)
    else:
        _stream(striker, np.ones(8))  # the moment was one after init()


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    report: dict[str, object] = {"error": "", "text": "", "again": ""}
    try:
        yield
    except hvd.RingtrainError as error:
        report = {"error": type(error).__name__, "text": str(error), "at": time.monotonic(), "again": _try_again()}
        raise
    except BaseException as error:  # also what ends a process, such as SystemExit
        report = {**report, "error": type(error).__name__, "text": str(error)}
        raise
    finally:
        _write(path, json.dumps({"at": time.monotonic(), **report}))


def _write(path: Path, text: str) -> None:
    """At once: who sees the file sees all of it."""
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(text)
    new.rename(path)


def _try_again() -> str:
    """The error of one more operation."""
    try:
        hvd.allreduce(np.ones(8), name="later")
    except Exception as error:
        return type(error).__name__
    return ""


def main(folder: Path) -> None:
    launch = launched_by.detect()
    assert launch is not None, "this program is for ranks of a launcher"
    striker = Striker(Injection.read(folder / "injection.json"), launch.rank, folder)
    reported = contextlib.nullcontext() if striker.is_victim else _reported(folder / f"rank{launch.rank}.json")
    with reported:
        _run(striker)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
