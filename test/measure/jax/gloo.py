"""jax.distributed with gloo: JAX's own way to several processes on CPUs.

A process has one kind of collectives of XLA, and those of the ranks are carried by ringtrain. So each rank has a child
for gloo, which does what the rank tells it. The times that a rank measures have the way to the child and back, a tenth
of a millisecond, in each call.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

from ringtrain.bench.peers import CannotTakePart
from ringtrain.bench.ranks import Job, address_of_rank_0
from ringtrain.bench.rounds import Competitor, Distribution

NAME = "jax.distributed, gloo"
_START_S = 120
_END_S = 30


def open_peer(job: Job) -> JaxGlooPeer:
    host = address_of_rank_0(job)
    with socket.create_server(("", 0)) as free:
        port = job.gather(free.getsockname()[1])[0]
    here, there = multiprocessing.Pipe()
    words = [str(there.fileno()), f"{host}:{port}", str(job.size), str(job.rank)]
    process = subprocess.Popen([sys.executable, "-m", __name__, *words], pass_fds=[there.fileno()])
    there.close()
    peer = JaxGlooPeer(process, here)
    reasons = [reason for reason in job.gather(peer.trouble()) if reason]
    if reasons:
        process.kill()
        raise CannotTakePart(reasons[0])
    return peer


class JaxGlooPeer:
    """Arrays that all ranks have alike, and batches of which each has its part, in the child of this rank."""

    def __init__(self, process: subprocess.Popen[bytes], child: Connection) -> None:
        self._process = process
        self._child = child

    def trouble(self) -> str:
        """Returns why the child cannot take part; "" if it can."""
        try:
            return str(self._child.recv()) if self._child.poll(_START_S) else "its processes have not met"
        except EOFError:
            return "its process has ended"

    def collective(self, kind: str) -> list[Competitor]:
        return []

    def step(self) -> list[Competitor]:
        return []

    def training(self) -> list[Distribution]:
        return []

    def jax_training(self, task: Any) -> list[Competitor]:
        return self.jax_sharding("train", task.key["model"], 1)

    def jax_sharding(self, program: str, name: str, times: int) -> list[Competitor]:
        """A program of `measure.jax.sharding`, and its arguments."""

        def prepare(_: Any) -> Any:
            self._ask((program, name, times))
            return lambda: self._ask(None)

        return [Competitor(NAME, prepare)]

    def _ask(self, question: Any) -> Any:
        self._child.send(question)
        return self._child.recv()

    def close(self) -> None:
        self._child.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _serve(rank: Connection, address: str, size: int, number: int) -> None:
    """Does what the rank asks for until it hangs up: prepares a program, or runs the one that it has prepared."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, size, number, cluster_detection_method="deactivate")
    from measure.jax import sharding

    run: Any = None
    rank.send("")
    while True:
        try:
            question = rank.recv()
        except (EOFError, ConnectionResetError):
            return
        if question is None:
            rank.send(run())
        else:
            run = None  # gives the memory of the last one back
            program, name, times = question
            run = getattr(sharding, program)(name, times)
            rank.send(None)


if __name__ == "__main__":
    descriptor, place, count, own = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    _serve(Connection(int(descriptor)), place, int(count), int(own))
