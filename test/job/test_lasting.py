"""Connections to a rendezvous that the network breaks: each message arrives once, and a death is still a death."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.hosts import hosts_or_skip
from harness.ringrun_job import wait_until
from harness.socket_ranks import free_port, started

from ringtrain.job.rendezvous import conversation
from ringtrain.job.rendezvous.conversation import Conversation
from ringtrain.job.rendezvous.lasting import GivenUpError, GoneError, LastingConnection
from ringtrain.job.rendezvous.listener import Hub, Line, bound
from ringtrain.job.rendezvous.protocol import Connection, packed
from ringtrain.job.rendezvous.server import Place, connect

SECRET = b"of these tests"
END_S = 30.0
MOST_RESETS = 30
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends a reset


class Desk:
    """A server that keeps what it hears, and whom it loses."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[tuple[Line, Any]] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
        self.hub = Hub(bound("127.0.0.1", 0), SECRET, self, silent_s=1.0, tick_s=0.02)

    def hear(self, line: Line, message: Any) -> None:
        self.heard.put((line, message))

    def lose(self, line: Line, text: str) -> None:
        if line.conversation is not None:  # else it was reset before it had said whose it is
            self.lost.put((text, time.monotonic()))

    def tick(self) -> None:
        pass

    def tell(self, line: Line, message: Any) -> None:
        self.hub.call(lambda: self.hub.send(line, message))


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    desk.hub.start()
    yield desk
    desk.hub.close()


class BadWay(threading.Thread):
    """A way to a port that resets each connection after some bytes, both ways together, but no connection for ever."""

    def __init__(self, port: int, seed: int):
        super().__init__(daemon=True)
        self.resets = 0
        self._random = random.Random(seed)
        self._to = port
        self._listener = bound("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self._is_over = False
        self.start()

    def end(self) -> None:
        """No connection comes any more."""
        self._is_over = True
        socket.create_connection(("127.0.0.1", self.port)).close()

    def run(self) -> None:
        while not self._is_over:
            ends = (self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._to)))
            self._carry(ends, self._random.choice([200, 2000, 20_000, 200_000]) * self._random.uniform(0.2, 1))
            for end in ends:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.close()
            self.resets += 1

    def _carry(self, ends: tuple[socket.socket, socket.socket], most: float) -> None:
        waiting = dict.fromkeys(ends, b"")  # by where it goes
        for end in ends:
            end.setblocking(False)
        with contextlib.suppress(ConnectionError):
            while most > 0 or self.resets >= MOST_RESETS:
                time.sleep(0.0005)
                for one, other in (ends, ends[::-1]):
                    with contextlib.suppress(BlockingIOError):
                        if not waiting[other]:
                            waiting[other] = one.recv(4096)
                            most -= len(waiting[other])
                            if not waiting[other]:
                                return
                        waiting[other] = waiting[other][other.send(waiting[other]) :]


def reach(port: int) -> LastingConnection:
    return LastingConnection(connect(Place("127.0.0.1", [port]), [port], SECRET, END_S), SECRET, 3.0)


def reset(connection: LastingConnection) -> None:
    """As the network does it, on the side of the server."""
    sock = connection._connection.take_socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    connection._cut()


def messages(seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    sizes = [draw.choice([0, 10, 1000, 20_000]) for _ in range(100)]
    return [{"number": number, "text": draw.randbytes(size // 2).hex()} for number, size in enumerate(sizes)]


@pytest.mark.parametrize("seed", range(4))
def test_each_message_arrives_once_and_in_order_over_connections_that_are_reset(
    desk: Desk, monkeypatch, seed: int
) -> None:
    monkeypatch.setattr(conversation, "AWAY_S", END_S)  # on a busy machine
    way = BadWay(desk.hub.port, seed)
    connection = reach(way.port)
    there, back = messages(seed), messages(seed + 100)
    heard: list[Any] = []

    def hear() -> None:
        with contextlib.suppress(GoneError):  # the end of the test
            while True:
                heard.extend(one for one in connection.hear() if one.get("kind") != "beat")

    threading.Thread(target=hear, daemon=True).start()
    came = []
    for go, answer in zip(there, back, strict=True):
        connection.send(go)
        if go["number"] % 10 == 0:
            line, message = desk.heard.get(timeout=END_S)
            came.append(message)
        desk.tell(line, answer)
        desk.tell(line, {"kind": "beat"})
    came += [desk.heard.get(timeout=END_S)[1] for _ in there[len(came) :]]
    wait_until(lambda: len(heard) >= len(back))
    assert came == there and heard == back
    assert way.resets > 3 and desk.lost.empty()
    way.end()


def test_a_message_is_forgotten_when_the_other_side_has_it() -> None:
    mine, theirs = Conversation(), Conversation()
    for number in range(1000):
        mine.keep(b"%d" % number)
        if theirs.hear():
            mine.forget(theirs.tell()["heard"])
    assert len(mine.lacking(theirs.heard - 3)) == 3
    for wrong in (theirs.heard + 1, theirs.heard - 4):
        with pytest.raises(ValueError, match="cannot have been heard"):
            mine.lacking(wrong)


def test_an_attempt_that_is_given_up_is_not_the_end_of_the_process(desk: Desk, monkeypatch) -> None:
    connection = reach(desk.hub.port)
    connection.send({"number": 1})
    assert connection.hear(time.monotonic() + END_S) == []
    attempts = []

    def answer_late(self: Connection, most_bytes: int, deadline: float) -> Any:
        attempts.append(receive(self, most_bytes, deadline))
        if len(attempts) < 3:
            raise TimeoutError
        return attempts[-1]

    receive = Connection.receive
    reset(connection)
    monkeypatch.setattr(Connection, "receive", answer_late)
    connection._connect_again(time.monotonic() + END_S)
    connection.send({"number": 2})
    assert [desk.heard.get(timeout=END_S)[1] for _ in range(2)] == [{"number": 1}, {"number": 2}]
    assert len(attempts) == 3 and desk.lost.empty()


def test_a_message_of_which_a_part_has_come_in_time_is_whole_for_the_next_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        sender, _ = server.accept()
        connection, data = Connection(sock), packed({"number": 1})
        for part in (data[:3], data[3:10], data[10:]):
            with pytest.raises(TimeoutError):
                connection.receive(100, time.monotonic() + 0.05)
            sender.sendall(part)
        assert connection.receive(100, time.monotonic() + END_S) == {"number": 1}
        sender.close()


def test_nobody_makes_a_connection_again_that_its_owner_has_closed(desk: Desk, monkeypatch) -> None:
    connection = reach(desk.hub.port)
    connection.send({"number": 1})
    assert connection.hear(time.monotonic() + END_S) == []
    errors = []

    def hear() -> None:
        try:
            connection.hear()
        except GoneError as error:
            errors.append(error)

    def is_turned_away(*_: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(Connection, "prove_as_rank", is_turned_away)
    reset(connection)
    thread = threading.Thread(target=hear)
    thread.start()
    wait_until(lambda: connection.broken_for_s() > 0.1)
    connection.close()
    thread.join(END_S)
    assert not thread.is_alive() and errors


def test_a_process_that_ends_is_lost_at_once(desk: Desk) -> None:
    connection = reach(desk.hub.port)
    connection.send({"number": 1})
    desk.heard.get(timeout=END_S)
    assert connection.hear(time.monotonic() + END_S) == []  # a kernel that has more to read resets the connection
    began_s = time.monotonic()
    connection.close()
    text, at_s = desk.lost.get(timeout=END_S)
    assert text == "its process has ended" and at_s - began_s < conversation.AWAY_S / 2


def test_a_process_that_does_not_come_back_is_lost_after_a_while_and_hears_of_it(desk: Desk, monkeypatch) -> None:
    monkeypatch.setattr(conversation, "AWAY_S", 0.3)
    connection = reach(desk.hub.port)
    connection.send({"number": 1})
    assert connection.hear(time.monotonic() + END_S) == []  # how much was heard
    first, _ = desk.heard.get(timeout=END_S)
    began_s = time.monotonic()
    reset(connection)
    text, at_s = desk.lost.get(timeout=END_S)
    assert "the network has broken its connection" in text and at_s - began_s >= 0.3
    with pytest.raises(GivenUpError):
        connection.hear(time.monotonic() + END_S)
    connection.send({"number": 2})
    line, message = desk.heard.get(timeout=END_S)
    assert message == {"number": 2} and line is not first


def test_a_server_that_has_ended_is_gone_at_once(desk: Desk) -> None:
    connection, other = reach(desk.hub.port), reach(desk.hub.port)
    for one in (connection, other):
        one.send({"number": 1})
        assert one.hear(time.monotonic() + END_S) == []
    reset(other)
    desk.hub.close()
    for one in (connection, other):  # a closed connection, and one that its host refuses
        with pytest.raises(GoneError):
            one.hear(time.monotonic() + END_S)


INIT = """
import os, time, ringtrain as hvd
while os.environ["RINGTRAIN_RANK"] == "2" and not os.path.exists(os.environ["GO"]):
    time.sleep(0.01)
hvd.init()
print("ranks", hvd.allreduce(1.0, op=hvd.Sum), flush=True)
"""


def test_ranks_that_wait_in_init_survive_resets_of_their_connections(tmp_path: Path) -> None:
    go, port = tmp_path / "go", free_port()
    with hosts_or_skip(2) as hosts:
        place = f"{hosts.names[0]}:{port}"
        with started(INIT, 3, tmp_path, hosts, GO=str(go), RINGTRAIN_RENDEZVOUS=place) as ranks:
            for number in range(6):
                time.sleep(0.7)
                hosts.reset_connections(number % 2, port)
            go.touch()
            assert ranks.outputs() == ["ranks 3.0\n"] * 3
