"""Asks the ranks of a job what they do, all at once."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ringtrain.job.job_file import Job, Rank
from ringtrain.job.rendezvous.protocol import Connection, StrangerError

ANSWER_S = 1.0
_AT_ONCE = 64
_MOST_BYTES = 1 << 24


@dataclass
class Silence:
    """A rank that has not answered.

    state: of its process, as /proc has it, "T" of a stopped one; "" where there is no such process, None where nobody
        has told.
    is_refused: nobody listens at its address, so it has ended or is not in the job now.
    """

    state: str | None = None
    is_refused: bool = False

    @property
    def is_gone(self) -> bool:
        return self.state is not None and self.state in ("", "Z", "X")


@dataclass
class Snapshot:
    """The answers of all ranks at one moment, by rank."""

    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    silent: dict[int, Silence] = field(default_factory=dict)


def take_snapshot(job: Job) -> Snapshot:
    """Returns within little more than a second, or two where a rank that lives does not answer at once."""
    snapshot = Snapshot(*_ask(job, "status", range(len(job.ranks))))
    if snapshot.silent:
        _look_after(job, snapshot)
    # A host with too much to do answers late.
    late = [rank for rank, one in snapshot.silent.items() if one.state in ("R", "S", "D") and not one.is_refused]
    answers, _ = _ask(job, "status", late)
    snapshot.answers.update(answers)
    for rank in answers:
        del snapshot.silent[rank]
    return snapshot


def ask_for_stacks(job: Job, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Returns the stacks of those that answer: their threads do not run for less than a millisecond."""
    return _ask(job, "stacks", ranks)[0]


def is_over(job: Job, snapshot: Snapshot) -> bool:
    """Whether no process of the job is left. Those of an elastic job do not listen between two generations."""
    is_elastic = job.generation is not None
    return not snapshot.answers and all(
        one.is_gone or (one.is_refused and not is_elastic) for one in snapshot.silent.values()
    )


def _look_after(job: Job, snapshot: Snapshot) -> None:
    """Finds out the states of silent ranks: on this host, else from a rank of their host that answers."""
    own_host = socket.gethostname()
    for rank, silence in snapshot.silent.items():
        if job.ranks[rank].host == own_host:
            silence.state = _state_here(job.ranks[rank].pid)
    unknown = [rank for rank, silence in snapshot.silent.items() if silence.state is None]
    nodes = {job.ranks[rank].node: rank for rank in snapshot.answers}
    asked = {nodes[job.ranks[rank].node] for rank in unknown if job.ranks[rank].node in nodes}
    for states in _ask(job, "states", asked)[0].values():
        for rank in unknown:
            snapshot.silent[rank].state = states.get(str(rank), snapshot.silent[rank].state)


def _state_here(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _ask(job: Job, request: str, ranks: Iterable[int]) -> tuple[dict[int, dict[str, Any]], dict[int, Silence]]:
    ranks = list(ranks)
    if not ranks:
        return {}, {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(ranks))) as threads:
        results = threads.map(lambda rank: _ask_one(job.ranks[rank], job.secret, request), ranks)
        by_rank = dict(zip(ranks, results, strict=True))
    answers = {rank: one for rank, one in by_rank.items() if not isinstance(one, Silence)}
    return answers, {rank: one for rank, one in by_rank.items() if isinstance(one, Silence)}


def _ask_one(rank: Rank, secret: bytes, request: str) -> dict[str, Any] | Silence:
    deadline = time.monotonic() + ANSWER_S
    try:
        with socket.create_connection(rank.address, ANSWER_S) as sock:
            connection = Connection(sock)
            connection.prove_as_rank(secret, deadline)
            connection.send(request, deadline)
            answer: dict[str, Any] = connection.receive(_MOST_BYTES, deadline)
            return answer
    except (ConnectionRefusedError, StrangerError):  # another process may have the port by now
        return Silence(is_refused=True)
    except OSError:
        return Silence()
