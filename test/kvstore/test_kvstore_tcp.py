"""A worker's client and servers with which it shares no memory: what goes over TCP, and what becomes of it when the
network is bad, or a server is gone."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from harness.exact import require_equal
from store_wire import CAPACITY, FRAME, HEAD, SECRET, TOKEN, Server, served

from ringtrain._core import DTYPES, StoreClient, StoreHandle, StoreKey, StoreServer
from ringtrain.arrays import numpy as arrays
from ringtrain.errors import PeerLostError

Floats = npt.NDArray[np.float32]
COUNTS = (3, 40_000, 1021, 16_384)
_END_S = 60


class Worker:
    """One store of a client, with the keys 0, 1, ... that are cut over all servers."""

    def __init__(self, number: int, ports: list[int], counts: tuple[int, ...] = COUNTS, **options: Any) -> None:
        self.client = StoreClient(
            **{
                "worker": number,
                "workers": 2,
                "capacity": CAPACITY,
                "servers": [[("127.0.0.1", port)] for port in ports],
                "secret": SECRET,
                "token": TOKEN,
                "node": "",
                "timeout_s": 20.0,
                "return_s": 0.0,
                "outbox_mb": 1,
                "threads": 2,
                "verbose": 0,
            }
            | options
        )
        self.client.meet()
        self.number, self.counts = number, counts
        self.keys = [self._key(i, count, len(ports)) for i, count in enumerate(counts)]
        self.ids = list(range(len(counts)))
        self.rate = [(1.0, 0.0)] * len(counts)

    @staticmethod
    def _key(number: int, count: int, servers: int) -> StoreKey:
        borders = [count * i // servers // 32 * 32 for i in range(servers)] + [count]
        pieces = [(i, borders[i], borders[i + 1] - borders[i]) for i in range(servers)]
        return StoreKey(number, f"k{number}", DTYPES["float32"], count, [one for one in pieces if one[2]])

    def open(self, is_sync: bool = False, rule: str = "test", **numbers: float) -> None:
        self.client.open(0, is_sync, None)
        if self.number == 0:
            zeros = self.full(0)
            self.client.create_keys(0, self.keys, [arrays.view(one) for one in zeros])
        else:
            self.client.attach_keys(0, self.keys)
        if rule:
            self.client.set_rule(0, rule, "mxnet", numbers, 0, False, self.number == 0)

    def full(self, value: float) -> list[Floats]:
        return [np.full(count, value, np.float32) for count in self.counts]

    def push_pull(self, value: float) -> list[Floats]:
        values, outs = self.full(value), self.full(-1)
        views = ([arrays.view(one) for one in values], [arrays.view(one) for one in outs])
        wait(self.client.push_pull(0, self.ids, *views, self.rate, 0))
        return outs

    def push(self, value: float) -> StoreHandle:
        """The values may change at once."""
        values = self.full(value)
        handle = self.client.push(0, self.ids, [arrays.view(one) for one in values], self.rate, 0, True)
        for one in values:
            one[:] = np.nan
        return handle

    def pull(self) -> list[Floats]:
        outs = self.full(-1)
        wait(self.client.pull(0, self.ids, [arrays.view(one) for one in outs], 0))
        return outs


def wait(handle: StoreHandle) -> None:
    assert handle.wait(_END_S), handle.missing()


@contextlib.contextmanager
def two_workers(is_sync: bool, **options: Any) -> Iterator[tuple[Worker, Worker]]:
    """In one process, over two servers in processes of their own."""
    with served() as first, served(number=1) as second:
        workers = []
        for number in range(2):
            worker = Worker(number, [first.port, second.port], **options)
            worker.open(is_sync)
            workers.append(worker)
        yield workers[0], workers[1]
        for worker in workers:
            worker.client.close()


def together(*calls: Any) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(_END_S) for future in [pool.submit(call) for call in calls]]


def require_all(found: list[Floats], value: float) -> None:
    for one in found:
        require_equal(one, np.full_like(one, value))


def test_rounds_are_exact() -> None:
    with two_workers(is_sync=True) as (a, b):
        for i in range(1, 6):
            for found in together(lambda: a.push_pull(1), lambda: b.push_pull(2)):
                require_all(found, 3 * i)


@pytest.mark.parametrize(("servers", "threads", "expected"), [(3, 1, 1), (3, 2, 2), (2, 4, 2)])
def test_a_worker_has_as_many_threads_as_asked_for_and_at_most_one_for_each_server(
    servers: int, threads: int, expected: int
) -> None:
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(served(number=number)).port for number in range(servers)]
        before = len(os.listdir("/proc/self/task"))
        worker = Worker(0, ports, workers=1, threads=threads)
        assert len(os.listdir("/proc/self/task")) == before + expected
        worker.open()
        for turn in range(1, 6):
            require_all(worker.push_pull(1), turn)


def test_a_push_keeps_nothing_of_its_arrays_and_more_than_the_outbox_can_be_pushed() -> None:
    with two_workers(is_sync=False, counts=(400_000,) * 3) as (a, _):
        handles = [a.push(1) for _ in range(4)]
        require_all(a.pull(), 4)
        for handle in handles:
            wait(handle)


def test_a_worker_that_shared_memory_goes_on_over_tcp_with_the_server_in_the_place_of_the_first() -> None:
    with served(shares_memory=True) as server, served() as successor:
        worker = Worker(0, [server.port], workers=1, return_s=20.0, node="here")
        worker.open()
        require_all(worker.push_pull(1), 1)
        kept = server.ask("copies")
        require_all(worker.push_pull(2), 3)
        server.stop()
        successor.ask("restored", kept)
        worker.client.back_server(0, [("127.0.0.1", successor.port)])
        require_all(worker.push_pull(4), 1 + 4)
        require_all(worker.push_pull(8), 1 + 4 + 8)
        worker.client.close()
        server.process.send_signal(signal.SIGCONT)


def test_a_server_that_the_scheduler_has_lost_is_not_connected_to_again_and_lost_after_the_time_to_rejoin() -> None:
    with served() as server, served() as successor:
        worker = Worker(0, [server.port], workers=1, return_s=1.0)
        worker.open()
        require_all(worker.push_pull(1), 1)
        kept = server.ask("copies")
        text = "server 0 has died: it has said nothing for 3.1 s (kv_timeout_s)"
        worker.client.lost_server(0, text)  # although it still answers
        with pytest.raises(PeerLostError, match=f"{re.escape(text)}; no other server has taken its place within kv_re"):
            wait(worker.push(2))
        successor.ask("restored", kept)
        worker.client.back_server(0, [("127.0.0.1", successor.port)])
        require_all(worker.push_pull(4), 1 + 4)


@pytest.mark.parametrize("has_first", [True, False])
def test_a_push_ends_at_the_other_servers_of_its_key_when_the_one_that_decides_is_lost(has_first: bool) -> None:
    """`has_first`: the whole push was sent to the server that is lost. Room for more pushes is given back."""
    with served() as first, served(number=1) as second:
        worker = Worker(0, [first.port, second.port], counts=(100_000,), workers=1)
        worker.open()
        require_all(worker.push_pull(1), 1)
        first.stop()
        if not has_first:
            first.process.kill()
            first.process.wait()
        handle = worker.push(2)
        assert not handle.wait(0.3)  # the second one has it by then
        first.process.kill()
        for lost in (handle, worker.push(4), worker.push(8)):
            with pytest.raises(PeerLostError, match=r"server 0 at 127.* is gone"):
                wait(lost)
        require_outbox_is_empty(worker)
        worker.client.close()
        first.process.wait()
        first.process.returncode = 0


def require_outbox_is_empty(worker: Worker) -> None:
    until = time.monotonic() + _END_S
    while worker.client.metrics()["outbox_bytes"] > 0:
        assert time.monotonic() < until
        time.sleep(0.01)


def require_refused(handle: StoreHandle) -> None:
    """It fails, and then nothing of it is under way any more."""
    with pytest.raises(ValueError, match="without an optimizer"):
        wait(handle)
    deadline = time.monotonic() + _END_S
    while not handle.is_memory_free():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_push_after_one_that_was_refused_is_taken() -> None:
    with served() as server:
        # more chunks than leave at once, so that the first refusal comes before the last chunk is sent
        worker = Worker(0, [server.port], counts=(4_000_000, 7), workers=1, timeout_s=5.0)
        worker.open(rule="")
        for _ in range(2):
            require_refused(worker.push(1))
        worker.client.set_rule(0, "test", "mxnet", {}, 0, False, True)
        wait(worker.push(2))
        require_all(worker.pull(), 2)
        require_all(worker.push_pull(4), 6)
        worker.client.close()


def test_pushes_that_follow_a_refused_one_at_once_are_refused_each() -> None:
    with served() as server:
        worker = Worker(0, [server.port], workers=1, timeout_s=5.0)
        worker.open(rule="")
        handles = [worker.push(1) for _ in range(5)]
        for handle in handles:
            require_refused(handle)
        require_all(worker.pull(), 0)
        worker.client.set_rule(0, "test", "mxnet", {}, 0, False, True)
        require_all(worker.push_pull(4), 4)
        worker.client.close()


class Proxy:
    """A port before a server's, whose connections can be cut."""

    def __init__(self, port: int) -> None:
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port = self.door.getsockname()[1]
        self._target, self._open = port, list[socket.socket]()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.door.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._pass_all(source, target)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _pass_all(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            target.sendall(data)


class PaddingProxy(Proxy):
    """Adds 17 MB, which no worker reads, to the second answer of the server that has a body."""

    _CHALLENGE_BYTES, _WELCOME_BYTES = 16 + 32, 1  # of the handshake

    def _pass_all(self, source: socket.socket, target: socket.socket) -> None:
        if source.getsockname()[1] == self.port:
            return super()._pass_all(source, target)
        answers = 0
        with source.makefile("rb") as stream:
            for size in (self._CHALLENGE_BYTES, self._WELCOME_BYTES):
                target.sendall(stream.read(size))
            while message := stream.read(FRAME.size + HEAD.size):
                head, body = list(HEAD.unpack(message[FRAME.size :])), b""
                if head[6]:
                    tag, number, size = FRAME.unpack(stream.read(FRAME.size))
                    body = stream.read(size)
                    answers += 1
                    if answers == 2:
                        body += bytes(17 << 20)
                        head[6] = len(body)
                    body = FRAME.pack(tag, number, len(body)) + body
                target.sendall(message[: FRAME.size] + HEAD.pack(*head) + body)
        return None


def test_an_answer_about_many_keys_may_be_long() -> None:
    with served() as server:
        first = Worker(0, [server.port], counts=(3,))
        first.open()
        second = Worker(1, [PaddingProxy(server.port).port], counts=(3,))
        second.open()
        assert second.client.metrics()["received_bytes"] > 17 << 20
        wait(second.push(1))
        require_all(first.pull(), 1)
        for worker in (first, second):
            worker.client.close()


def test_a_pull_knows_for_whose_pushes_it_waits() -> None:
    with two_workers(is_sync=True) as (a, b):
        a.push(1)
        outs = a.full(-1)
        pull = a.client.pull(0, a.ids, [arrays.view(one) for one in outs], 0)
        assert not pull.wait(0.5)
        assert pull.awaited() == [1] and pull.missing() == "a server has no push of worker 1"
        b.push(2)
        wait(pull)
        require_all(outs, 3)
        assert pull.awaited() == [] and pull.missing() == ""


def test_a_connection_that_is_cut_is_made_again_and_nothing_counts_twice() -> None:
    with served() as server:
        proxy = Proxy(server.port)
        worker = Worker(0, [proxy.port], counts=(300_000, 7), workers=1)
        worker.open()
        for i in range(1, 31):
            cut = threading.Timer(0.002 * (i % 7), proxy.cut)
            cut.start()
            require_all(worker.push_pull(1), i)
            cut.join()
        worker.client.close()


def test_a_push_that_a_server_has_put_off_is_not_lost_with_its_connection() -> None:
    with served() as server:
        proxy = Proxy(server.port)
        worker = Worker(0, [proxy.port], counts=(7,), workers=1)
        worker.open(rule="")
        worker.client.set_rule(0, "program", "server", {"keeps_gradient": 1}, 0, False, True)
        wait(worker.push(1))  # the server puts off the next one until a program has taken this one
        values, outs = worker.full(2), worker.full(-1)
        views = ([arrays.view(one) for one in values], [arrays.view(one) for one in outs])
        later = worker.client.push_pull(0, worker.ids, *views, worker.rate, 0)
        assert not later.wait(1)
        proxy.cut()
        assert server.ask("updates", "2") == "ok"
        wait(later)
        require_all(outs, 1 + 2)
        worker.client.close()


def _lost(server: Server, end: Any, **options: Any) -> str:
    worker = Worker(0, [server.port], workers=1, **options)
    worker.open()
    require_all(worker.push_pull(1), 1)
    end(server.process)
    with pytest.raises(PeerLostError, match="server 0 at 127") as caught:
        for _ in range(100):
            worker.push_pull(1)
    worker.client.close()
    return str(caught.value)


def test_a_server_that_is_killed_is_lost_at_once() -> None:
    with pytest.raises(AssertionError), served() as server:
        assert "is gone" in _lost(server, lambda process: process.kill())


def test_a_server_that_is_stopped_is_lost_after_a_while() -> None:
    with served() as server:
        text = _lost(server, lambda _: server.stop(), timeout_s=2.0)
        assert "has not answered for" in text
        server.process.send_signal(signal.SIGCONT)


def test_pushes_that_a_server_has_not_kept_are_repeated_to_its_successor() -> None:
    with served() as server, served() as successor:
        worker = Worker(0, [server.port], workers=1, return_s=20.0)
        worker.open()
        require_all(worker.push_pull(1), 1)
        kept = server.ask("copies")
        require_all(worker.push_pull(2), 3)
        server.stop()
        late = worker.push(4)
        successor.ask("restored", kept)
        worker.client.back_server(0, [("127.0.0.1", successor.port)])
        wait(late)
        require_all(worker.pull(), 1 + 4)  # 2 was answered and is not in the copies
        require_all(worker.push_pull(8), 1 + 4 + 8)
        worker.client.close()
        server.process.send_signal(signal.SIGCONT)


ROWS, WIDTH = 20_000, 24


@pytest.mark.parametrize("is_sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "tcp"])
def test_rows_are_pushed_and_pulled_alone(is_sync: bool, shares_memory: bool) -> None:
    with served(shares_memory) as server:
        worker = Worker(0, [server.port], counts=(ROWS * WIDTH,), workers=1, node="here" if shares_memory else "")
        worker.open(is_sync)
        chance = np.random.default_rng(3)
        wanted = np.zeros((ROWS, WIDTH), np.float32)
        for _ in range(5):
            rows = np.sort(chance.choice(ROWS, 200, replace=False)).astype(np.int64)
            values = chance.integers(-8, 8, (len(rows), WIDTH)).astype(np.float32)
            pushed = (arrays.view(rows), WIDTH, arrays.view(values), (1.0, 0.0), 0, True)
            wait(worker.client.push_rows(0, 0, *pushed))
            wanted[rows] += values
            asked = np.sort(chance.choice(ROWS, 300, replace=False)).astype(np.int64)
            out = np.full((len(asked), WIDTH), -1, np.float32)
            wait(worker.client.pull_rows(0, 0, arrays.view(asked), WIDTH, arrays.view(out), 0))
            require_equal(out, wanted[asked])
        require_equal(worker.pull()[0], wanted.ravel())
        for bad in ([2, 1], [1, 1], [-1], [ROWS]):
            with pytest.raises(ValueError, match="row"):
                numbers = np.array(bad, np.int64)
                worker.client.pull_rows(0, 0, arrays.view(numbers), WIDTH, arrays.view(out[: len(bad)]), 0)
        worker.client.close()


def test_rows_that_are_not_pushed_keep_their_weights_and_momenta() -> None:
    with served() as server:
        worker = Worker(0, [server.port], counts=(ROWS * WIDTH,), workers=1)
        worker.open(rule="sgd", momentum=0.5)
        values = np.ones((1, WIDTH), np.float32)
        for row in (5, 5, 9):
            rows = np.array([row], np.int64)
            wait(worker.client.push_rows(0, 0, arrays.view(rows), WIDTH, arrays.view(values), (1.0, 0.0), 0, True))
        found = worker.pull()[0].reshape(ROWS, WIDTH)
        require_equal(found[[4, 5, 9]], np.array([[0.0], [-2.5], [-1.0]], np.float32) * values)
        worker.client.close()


def test_one_percent_of_the_rows_moves_less_than_three_percent_of_the_bytes() -> None:
    with served() as server:
        worker = Worker(0, [server.port], counts=(ROWS * WIDTH,), workers=1)
        worker.open()
        rows = np.arange(0, ROWS, 100, dtype=np.int64)
        out = np.empty((len(rows), WIDTH), np.float32)

        def moved() -> float:
            metrics = worker.client.metrics()
            return metrics["sent_bytes"] + metrics["received_bytes"]

        before = moved()
        wait(worker.client.pull_rows(0, 0, arrays.view(rows), WIDTH, arrays.view(out), 0))
        assert moved() - before < 0.03 * 4 * ROWS * WIDTH
        worker.client.close()


def test_a_forked_child_that_lets_go_of_a_store_writes_to_none_of_its_files(tmp_path: Path) -> None:
    with served() as server:
        worker = Worker(0, [server.port], workers=1)
        worker.open()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        about = {"secret": SECRET, "token": TOKEN, "node": "", "timeout_s": 20, "verbose": 0}
        own = StoreServer(number=1, capacity=CAPACITY, listeners=[listener.detach()], threads=1, **about)
        if (child := os.fork()) == 0:
            with contextlib.ExitStack() as stack:
                for i in range(40):
                    stack.enter_context((tmp_path / str(i)).open("wb"))
                own.close()
                del own, worker
                gc.collect()
            os._exit(0)
        deadline = time.monotonic() + 10
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == 0
        assert {file.stat().st_size for file in tmp_path.iterdir()} == {0}
        require_all(worker.push_pull(1), 1)
        own.close()
        worker.client.close()
