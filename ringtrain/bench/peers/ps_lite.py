"""MXNet's parameter server: as many servers as ranks, in processes of their own, on the host of rank 0."""

from __future__ import annotations

import gc
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringtrain.bench.peers import CannotTakePart
from ringtrain.bench.ranks import Job, address_of_rank_0
from ringtrain.bench.rounds import Array, Competitor, Distribution
from ringtrain.runner.start.agent import TOLD_BY_LAUNCHERS

if importlib.util.find_spec("mxnet") is None:
    raise ImportError("No module named 'mxnet'")

NAME = "ps-lite, push, pull"
# A server that has them believes that it is a rank of our job.
_OF_LAUNCHERS = (*TOLD_BY_LAUNCHERS, "RINGTRAIN_")
_END_S = 20


def open_peer(job: Job) -> PsLitePeer:
    if job.hosts > 1:
        raise CannotTakePart("its servers are started on one host only")
    ports = job.gather(_free_port() if job.rank == 0 else None)
    place = {
        "DMLC_PS_ROOT_URI": address_of_rank_0(job),
        "DMLC_PS_ROOT_PORT": str(ports[0]),
        "DMLC_NUM_SERVER": str(job.size),
        "DMLC_NUM_WORKER": str(job.size),
    }
    servers = []
    if job.rank == 0:
        servers = [_start(role, place) for role in ("scheduler", *["server"] * job.size)]
    os.environ.update(place, DMLC_ROLE="worker")
    try:
        import mxnet  # reads the variables

        return PsLitePeer(job, mxnet, servers)
    except Exception:
        for server in servers:
            server.kill()
        raise


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(role: str, place: dict[str, str]) -> subprocess.Popen[bytes]:
    """One that has all CPUs of the host, also where rank 0 is bound to one."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    server = subprocess.Popen([sys.executable, "-c", "import mxnet"], env={**own, **place, "DMLC_ROLE": role})
    os.sched_setaffinity(server.pid, range(os.cpu_count() or 1))
    return server


class PsLitePeer:
    """One store, of the kind that is asked for first: a process cannot have several with the same servers."""

    def __init__(self, job: Job, mxnet: Any, servers: Sequence[subprocess.Popen[bytes]]) -> None:
        self._job = job
        self._mxnet = mxnet
        self._servers = servers
        self._store: Any = None

    def collective(self, kind: str) -> list[Competitor]:
        return []

    def step(self) -> list[Competitor]:
        """Sums, not averages: a "dist_sync" store without optimizer, whose servers add up."""
        return [Competitor(NAME, lambda gradients: self._exchange("dist_sync", None, gradients))]

    def updates(self, kind: str, sgd: Mapping[str, float]) -> list[Competitor]:
        """The weights after updates by the servers, from zeros on; `sgd` has the numbers of MXNet's SGD."""
        return [Competitor(NAME, lambda gradients: self._exchange(kind, sgd, gradients))]

    def _exchange(self, kind: str, sgd: Mapping[str, float] | None, gradients: Sequence[Array]) -> _Exchange:
        self._store = self._mxnet.kv.create(kind)
        if sgd is not None:
            self._store.set_optimizer(self._mxnet.optimizer.create("sgd", **sgd))
        return _Exchange(self._mxnet, self._store, gradients)

    def training(self) -> list[Distribution]:
        return []

    def close(self) -> None:
        self._mxnet.nd.waitall()
        self._job.barrier()
        del self._store
        gc.collect()  # where nothing refers to the store any more, it tells the servers to end
        for server in self._servers:
            try:
                server.wait(_END_S)
            except subprocess.TimeoutExpired:
                server.kill()


class _Exchange:
    """Pushes all gradients and pulls the values, the first ones first."""

    def __init__(self, mxnet: Any, store: Any, gradients: Sequence[Array]) -> None:
        self._store = store
        self._given = gradients
        self._gradients = [mxnet.nd.array(one) for one in gradients]
        self._values = [mxnet.nd.zeros(one.shape) for one in gradients]
        self._wait_for_all: Callable[[], None] = mxnet.nd.waitall
        for key, one in enumerate(self._values):
            store.init(key, one)

    def refill(self) -> None:
        """Push the same in each round: a pull of MXNet 1.9.1 overwrites what this worker has pushed."""
        for own, given in zip(self._gradients, self._given, strict=True):
            own[:] = given
        self._wait_for_all()

    def __call__(self) -> list[Any]:
        """The values, in MXNet's arrays."""
        for key, gradient in enumerate(self._gradients):
            self._store.push(key, gradient, priority=-key)
        for key, one in enumerate(self._values):
            self._store.pull(key, out=one, priority=-key)
        for one in self._values:
            one.wait_to_read()
        return self._values
