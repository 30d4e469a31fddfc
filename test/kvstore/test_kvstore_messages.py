"""A server and the messages of workers: good ones, ones that come twice or not at all, and broken ones."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import struct
import time

import numpy as np
import numpy.typing as npt
import pytest
from harness.exact import require_equal
from store_wire import BODY_TAG, FRAME, HEAD, HEAD_TAG, SAID, Server, Worker, head, join, joins, part_spec, rule, served

from ringtrain._core import DTYPES

COUNT = 1021


def _ones(factor: float = 1) -> npt.NDArray[np.float32]:
    return np.full(COUNT, factor, np.float32)


def _store(worker: Worker, counts: tuple[int, ...] = (COUNT,), is_sync: bool = False, staleness: int = -1) -> None:
    """For workers 0 and 1; what is pushed is added to the values."""
    worker.ask("create", part_spec(counts, is_sync, staleness), chunk=2)
    worker.ask("rule", rule("test"))


def test_values_are_those_that_were_assigned_and_pushed() -> None:
    with served() as server, Worker(server, 0) as worker, Worker(server, 1) as other:
        _store(worker)
        values = np.arange(COUNT, dtype=np.float32)
        worker.ask("assign", values.tobytes())
        worker.push(_ones(), 1)
        assert other.push(_ones(2), 1).number == 2
        require_equal(worker.pull(1), values + 3)
        answer = worker.push(_ones(4), 2, "push_pull")
        assert (answer.said, answer.number) == ("done", 3)
        require_equal(np.frombuffer(answer.body, np.float32), values + 7)


def test_a_push_that_comes_twice_counts_once() -> None:
    with served() as server, Worker(server, 0) as worker:
        _store(worker)
        worker.push(_ones(), 1)
        worker.push(_ones(), 1)
        require_equal(np.frombuffer(worker.push(_ones(), 1, "push_pull").body, np.float32), _ones())
        with Worker(server, 0) as successor:
            successor.push(_ones(), 1)
            successor.push(_ones(), 2)
            require_equal(successor.pull(2), _ones(2))


_CHANGES = [
    ("assign", {}, _ones(4).tobytes()),
    ("write_state", {"number": 0}, _ones(4).tobytes()),
    ("write_updates", {"number": 4}, b""),
]


@pytest.mark.parametrize(("said", "fields", "body"), _CHANGES, ids=[said for said, _, _ in _CHANGES])
@pytest.mark.parametrize("is_sync", [False, True])
@pytest.mark.parametrize("keeps_memory", [False, True])
def test_a_change_that_comes_twice_undoes_no_push_that_came_between(
    said: str, fields: dict[str, float], body: bytes, is_sync: bool, keeps_memory: bool
) -> None:
    """`keeps_memory`: the next server goes on with the memory of the first one, or from a snapshot."""

    def change(worker: Worker, count: int) -> None:
        assert worker.ask(said, body, push=count, **fields).said == "done"

    def require(worker: Worker, updates: int, value: float) -> None:
        assert worker.ask("read_updates").number == updates
        require_equal(worker.pull(), _ones(value))

    updates, value = (4, 0) if said == "write_updates" else (0, 4)
    with (
        served(shares_memory=keeps_memory) as server,
        Worker(server, 0) as worker,
        Worker(server, 1) as other,
        served(shares_memory=keeps_memory) as successor,
    ):
        words = worker.ask("create", part_spec((COUNT,), is_sync), chunk=2).body
        worker.ask("rule", rule("test"))
        change(worker, 1)
        require(worker, updates, value)
        worker.say("push", _ones(2).tobytes(), number=1, lr=1.0)
        assert worker.hear().said == "done"
        other.push(_ones(), 1)
        updates, value = updates + (1 if is_sync else 2), value + 3
        change(worker, 1)
        with Worker(server, 0) as again:
            change(again, 1)
        require(other, updates, value)
        if keeps_memory:
            ticket = struct.unpack_from("<IQ", words)[1]
            successor.ask("adopts", f"{part_spec((COUNT,), is_sync).hex()}:{server.process.pid}:{ticket}")
        else:
            successor.ask("restored", server.ask("copies"))
        with Worker(successor, 0) as after:
            change(after, 1)
            require(after, updates, value)
            change(after, 2)
            require(after, *((4, value) if said == "write_updates" else (updates, 4)))


def test_the_next_process_of_a_worker_counts_its_changes_from_1() -> None:
    with served() as server, Worker(server, 0) as worker, Worker(server, 1) as other:
        _store(worker)
        worker.ask("hello", number=0)
        worker.ask("assign", _ones(2).tobytes(), push=1)
        worker.ask("assign", _ones(4).tobytes(), push=2)
        with Worker(server, 0) as successor:
            successor.ask("hello", number=1)
            successor.ask("assign", _ones(8).tobytes(), push=1)
            require_equal(successor.pull(), _ones(8))
            other.push(_ones(), 1)
            successor.ask("assign", _ones(8).tobytes(), push=1)
            require_equal(successor.pull(), _ones(9))


def test_a_push_waits_for_the_one_before_it_to_be_sent_again() -> None:
    with served() as server, Worker(server, 0) as worker:
        _store(worker)
        early = worker.push(_ones(2), 2)
        assert (early.said, early.number) == ("early", 0)
        worker.push(_ones(), 1)
        require_equal(worker.pull(1), _ones())
        worker.push(_ones(2), 2)
        require_equal(worker.pull(2), _ones(3))


CHUNK, CHUNKS = 16_384, 3


def _say_chunks(
    worker: Worker, chunks: tuple[int, ...], factor: float, number: int, push: int, said: str = "push"
) -> None:
    for chunk in chunks:
        values = np.full(CHUNK, factor, np.float32)
        worker.say(said, values.tobytes(), chunk=chunk, number=number, push=push, lr=1.0)


def _require_all_chunks(worker: Worker, value: float) -> None:
    for chunk in range(CHUNKS):
        require_equal(worker.pull(0, chunk=chunk), np.full(CHUNK, value, np.float32))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_push_of_several_chunks_counts_when_all_have_come_or_not_at_all(threads: int) -> None:
    with served(threads=threads) as server, Worker(server, 1) as other:
        _store(other, (CHUNKS * CHUNK,))
        with Worker(server, 0) as worker:
            _say_chunks(worker, (0, 2), 1, number=1, push=5)
            assert worker.has_heard_nothing()
            _require_all_chunks(other, 0)
            _say_chunks(worker, (1,), 1, number=1, push=5)
            assert [worker.hear().said for _ in range(CHUNKS)] == ["done"] * CHUNKS
            _require_all_chunks(other, 1)
            _say_chunks(worker, (0, 1), 2, number=2, push=6)
            assert worker.has_heard_nothing()
        server.tell("lost", 0)
        _require_all_chunks(other, 1)
        server.tell("back", 0)
        with Worker(server, 0) as successor:
            successor.ask("attach")
            _say_chunks(successor, (0, 1, 2), 4, number=2, push=1, said="push_pull")
            for _ in range(CHUNKS):
                answer = successor.hear()
                assert answer.said == "done"
                require_equal(np.frombuffer(answer.body, np.float32), np.full(CHUNK, 5, np.float32))


def test_the_chunks_of_a_push_are_early_or_refused_together() -> None:
    with served() as server, Worker(server, 0) as worker:
        worker.ask("create", part_spec((CHUNKS * CHUNK,)), chunk=2)
        _say_chunks(worker, (0, 1, 2), 1, number=1, push=1)
        assert [worker.hear().said for _ in range(CHUNKS)] == ["refused"] * CHUNKS
        _say_chunks(worker, (1,), 1, number=1, push=1)  # it comes again, and is refused again
        assert worker.hear().said == "refused"
        worker.ask("rule", rule("test"))
        _say_chunks(worker, (0, 1, 2), 2, number=2, push=2)
        assert [(worker.hear()[:2]) for _ in range(CHUNKS)] == [("early", 0)] * CHUNKS
        _say_chunks(worker, (0, 1), 2, number=1, push=2)
        worker.say("push", b"abc", chunk=2, number=1, push=2)
        assert [worker.hear().said for _ in range(CHUNKS)] == ["refused"] * CHUNKS
        _say_chunks(worker, (2, 0, 1), 4, number=1, push=3)
        assert [worker.hear().said for _ in range(CHUNKS)] == ["done"] * CHUNKS
        _require_all_chunks(worker, 4)


def test_a_request_that_waits_takes_the_number_with_which_it_comes_again() -> None:
    """Its worker has heard meanwhile that a push before it was refused."""
    with served() as server, Worker(server, 0) as worker:
        _store(worker, (CHUNKS * CHUNK,))
        _say_chunks(worker, (0,), 1, number=1, push=2)
        pull = worker.say("pull", number=2)
        assert worker.has_heard_nothing()
        assert worker.say("pull", id=pull, number=1) == pull
        assert worker.hear().said == "held"
        _say_chunks(worker, (1, 2), 1, number=1, push=2)
        answers = [worker.hear() for _ in range(CHUNKS + 1)]
        assert [answer.said for answer in answers] == ["done"] * (CHUNKS + 1)
        (value,) = [answer.body for answer in answers if answer.id == pull]
        require_equal(np.frombuffer(value, np.float32), np.ones(CHUNK, np.float32))


def test_a_worker_hears_that_chunks_of_a_large_push_have_come() -> None:
    chunks = 20
    with served() as server, Worker(server, 0) as worker:
        _store(worker, (chunks * CHUNK,))
        _say_chunks(worker, tuple(range(16)), 1, number=1, push=1)
        assert {worker.hear().said for _ in range(16)} == {"staged"}
        _say_chunks(worker, (3,), 1, number=1, push=1)
        assert worker.hear().said == "staged"
        _say_chunks(worker, tuple(range(16, chunks)), 1, number=1, push=1)
        assert {worker.hear().said for _ in range(chunks)} == {"done"}
        require_equal(worker.pull(1, chunk=19), np.ones(CHUNK, np.float32))


def test_a_round_is_answered_when_all_have_pushed() -> None:
    with served(threads=2) as server, Worker(server, 0) as worker, Worker(server, 1) as other:
        _store(worker, is_sync=True)
        assert worker.push(_ones(), 1, "push_pull").said == "held"
        assert worker.push(_ones(), 1, "push_pull").said == "held"
        assert worker.has_heard_nothing()
        answer = other.push(_ones(2), 1, "push_pull")
        for came in (answer, worker.hear(), worker.hear()):
            assert came.said == "done"
            require_equal(np.frombuffer(came.body, np.float32), _ones(3))


def test_a_worker_too_far_ahead_waits_for_slow_workers_and_not_for_dead_ones() -> None:
    with served(threads=2) as server, Worker(server, 0) as worker, Worker(server, 1) as other:
        _store(worker, staleness=1)
        other.ask("attach")
        assert worker.push(_ones(), 1, "push_pull").said == "done"
        assert worker.push(_ones(), 2, "push_pull").said == "held"
        assert worker.has_heard_nothing()
        other.push(_ones(), 1)
        assert worker.hear().said == "done"
        assert worker.push(_ones(), 3, "push_pull").said == "held"
        server.tell("lost", 1)
        assert worker.hear().said == "done"
        assert other.is_ended()


def test_a_worker_that_died_before_a_key_was_made_holds_up_no_push_to_it() -> None:
    with served(threads=2) as server, Worker(server, 0) as worker:
        server.tell("lost", 1)
        _store(worker, staleness=1)
        for number in (1, 2, 3):
            assert worker.push(_ones(), number, "push_pull").said == "done"
        server.tell("back", 1)
        worker.ask("create", part_spec((COUNT,), staleness=1), store=1, chunk=2)
        worker.ask("rule", rule("test"), store=1)
        with Worker(server, 1) as other:
            other.ask("attach", store=1)
            assert worker.push(_ones(), 1, "push_pull", store=1).said == "done"
            assert worker.push(_ones(), 2, "push_pull", store=1).said == "held"
            other.push(_ones(), 1, store=1)
            assert worker.hear().said == "done"


def test_a_joined_worker_holds_up_no_round() -> None:
    with served() as server, Worker(server, 0) as worker, Worker(server, 1) as other:
        _store(worker, is_sync=True)
        assert worker.push(_ones(), 1, "push_pull").said == "held"
        other.ask("join", join(1, 1))
        require_equal(np.frombuffer(worker.hear().body, np.float32), _ones())


@pytest.mark.parametrize("has_joined", [False, True])
def test_nobody_waits_for_joined_workers_when_one_that_died_comes_back(has_joined: bool) -> None:
    with served() as server, Worker(server, 0) as worker, Worker(server, 1) as other:
        _store(worker, staleness=0)
        other.ask("attach")
        worker.ask("join", join(0, 1))
        if has_joined:
            other.ask("join", join(1, 1))
        server.tell("lost", 1)
        server.tell("back", 1)
        with Worker(server, 1) as after:
            after.ask("attach")
            assert after.push(_ones(), 1, "push_pull").said == "done"
            assert after.push(_ones(), 2, "push_pull").said == "done"


def test_a_worker_that_has_left_a_round_of_joins_lets_in_those_of_that_round_only() -> None:
    with served() as server, Worker(server, 0) as worker, Worker(server, 1) as other:
        _store(worker, is_sync=True)
        worker.ask("join", join(0, 10))
        other.ask("join", join(1, 20))
        worker.ask("resume", joins((0, 10), (1, 20)))
        assert worker.push(_ones(), 1, "push_pull").said == "held"
        other.ask("join", join(1, 20))  # again, as a worker says it that has found another server
        assert worker.has_heard_nothing()
        other.ask("join", join(1, 21))
        assert worker.hear().said == "done"
        other.ask("resume", joins((0, 10), (1, 20)))
        assert worker.push(_ones(), 2, "push_pull").said == "done"


def test_a_joined_worker_holds_up_no_key_that_is_made_later() -> None:
    with served() as server, Worker(server, 0) as worker, Worker(server, 1) as other:
        _store(worker, is_sync=True)
        other.ask("join", join(1, 1))
        worker.ask("create", part_spec((COUNT,), is_sync=True, first=1), chunk=2)
        assert worker.push(_ones(), 1, "push_pull", part=1).said == "done"


def test_nobody_waits_for_a_worker_that_is_done_and_its_last_pushes_count() -> None:
    with served(threads=2) as server, Worker(server, 0) as worker, Worker(server, 1) as other:
        _store(worker, staleness=0)
        other.ask("attach")
        assert worker.push(_ones(), 1, "push_pull").said == "held"
        server.tell("left", 1)
        assert worker.hear().said == "done"
        other.push(_ones(2), 1)
        require_equal(worker.pull(1), _ones(3))


def test_a_round_waits_for_no_worker_that_never_came() -> None:
    with served() as server, Worker(server, 0) as worker, Worker(server, 1) as other:
        _store(worker, is_sync=True)
        server.tell("lost", 2)  # as a server hears that takes the place of another
        assert worker.push(_ones(), 1).said == "done"
        assert other.push(_ones(), 1, "push_pull").said == "done"


def test_codes_are_read_by_the_server() -> None:
    with served() as server, Worker(server, 0) as worker:
        _store(worker, (32,))
        codes = bytes([0b11100000]) + bytes(7)  # of the first four values: + - 0 0
        worker.ask("push", codes, number=1, lr=1, codes=1, threshold=0.5, dtype=DTYPES["uint8"])
        require_equal(worker.pull(1), np.array([0.5, -0.5] + [0] * 30, np.float32))


def test_a_server_can_take_the_place_of_another_one() -> None:
    values = np.arange(40000, dtype=np.float32)
    with served() as server, Worker(server, 0) as worker, served() as successor:
        worker.ask("create", part_spec((16384, 16384, 7232, 7)), chunk=2)
        worker.ask("rule", rule("sgd", momentum=0.5))
        for chunk in range(3):
            worker.ask("assign", values[chunk * 16384 : (chunk + 1) * 16384].tobytes(), chunk=chunk)
        worker.push(values[:16384], 1)
        kept = server.ask("copies")
        successor.ask("restored", kept)
        worker.push(values[:16384], 2)
        wanted = worker.pull(2)
        with Worker(successor, 0) as after:
            words = after.ask("attach").body
            assert struct.unpack("<4Q", words[-32:]) == (1, 0, 0, 0)  # pushes of this worker, by chunk
            after.push(values[:16384], 2)
            require_equal(after.pull(2), wanted)
            require_equal(after.pull(chunk=2), values[32768:])
            assert after.ask("read_updates").number == 2


def test_a_create_that_the_server_before_has_carried_out_is_answered_by_its_successor() -> None:
    with served() as server, Worker(server, 0) as worker, served() as successor:
        worker.ask("create", part_spec((COUNT,)), chunk=2, number=77)
        successor.ask("restored", server.ask("copies"))
        with Worker(successor, 0) as after:
            words = after.ask("create", part_spec((COUNT,)), chunk=2, number=77).body
            assert words == after.ask("create", part_spec((COUNT,)), chunk=2, number=78).body
            after.ask("rule", rule("test"))
            after.ask("assign", _ones().tobytes())
            require_equal(after.pull(), _ones())
            after.say("create", part_spec((COUNT, 1)), chunk=2, number=79)
            assert after.hear().said == "refused"


@pytest.mark.parametrize("has_keys", [True, False])
def test_keys_and_optimizers_newer_than_the_snapshot_of_a_server_are_lost_with_it(has_keys: bool) -> None:
    peer_lost = 4
    with served() as server, Worker(server, 0) as worker, served() as successor:
        if has_keys:
            worker.ask("create", part_spec((COUNT,)), chunk=2)
        successor.ask("restored", server.ask("copies"))
        with Worker(successor, 0) as after:
            for said, part in (("push", 0), ("assign", 1)):
                after.say(said, _ones().tobytes(), number=1, part=part)
                answer = after.hear()
                assert (answer.said, answer.number) == ("refused", peer_lost) and b"snapshot" in answer.body
            after.say("attach", chunk=2)
            answer = after.hear()
            assert (answer.said, answer.number) == ("refused", peer_lost) and b"snapshot" in answer.body


def test_a_question_that_comes_twice_has_one_effect() -> None:
    with served() as server, Worker(server, 0) as worker:
        number = 77
        first = worker.ask("create", part_spec((COUNT,)), chunk=2, number=number)
        again = worker.ask("create", part_spec((COUNT,)), chunk=2, number=number)
        assert first.body == again.body
        worker.say("create", part_spec((COUNT,)), chunk=2, number=number + 1)
        assert worker.hear().said == "refused"


def test_a_request_that_does_not_fit_is_refused_and_the_connection_goes_on() -> None:
    with served() as server, Worker(server, 0) as worker:
        _store(worker)
        right = _ones().tobytes()
        bad = [
            ("push", right[4:], {"number": 1}),
            ("push", right, {"number": 0}),
            ("push", right, {"number": 1, "chunk": 1}),
            ("push", right, {"number": 1, "part": 1}),
            ("push", right, {"number": 1, "store": 1}),
            ("push", right[:128], {"number": 1, "codes": 7, "threshold": 1}),
            ("push", right, {"number": 1, "dtype": 0}),
            ("pull", right, {}),
            ("pull", b"", {"wanted": 0}),
            ("pull", b"", {"number": -1}),
            ("assign", right[8:], {}),
            ("read_state", b"", {"number": 5}),
            ("write_state", right, {"number": 2**40}),
            ("create", b"\xff" * 40, {"number": 5, "chunk": 2}),
            ("rule", b"\xff" * 40, {"number": 6}),
            ("hello", b"", {"number": 2**20}),
        ]
        for said, body, fields in bad:
            worker.say(said, body, **fields)
            assert worker.hear().said == "refused", (said, fields)
        require_equal(worker.pull(), _ones(0))


@pytest.mark.parametrize("secret", [b"", b"another"], ids=["none", "another"])
def test_a_stranger_without_the_secret_is_not_heard(secret: bytes) -> None:
    with served() as server, Worker(server, 0, secret) as worker:
        assert worker.is_ended()


def _broken(chance: random.Random) -> bytes:
    """Bytes that no worker sends, of all kinds."""
    said = chance.choice(SAID)
    fields = {
        "dtype": chance.randrange(256),
        "wanted": chance.randrange(256),
        "chunk": chance.choice([0, 1, 2**31, 2**32 - 1]),
        "store": chance.choice([0, 0, 1, 2**32 - 1]),
        "part": chance.choice([0, 0, 1, 2**32 - 1]),
        "codes": chance.choice([0, 1, 2, 3, 2**32 - 1]),
        "threshold": chance.choice([0.0, float("nan"), float("inf"), -1.0]),
        "ranges": chance.choice([0, 1, 2**31, 2**32 - 1]),
        "number": chance.choice([0, 1, -1, 2**62, -(2**63)]),
    }
    size = chance.choice([0, 4, 100, 4 * COUNT, 2**24, 2**32 - 1])
    kind = chance.randrange(5)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 200))
    if kind == 1:  # frames that lie about their length
        return FRAME.pack(chance.choice([HEAD_TAG, BODY_TAG, 0]), 1, chance.choice([0, 1, 57, 2**40, 2**64 - 1]))
    words = head(chance.randrange(2**16) if kind == 2 else said, body_bytes=size, **fields)
    data = FRAME.pack(HEAD_TAG, 1, HEAD.size) + words
    if kind == 3:  # a body that is not the one that was announced, or only its beginning
        other = chance.choice([size, size + 1, 2**63])
        return data + FRAME.pack(BODY_TAG, chance.choice([1, 2]), other) + chance.randbytes(50)
    body = chance.randbytes(min(size, 1000))
    if said in ("create", "attach", "rule") and chance.random() < 0.5:
        body = struct.pack("<Q", 2 ** chance.randrange(64)) * chance.randrange(1, 9)
        data = FRAME.pack(HEAD_TAG, 1, HEAD.size) + head(said, body_bytes=len(body), **fields)
    return data + FRAME.pack(BODY_TAG, 1, len(body)) + body


def _strike(server: Server, chance: random.Random, count: int) -> None:
    """So many broken messages, one connection for each few of them."""
    sent = 0
    while sent < count:
        with Worker(server, 1) as worker:
            for _ in range(chance.randrange(1, 8)):
                try:
                    worker.sock.sendall(_broken(chance))
                except ConnectionError:
                    break
                sent += 1


def test_10000_broken_messages_neither_end_a_server_nor_let_it_grow() -> None:
    chance = random.Random(19)
    with served() as server, Worker(server, 0) as worker:
        _store(worker)
        _strike(server, chance, 2000)
        before = server.resident_kb()
        _strike(server, chance, 10000)
        assert server.resident_kb() < before + 2048
        worker.push(_ones(), 1)
        require_equal(worker.pull(1), _ones())


def test_a_create_that_claims_more_than_the_host_has_is_refused() -> None:
    with served() as server, Worker(server, 0) as worker:
        _store(worker)
        elements = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
        for count in (elements, 2**40):
            worker.say("create", part_spec([count]), number=1 + count, store=3, chunk=1)
            refused = worker.hear()
            assert refused.said == "refused" and b"start more servers" in refused.body
        worker.push(_ones(), 1)
        require_equal(worker.pull(1), _ones())


def test_a_server_lives_through_strangers_while_its_process_has_no_descriptors() -> None:
    with served() as server, Worker(server, 0) as worker:
        _store(worker)
        limit = 20 + len(os.listdir(f"/proc/{server.process.pid}/fd"))
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        # A thread of the process takes the descriptors that the server gives back, as a data loader would.
        server.ask("takes_descriptors", "1")
        until, number = time.monotonic() + 3, 0
        while time.monotonic() < until:
            strangers = []
            for _ in range(60):
                with contextlib.suppress(OSError):
                    strangers.append(socket.create_connection(("127.0.0.1", server.port), timeout=1))
            for stranger in strangers:
                stranger.close()
            number += 1
            worker.push(_ones(), number)
            require_equal(worker.pull(number), _ones(number))
        server.ask("takes_descriptors", "0")
        with _dialled(server, 1) as other:
            require_equal(other.pull(), _ones(number))


def _dialled(server: Server, rank: int) -> Worker:
    """Dials again, as workers do, while the server has no descriptor for the connection and turns it away."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return Worker(server, rank)
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
