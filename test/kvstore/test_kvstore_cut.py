"""A push of a key at two servers is applied at both or at neither, whatever its worker has sent before it dies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from harness.exact import require_equal
from store_wire import Server, Worker, part_spec, rule, served

# Server 0 is the primary of the key. A Verdict of csrc/kvstore/wire/message.h.
PRIMARY, APPLIES, DROPS, UNKNOWN = 0, 1, 2, 3
CHUNK, CHUNKS = 16_384, 2
# So many elements are in the piece of each server.
COUNTS = (COUNT := 1021, CHUNKS * CHUNK)


@contextlib.contextmanager
def two_servers() -> Iterator[list[Server]]:
    with served(number=0) as first, served(number=1, threads=2) as second:
        servers = [first, second]
        for server, count in zip(servers, COUNTS, strict=True):
            with Worker(server, 1) as maker:
                maker.ask("create", part_spec((count,)), chunk=2)
                maker.ask("rule", rule("test"))
        yield servers


def chunks_of(server: int) -> int:
    return (1, CHUNKS)[server]


def push(
    worker: Worker, server: int, factor: float, number: int = 1, verdict: int = 0, push: int | None = None
) -> None:
    """Says the chunks of the `number`-th push of the key by a worker. `push`: how many it has begun, with this one."""
    for chunk in range(chunks_of(server)):
        values = np.full(COUNTS[server] // chunks_of(server), factor, np.float32)
        about = {"chunk": chunk, "number": number, "primary": PRIMARY, "verdict": verdict, "lr": 1.0}
        worker.say("push", values.tobytes(), push=number if push is None else push, **about)


def settle(worker: Worker, verdict: int, number: int = 1) -> None:
    worker.say("settle", number=number, push=number, primary=PRIMARY, verdict=verdict)


def require_values(servers: list[Server], value: float) -> None:
    for server in servers:
        require_value(server, value)


def require_value(server: Server, value: float) -> None:
    with Worker(server, 1) as reader:
        for chunk in range(chunks_of(server.number)):
            found = reader.pull(chunk=chunk)
            require_equal(found, np.full(len(found), value, np.float32))


def answers(worker: Worker, server: int) -> list[str]:
    return [worker.hear().said for _ in range(chunks_of(server))]


def lose_worker(servers: list[Server]) -> None:
    """The worker is dead, and the second server hears from the first one what it has begun to apply."""
    begun = servers[0].ask("loses", "0")
    servers[1].ask("loses", "0")
    assert servers[1].ask("settles", f"0:0:{begun}") == "ok"


def test_a_push_counts_at_a_server_once_its_worker_says_that_all_have_it() -> None:
    with two_servers() as servers, Worker(servers[0], 0) as at_first, Worker(servers[1], 0) as at_second:
        push(at_second, 1, 3)
        assert at_second.hear().said == "ready"
        push(at_first, 0, 3)
        assert at_first.has_heard_nothing()
        pull = at_second.say("pull", number=1)  # sees the push before it
        assert at_second.has_heard_nothing()
        require_values(servers, 0)
        settle(at_first, APPLIES)
        assert at_first.hear().said == "done"
        settle(at_second, APPLIES)
        assert answers(at_second, 1) == ["done"] * CHUNKS
        answer = at_second.hear()
        assert (answer.id, answer.said) == (pull, "done")
        require_equal(np.frombuffer(answer.body, np.float32), np.full(CHUNK, 3, np.float32))
        require_values(servers, 3)


def test_a_push_that_a_server_refuses_is_dropped_at_the_other_one() -> None:
    with two_servers() as servers, Worker(servers[0], 0) as at_first, Worker(servers[1], 0) as at_second:
        push(at_first, 0, 3)
        at_second.say("push", b"abc", number=1, push=1, primary=PRIMARY)
        assert at_second.hear().said == "refused"
        settle(at_first, DROPS)
        assert at_first.hear().said == "refused"
        push(at_first, 0, 5, verdict=DROPS)  # it comes again
        assert at_first.hear().said == "refused"
        settle(at_second, DROPS, 2)  # of a push that has not come
        assert at_second.hear().said == "refused"
        require_values(servers, 0)


def test_a_push_that_comes_again_says_the_verdict_and_is_ready_as_before() -> None:
    with two_servers() as servers, Worker(servers[1], 0) as worker:
        push(worker, 1, 3)
        push(worker, 1, 3)
        assert [worker.hear().said for _ in range(1 + CHUNKS)] == ["ready"] * (1 + CHUNKS)
        push(worker, 1, 3, verdict=APPLIES)
        assert [worker.hear().said for _ in range(2 * CHUNKS)] == ["ready", "done", "done", "done"]
        push(worker, 1, 4, number=2)
        push(worker, 1, 5, number=3)
        assert [worker.hear().said for _ in range(2)] == ["ready", "ready"]
        settle(worker, APPLIES, 3)
        assert worker.has_heard_nothing()
        settle(worker, APPLIES, 2)
        assert [worker.hear().said for _ in range(2 * CHUNKS)] == ["done"] * (2 * CHUNKS)


@pytest.mark.parametrize("has_begun", [True, False])
def test_after_a_death_a_push_is_at_all_servers_if_the_first_has_begun_it(has_begun: bool) -> None:
    with two_servers() as servers:
        with Worker(servers[0], 0) as at_first, Worker(servers[1], 0) as at_second:
            for number, factor in ((1, 3), (2, 4)):
                push(at_second, 1, factor, number)
                assert at_second.hear().said == "ready"
                push(at_first, 0, factor, number)
            settle(at_first, APPLIES, 1)
            assert at_first.hear().said == "done"
            if has_begun:
                settle(at_first, APPLIES, 2)
                assert at_first.hear().said == "done"
        lose_worker(servers)
        require_values(servers, 7 if has_begun else 3)


def test_a_process_in_the_place_of_a_dead_one_waits_until_its_pushes_are_settled() -> None:
    with two_servers() as servers:
        with Worker(servers[0], 0) as at_first, Worker(servers[1], 0) as at_second:
            push(at_second, 1, 3)
            assert at_second.hear().said == "ready"
            push(at_first, 0, 3, verdict=APPLIES)
            assert at_first.hear().said == "done"
        servers[1].ask("loses", "0")
        with Worker(servers[1], 0) as successor:
            assert successor.ask("hello", number=1).said == "done"
            assert successor.ask("attach").said == "held"
            servers[1].ask("settles", f"0:0:{servers[0].ask('loses', '0')}")
            assert successor.ask("attach").said == "done"
        require_values(servers, 3)


def test_a_push_of_a_dead_worker_is_dropped_when_the_server_that_decides_is_lost() -> None:
    with two_servers() as servers:
        with Worker(servers[1], 0) as worker:
            push(worker, 1, 3)
            assert worker.hear().said == "ready"
        servers[1].ask("loses", "0")
        with Worker(servers[1], 0) as successor:
            assert successor.ask("hello", number=1).said == "done"
            assert successor.ask("attach").said == "held"
            servers[1].tell("lost_server", 0)
            assert successor.ask("attach").said == "done"
        require_values(servers, 0)


def test_a_worker_that_connects_again_sends_its_push_again_and_it_counts_once() -> None:
    with two_servers() as servers:
        with Worker(servers[1], 0) as worker:
            push(worker, 1, 3)
            assert worker.hear().said == "ready"
        with Worker(servers[1], 0) as again:
            assert again.ask("hello").said == "done"
            assert again.ask("attach").said == "done"
            push(again, 1, 3, verdict=APPLIES)
            assert answers(again, 1) == ["done"] * CHUNKS
        with Worker(servers[0], 0) as worker:
            push(worker, 0, 3, verdict=APPLIES)
            assert worker.hear().said == "done"
        servers[1].ask("loses", "0")
        servers[1].ask("settles", f"0:0:{servers[0].ask('loses', '0')}")
        require_values(servers, 3)


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_push_that_its_worker_gives_up_is_settled_after_its_death(has_begun: bool) -> None:
    with two_servers() as servers:
        with Worker(servers[0], 0) as at_first, Worker(servers[1], 0) as at_second:
            push(at_second, 1, 3)
            assert at_second.hear().said == "ready"
            push(at_first, 0, 3)
            if has_begun:
                settle(at_first, APPLIES)
                assert at_first.hear().said == "done"
            settle(at_second, UNKNOWN)
            assert answers(at_second, 1) == ["refused"] * CHUNKS
            push(at_second, 1, 3, verdict=UNKNOWN)  # it comes again
            assert answers(at_second, 1) == ["refused"] * CHUNKS
            require_value(servers[1], 0)
        lose_worker(servers)
        require_values(servers, 3 if has_begun else 0)


def test_a_push_that_its_worker_gives_up_over_another_connection_is_kept() -> None:
    with two_servers() as servers:
        with Worker(servers[1], 0) as worker:
            push(worker, 1, 3)
            assert worker.hear().said == "ready"
        with Worker(servers[0], 0) as worker:
            push(worker, 0, 3, verdict=APPLIES)
            assert worker.hear().said == "done"
        with Worker(servers[1], 0) as again:
            assert again.ask("hello").said == "done"
            push(again, 1, 3, verdict=UNKNOWN)
            assert answers(again, 1) == ["refused"] * CHUNKS
        lose_worker(servers)
        require_values(servers, 3)


@pytest.mark.parametrize("is_told", [True, False])
def test_another_server_that_decides_has_not_begun_what_its_worker_gave_up_before(is_told: bool) -> None:
    with two_servers() as servers:
        with Worker(servers[0], 0) as at_first, Worker(servers[1], 0) as at_second:
            push(at_second, 1, 3)
            assert at_second.hear().said == "ready"
            settle(at_second, UNKNOWN)
            assert answers(at_second, 1) == ["refused"] * CHUNKS
            if is_told:
                servers[1].tell("lost_server", 0)
                servers[1].tell("back_server", 0)
            push(at_second, 1, 4, number=1, push=2)
            assert at_second.hear().said == "ready"
            push(at_first, 0, 4, number=1, push=2, verdict=APPLIES)
            assert at_first.hear().said == "done"
        lose_worker(servers)
        require_values(servers, 4)


def test_a_push_that_two_connections_have_left_counts_once() -> None:
    with two_servers() as servers:
        for worker in range(2, 8):
            with Worker(servers[0], worker) as at_first:
                push(at_first, 0, 3, verdict=APPLIES)
                assert at_first.hear().said == "done"
            with Worker(servers[1], worker) as before:
                push(before, 1, 3)
                assert before.hear().said == "ready"
            with Worker(servers[1], worker) as again:
                push(again, 1, 3)
                assert again.hear().said == "ready"
                begun = servers[0].ask("loses", str(worker))
                servers[1].ask("loses", str(worker))
                servers[1].ask("settles", f"{worker}:0:{begun}")
                assert again.is_ended()
        require_values(servers, 18)


def test_the_server_that_decides_does_not_give_a_push_up() -> None:
    with two_servers() as servers, Worker(servers[0], 0) as worker:
        push(worker, 0, 3)
        settle(worker, UNKNOWN)
        assert worker.hear().said == "refused"
        require_value(servers[0], 0)
