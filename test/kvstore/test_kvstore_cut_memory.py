"""A push of a key at two servers in shared memory is applied at both or at neither, wherever its worker dies."""

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

# Server 0 is the primary of the key. The piece of each server has so many chunks.
PRIMARY, CHUNK, CHUNKS = 0, 16_384, 3
COUNT = CHUNK * CHUNKS
VALUES = np.full(COUNT, 3, np.float32)


class Stores(NamedTuple):
    servers: list[Server]
    tickets: list[int]  # of the memory of each

    def actors(self, term: int = 0) -> list[Actor]:
        """Those of worker 0, in this process."""
        return [
            Actor(Part([("float32", COUNT)], capacity=CAPACITY, of=(server.process.pid, ticket)), 0, 2.0, term)
            for server, ticket in zip(self.servers, self.tickets, strict=True)
        ]

    def lose(self, *, is_primary_first: bool = True) -> None:
        """Both hear of the death of the first process of worker 0, and server 1 what server 0 says."""
        if not is_primary_first:
            self.servers[1].ask("loses", "0")
        begun = self.servers[0].ask("loses", "0")
        self.servers[1].ask("settles", f"0:0:{begun}")
        if is_primary_first:
            self.servers[1].ask("loses", "0")

    def require(self, *values: float) -> None:
        """The values of the key at the servers."""
        for server, value in zip(self.servers, values, strict=True):
            with Worker(server, 1) as reader:
                for chunk in range(CHUNKS):
                    require_equal(reader.pull(chunk=chunk), np.full(CHUNK, value, np.float32))


@contextlib.contextmanager
def two_servers() -> Iterator[Stores]:
    with served(shares_memory=True, number=0) as first, served(shares_memory=True, number=1) as second:
        tickets = []
        for server in (first, second):
            with Worker(server, 1) as maker:
                words = maker.ask("create", part_spec((COUNT,)), chunk=2).body
                tickets.append(struct.unpack_from("<IQ", words)[1])
                maker.ask("rule", rule("test"))
        yield Stores([first, second], tickets)


def stage(actor: Actor, publishes: bool, every: int = 0) -> None:
    actor.stage(0, 1, VALUES, publishes=publishes, every=every, primary=PRIMARY)


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


# The work of a worker before it dies, at the primary and at the other server: it has copied the push (None: not even
# that), published the copy, pushed every so many chunks. Last, the value that both servers have then.
POINTS: dict[str, tuple[tuple[bool, int] | None, tuple[bool, int], int]] = {
    "copied at one": (None, (False, 0), 0),
    "copied at both": ((False, 0), (False, 0), 0),
    "published at one": (None, (True, 0), 0),
    "published at one and copied at the primary": ((False, 0), (True, 0), 0),
    "published at both": ((True, 0), (True, 0), 3),
    "a chunk pushed at one": ((True, 0), (True, CHUNKS), 3),
    "a chunk pushed at the primary": ((True, CHUNKS), (True, 0), 3),
    "a chunk pushed at both": ((True, CHUNKS), (True, CHUNKS), 3),
    "all chunks pushed at both": ((True, 1), (True, 1), 3),
}


@pytest.mark.parametrize("is_primary_first", [True, False])
@pytest.mark.parametrize("point", POINTS)
def test_a_push_of_a_killed_worker_is_at_both_servers_or_at_neither(point: str, is_primary_first: bool) -> None:
    at_primary, at_other, value = POINTS[point]
    with two_servers() as stores:

        def work() -> None:
            primary, other = stores.actors()
            stage(other, *at_other)
            if at_primary is not None:
                stage(primary, *at_primary)

        die_after(work)
        stores.lose(is_primary_first=is_primary_first)
        stores.require(value, value)


def test_a_server_waits_for_the_word_of_the_primary_and_so_does_the_next_process() -> None:
    with two_servers() as stores:
        die_after(lambda: [stage(actor, True) for actor in reversed(stores.actors())])
        stores.servers[1].ask("loses", "0")
        stores.require(0, 0)
        with Worker(stores.servers[1], 0) as successor:
            assert successor.ask("hello", number=1).said == "done"
            assert successor.ask("attach").said == "held"
            stores.servers[1].ask("settles", f"0:0:{stores.servers[0].ask('loses', '0')}")
            assert successor.ask("attach").said == "done"
        stores.require(3, 3)


def test_the_next_process_settles_at_the_primary_what_the_scheduler_tells_later() -> None:
    with two_servers() as stores:
        die_after(lambda: [stage(actor, True) for actor in reversed(stores.actors())])
        with Worker(stores.servers[0], 0) as successor:
            assert successor.ask("hello", number=1).said == "done"
            assert successor.ask("attach").said == "done"
            primary = stores.actors(term=1)[0]
            primary.stage(0, 1, VALUES, every=1)  # another push, in the place of the one before
        stores.lose()
        stores.require(6, 3)


def test_a_push_is_dropped_when_the_primary_is_lost_unless_a_chunk_was_pushed() -> None:
    for every, value in ((0, 0), (CHUNKS, 3)):
        with two_servers() as stores:
            die_after(lambda every=every: stage(stores.actors()[1], True, every))  # type: ignore[misc]
            stores.servers[1].ask("loses", "0")
            with Worker(stores.servers[1], 0) as successor:
                assert successor.ask("hello", number=1).said == "done"
                assert successor.ask("attach").said == ("done" if value else "held")
                stores.servers[1].tell("lost_server", 0)
                assert successor.ask("attach").said == "done"
            stores.require(0, value)


@pytest.mark.parametrize("every", [0, CHUNKS])
def test_a_primary_that_goes_on_with_its_memory_tells_of_a_process_whose_place_another_one_has(every: int) -> None:
    with two_servers() as stores:
        memory = Part([("float32", COUNT)], capacity=CAPACITY, of=(stores.servers[0].process.pid, stores.tickets[0]))

        def work() -> None:
            primary, other = stores.actors()
            stage(other, True)
            stage(primary, True, every)

        die_after(work)
        stores.servers[0].kill()
        stores.servers[1].ask("loses", "0")
        stores.servers[1].tell("lost_server", 0)
        with served(shares_memory=True, number=0) as primary:
            pid, ticket = memory.name
            primary.ask("adopts", f"{part_spec((COUNT,)).hex()}:{pid}:{ticket}")
            begun = primary.ask("finds", "0")
            stores.servers[1].tell("back_server", 0)
            with Worker(stores.servers[1], 0) as successor:
                assert successor.ask("hello", number=1).said == "done"
                assert successor.ask("attach").said == "held"
                stores.servers[1].ask("settles", f"0:0:{begun}")
                Stores([primary, stores.servers[1]], []).require(3, 3)
                assert successor.ask("attach").said == "done"


@pytest.mark.parametrize("lost", [0, 1])
def test_a_server_that_goes_on_with_its_memory_settles_the_push_of_the_last_process_but_one(lost: int) -> None:
    """The second process of the worker dies before that server is back."""
    with two_servers() as stores:
        memory = Part(
            [("float32", COUNT)], capacity=CAPACITY, of=(stores.servers[lost].process.pid, stores.tickets[lost])
        )
        die_after(lambda: [stage(actor, True) for actor in reversed(stores.actors())])
        stores.servers[lost].kill()
        stayed = stores.servers[1 - lost]
        for first_term in (1, 2):
            stayed.ask("loses", f"0:{first_term}")
            stayed.tell("lost_server", lost)
        with served(shares_memory=True, number=lost) as found:
            pid, ticket = memory.name
            found.ask("adopts", f"{part_spec((COUNT,)).hex()}:{pid}:{ticket}")
            servers = [found, stayed] if lost == 0 else [stayed, found]
            begun = [server.ask("loses", "0:2") for server in servers]
            stayed.tell("back_server", lost)
            servers[1].ask("settles", f"0:0:{begun[0]}")
            Stores(servers, []).require(3, 3)


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_process_that_was_expelled_publishes_nothing(is_copied: bool) -> None:
    with two_servers() as stores:
        primary, other = stores.actors()
        stage(other, True)
        if is_copied:
            stage(primary, False)
        stores.lose()
        with pytest.raises(RuntimeError, match="worker 0 was expelled"):
            primary.publish() if is_copied else stage(primary, False)
        with pytest.raises(RuntimeError, match="worker 0 was expelled"):
            primary.push(0, 1, VALUES[:CHUNK])
        stores.require(0, 0)


def test_a_push_that_the_primary_has_not_is_not_taken_for_the_one_before() -> None:
    with two_servers() as stores:

        def work() -> None:
            primary, other = stores.actors()
            for actor in (other, primary):
                stage(actor, True, 1)
            other.stage(0, 2, VALUES, every=0, primary=PRIMARY)

        die_after(work)
        stores.lose()
        stores.require(3, 3)
