"""Which processes a job with servers has, what they are called, and where each one goes. Starts nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ringtrain.failure.ranks_in_words import ranges_of
from ringtrain.runner.roles.addresses import Address

SCHEDULER, SERVER, WORKER = "scheduler", "server", "worker"


class Process(NamedTuple):
    """`number` is its own among all processes of the job, `task` among those of its role."""

    number: int
    role: str
    task: int

    def __str__(self) -> str:
        return "the scheduler" if self.role == SCHEDULER else f"{self.role} {self.task}"


class Cast(NamedTuple):
    """The scheduler, then the servers, then the workers."""

    servers: int
    workers: int

    @property
    def size(self) -> int:
        return 1 + self.servers + self.workers

    def processes(self) -> list[Process]:
        return [self.process(number) for number in range(self.size)]

    def process(self, number: int) -> Process:
        if number == 0:
            return Process(0, SCHEDULER, 0)
        if number <= self.servers:
            return Process(number, SERVER, number - 1)
        return Process(number, WORKER, number - 1 - self.servers)

    def label(self, number: int) -> str:
        """As in `[worker 1] text`."""
        return str(self.process(number)).removeprefix("the ")

    def listed(self, numbers: Iterable[int]) -> str:
        """`the scheduler, servers 0-1 and worker 2`."""
        tasks: dict[str, list[int]] = {}
        for process in map(self.process, sorted(numbers)):
            tasks.setdefault(process.role, []).append(process.task)
        parts = [
            "the scheduler" if role == SCHEDULER else f"{role}{'s' if len(found) > 1 else ''} {ranges_of(found)}"
            for role, found in tasks.items()
        ]
        return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def host_of(process: Process, hosts: Sequence[Address], here: Address) -> Address:
    """The scheduler stays here; servers and then workers go round the hosts, as with MXNet's launch.py."""
    if process.role == SCHEDULER or not hosts:
        return here
    return hosts[(process.number - 1) % len(hosts)]
