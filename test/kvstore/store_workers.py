"""Workers of a key-value store in processes of their own, forked from the test, with servers in the test's process."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ringtrain import _core
from ringtrain._core import StoreClient, StoreHandle, StoreKey, StoreServer

_SECRET = b"of this test"
_TOKEN = "0"
CAPACITY = 4
# The messages of workers to the test, and to each other.
_BOARD = 64


def view(array: np.ndarray[Any, Any]) -> _core.View:
    """As the core needs it."""
    return array.ctypes.data, _core.DTYPES[str(array.dtype)], array.shape


def listener() -> socket.socket:
    """A port of this host where a server can be reached."""
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    found.listen(64)
    found.setblocking(False)
    return found


def pieces(index: int, count: int, servers: int) -> list[tuple[int, int, int]]:
    """A long key is on all servers, a short one on one of them."""
    if count < 100:
        return [(index % servers, 0, count)]
    borders = [count * i // servers // 32 * 32 for i in range(servers)] + [count]
    return [(i, borders[i], borders[i + 1] - borders[i]) for i in range(servers)]


class Worker:
    """One of them, in its own process; store number 0 has keys 0, 1, ..."""

    def __init__(self, workers: Workers, number: int, shares_memory: bool, term: int = 0) -> None:
        self.number = number
        self._workers = workers
        self.keys: list[StoreKey] = []
        self.client = StoreClient(
            worker=number,
            term=term,
            workers=workers.count,
            capacity=CAPACITY,
            servers=[[address] for address in workers.addresses],
            secret=_SECRET,
            token=_TOKEN,
            node="here" if shares_memory else "",
            timeout_s=workers.timeout_s,
            return_s=workers.return_s,
            outbox_mb=64.0,
            verbose=0,
        )
        self.client.meet()
        self.client.open(0, workers.synchronous, workers.max_staleness)

    def barrier(self, number: int) -> None:
        """Until all have come to it."""
        board = self._workers.board
        board[self.number] = number
        wait_until(lambda: all(board[i] >= number for i in range(self._workers.count)))

    def make(self, keys: Sequence[tuple[str, int]], is_back: bool = False) -> None:
        """Keys of zeros, by dtype and elements; worker 0 makes them."""
        servers = len(self._workers.addresses)
        self.keys = [
            StoreKey(i, f"key {i}", _core.DTYPES[dtype], count, pieces(i, count, servers))
            for i, (dtype, count) in enumerate(keys)
        ]
        values = [np.zeros(count, dtype) for dtype, count in keys]
        if self.number == 0 and not is_back:
            self.client.create_keys(0, self.keys, [view(value) for value in values])
        if not is_back:
            self.barrier(1)
        if self.number != 0 or is_back:
            self.client.attach_keys(0, self.keys)

    def set_rule(self, name: str, **numbers: float) -> None:
        """In the manner of MXNet, by worker 0."""
        if self.number == 0:
            self.client.set_rule(0, name, "mxnet", numbers, 0, False, True)
        self.barrier(2)

    def push(self, *arrays: np.ndarray[Any, Any], first: int = 0) -> None:
        """One for each key, from the first on."""
        ids = list(range(first, first + len(arrays)))
        self.wait(self.client.push(0, ids, [view(array) for array in arrays], [], 0, True))

    def pull(self, *arrays: np.ndarray[Any, Any], first: int = 0) -> None:
        """Likewise."""
        ids = list(range(first, first + len(arrays)))
        self.wait(self.client.pull(0, ids, [view(array) for array in arrays], 0))

    def push_pull(self, arrays: Sequence[np.ndarray[Any, Any]], outs: Sequence[np.ndarray[Any, Any]]) -> None:
        """Likewise."""
        ids = list(range(len(arrays)))
        views = [view(array) for array in arrays], [view(out) for out in outs]
        self.wait(self.client.push_pull(0, ids, *views, [], 0))

    def wait(self, handle: StoreHandle) -> None:
        """At most so long as a test may take."""
        end = time.monotonic() + 20.0
        while not handle.wait(0.2):
            assert time.monotonic() < end, handle.missing()

    def tell(self, place: int, number: int) -> None:
        """The test reads it from `board[CAPACITY + place]`."""
        self._workers.board[CAPACITY + place] = number


class Workers:
    """The servers, here, and what is common to all workers."""

    def __init__(
        self,
        count: int,
        servers: int = 2,
        synchronous: bool = False,
        max_staleness: int | None = None,
        shares_memory: Sequence[int] = range(CAPACITY),
        timeout_s: float = 10.0,
        return_s: float = 0.0,
    ) -> None:
        """As options of the workers; servers wait for a worker as long as they like.

        `shares_memory`: the servers on the host of the workers that share memory.
        """
        self.count = count
        self.synchronous = synchronous
        self.max_staleness = max_staleness
        self.timeout_s = timeout_s
        self.return_s = return_s
        self.board = (ctypes.c_int64 * _BOARD).from_buffer(mmap.mmap(-1, ctypes.sizeof(ctypes.c_int64) * _BOARD))
        self.addresses: list[tuple[str, int]] = []
        self.servers: list[StoreServer] = []
        for number in range(servers):
            place = listener()
            self.addresses.append(place.getsockname())
            self.servers.append(
                StoreServer(
                    number=number,
                    capacity=CAPACITY,
                    listeners=[place.detach()],
                    secret=_SECRET,
                    token=_TOKEN,
                    threads=1,
                    node="here" if number in shares_memory else "",
                    timeout_s=10.0,
                    verbose=0,
                )
            )

    def start(self, number: int, body: Callable[[Worker], None], shares_memory: bool = True, term: int = 0) -> int:
        """The process of a worker; its exit code is 0 if the body ends well. `term`: how many had its place before."""
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                body(Worker(self, number, shares_memory, term))
                code = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        return pid

    def lose(self, number: int, first_term: int) -> None:
        """The servers hear that processes of a worker are dead."""
        for server in self.servers:
            server.lost(number, first_term)

    def close(self) -> None:
        """The servers end."""
        for server in self.servers:
            server.close()


@contextlib.contextmanager
def store(count: int, **options: Any) -> Iterator[Workers]:
    """Servers for so many workers."""
    workers = Workers(count, **options)
    try:
        yield workers
    finally:
        workers.close()


@contextlib.contextmanager
def running(pids: Sequence[int]) -> Iterator[None]:
    """None of these processes is left."""
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def run(workers: Workers, body: Callable[[Worker], None], shares: Sequence[bool] = ()) -> None:
    """The same body in all, each of which has to end well."""
    pids = [workers.start(number, body, shares[number] if shares else True) for number in range(workers.count)]
    with running(pids):
        require_success(*pids)


def require_success(*pids: int, within_s: float = 30.0) -> None:
    """They end by themselves, and well."""
    left, end = set(pids), time.monotonic() + within_s
    while left:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.remove(pid)
                assert os.waitstatus_to_exitcode(status) == 0
        assert time.monotonic() < end, f"{len(left)} workers have not ended"
        time.sleep(0.005)


def wait_until(happens: Callable[[], bool], within_s: float = 20.0) -> None:
    """With a deadline."""
    end = time.monotonic() + within_s
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.0005)
