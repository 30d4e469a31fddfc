"""Processes that have not called the driver yet, forked where a body needs some: one for each rank."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

_FORK = get_context("fork")


class Processes:
    """The ranks of one body, which may be killed."""

    def __init__(self, size: int, body: Callable[..., Any], arguments: tuple[Any, ...], settings: dict[str, Any]):
        self._killed: set[int] = set()
        self._all: list[tuple[BaseProcess, Connection]] = []
        for rank in range(size):
            own, others = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=_run, args=(others, rank, body, arguments, settings))
            process.start()
            others.close()
            self._all.append((process, own))

    def kill(self, rank: int) -> None:
        """With SIGKILL."""
        process = self._all[rank][0]
        process.kill()
        process.join()
        self._killed.add(rank)

    def results(self, timeout_s: float = 20) -> list[Any]:
        """Returns what the body returned on each rank, None for those that were killed.

        Raises AssertionError with the traceback of a rank that failed, and for one that died or did not end in time.
        """
        deadline = time.monotonic() + timeout_s
        return [None if rank in self._killed else self._result(rank, deadline) for rank in range(len(self._all))]

    def signal_of(self, rank: int, timeout_s: float = 20) -> int:
        """The signal that ends it, 0 if none does."""
        process = self._all[rank][0]
        process.join(timeout_s)
        assert process.exitcode is not None, f"rank {rank} did not end in time"
        return -process.exitcode

    def _result(self, rank: int, deadline: float) -> Any:
        process, connection = self._all[rank]
        assert connection.poll(max(deadline - time.monotonic(), 0)), f"rank {rank} did not end in time"
        try:
            has_returned, result = connection.recv()
        except EOFError:
            raise AssertionError(f"rank {rank} died of signal {self.signal_of(rank)}") from None
        process.join()
        assert has_returned, f"rank {rank}:\n{result}"
        return result

    def end(self) -> None:
        for process, connection in self._all:
            process.kill()
            process.join()
            connection.close()


@contextlib.contextmanager
def running(size: int, body: Callable[..., Any], *arguments: Any, **settings: Any) -> Iterator[Processes]:
    """`body(rank, *arguments)` on so many ranks. The settings are those of `gpu_double.environment`, and variables in
    capitals."""
    processes = Processes(size, body, arguments, settings)
    try:
        yield processes
    finally:
        processes.end()


def run(size: int, body: Callable[..., Any], *arguments: Any, **settings: Any) -> list[Any]:
    """Returns its results on each rank."""
    with running(size, body, *arguments, **settings) as processes:
        return processes.results()


def _run(
    answer: Connection, rank: int, body: Callable[..., Any], arguments: tuple[Any, ...], settings: dict[str, Any]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name, value in settings.items():
        os.environ[name if name.isupper() else f"RINGTRAIN_GPU_DOUBLE_{name.upper()}"] = str(value)
    try:
        answer.send((True, body(rank, *arguments)))
    except BaseException:
        answer.send((False, traceback.format_exc()))
    # without what the parent would do at its end
    os._exit(0)
