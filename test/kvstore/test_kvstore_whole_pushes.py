"""A push in shared memory is in all chunks of its key at a server or in none, wherever its worker dies."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
from harness.exact import require_equal
from harness.store_parts import Actor, Part
from store_wire import CAPACITY, Server, Worker, part_spec, rule, served

pytestmark = pytest.mark.slow

CHUNK, CHUNKS = 16_384, 3
COUNT = CHUNK * CHUNKS
VALUES = np.full(COUNT, 3, np.float32)


class Store(NamedTuple):
    server: Server
    ticket: int  # of its memory

    def part(self) -> Part:
        """Its memory in this process."""
        return Part([("float32", COUNT)], capacity=CAPACITY, of=(self.server.process.pid, self.ticket))

    def actor(self, term: int = 0) -> Actor:
        """Acts for worker 0, in this process."""
        return Actor(self.part(), 0, 2.0, term)


@contextlib.contextmanager
def one_server() -> Iterator[Store]:
    with served(shares_memory=True) as server:
        with Worker(server, 1) as maker:
            words = maker.ask("create", part_spec((COUNT,)), chunk=2).body
            maker.ask("rule", rule("test"))
        yield Store(server, struct.unpack_from("<IQ", words)[1])


def require(server: Server, value: float) -> None:
    with Worker(server, 1) as reader:
        for chunk in range(CHUNKS):
            require_equal(reader.pull(chunk=chunk), np.full(CHUNK, value, np.float32))


def die_after(work: Callable[[], None]) -> None:
    """A process does this, and is killed."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


# A worker has published its copy of a push before it dies, and pushed every so many chunks; and the value that the
# server has then.
POINTS = {
    "copied": (False, 0, 0),
    "published": (True, 0, 3),
    "a chunk pushed": (True, CHUNKS, 3),
    "all chunks pushed": (True, 1, 3),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_push_of_a_killed_worker_is_in_all_chunks_or_in_none(point: str) -> None:
    publishes, every, value = POINTS[point]
    with one_server() as store:
        die_after(lambda: store.actor().stage(0, 1, VALUES, publishes=publishes, every=every))
        store.server.ask("loses", "0")
        require(store.server, value)


def test_a_push_of_a_killed_worker_counts_before_those_of_the_next_process() -> None:
    with one_server() as store:
        die_after(lambda: store.actor().stage(0, 1, VALUES, every=0))
        with Worker(store.server, 0) as successor:
            assert successor.ask("hello", number=1).said == "done"
            assert successor.ask("attach").said == "done"
            require(store.server, 3)
            store.actor(term=1).stage(0, 1, VALUES, every=1)
        store.server.ask("loses", "0")
        require(store.server, 6)


def test_a_server_that_goes_on_with_its_memory_applies_the_push_of_the_last_process_but_one() -> None:
    """The second process of the worker dies before that server is back."""
    with one_server() as store:
        memory = store.part()
        die_after(lambda: store.actor().stage(0, 1, VALUES, every=0))
        store.server.kill()
        with served(shares_memory=True) as found:
            pid, ticket = memory.name
            found.ask("adopts", f"{part_spec((COUNT,)).hex()}:{pid}:{ticket}")
            found.ask("loses", "0:2")
            require(found, 3)


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_process_that_was_expelled_publishes_nothing(is_copied: bool) -> None:
    with one_server() as store:
        actor = store.actor()
        if is_copied:
            actor.stage(0, 1, VALUES, publishes=False, every=0)
        store.server.ask("loses", "0")
        with pytest.raises(RuntimeError, match="worker 0 was expelled"):
            actor.publish() if is_copied else actor.stage(0, 1, VALUES, publishes=False, every=0)
        with pytest.raises(RuntimeError, match="worker 0 was expelled"):
            actor.push(0, 1, VALUES[:CHUNK])
        require(store.server, 0)
