"""A process takes its place in a job: it listens if it may be a server, and connects to the scheduler."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import ringtrain._core as _core
from ringtrain.errors import PeerLostError, RingtrainError, StalledError
from ringtrain.job.host import addresses_of
from ringtrain.job.rendezvous.listener import listen
from ringtrain.job.rendezvous.secret import job_secret
from ringtrain.job.rendezvous.server import Place
from ringtrain.job.sockets import Listeners
from ringtrain.job.world import node_name, why_not_encrypted
from ringtrain.kvstore.servers.membership import Limits
from ringtrain.kvstore.servers.roles import SCHEDULER, WORKER, Role
from ringtrain.kvstore.servers.scheduler import Scheduler, say
from ringtrain.kvstore.servers.scheduler_client import SchedulerClient, World
from ringtrain.record import metrics

KEEP_VARIABLE = "RINGTRAIN_KV_KEEP"
_TCP = "TCP sends again what is lost, and a worker what has no answer when a connection has ended"
# Variables of ps-lite that have no effect here, and why.
_NEEDLESS = {
    "PS_RESEND": _TCP,
    "PS_RESEND_TIMEOUT": _TCP,
    "PS_DROP_MSG": _TCP,
    "DMLC_LOCAL": "processes of one host share memory wherever they can",
    "DMLC_PS_VAN_TYPE": "there is one way over the network, TCP",
    "DMLC_PS_WATER_MARK": "kv_outbox_mb bounds what is on its way",
    "MXNET_ENABLE_GPU_P2P": "NCCL decides about that",
    "MXNET_KVSTORE_USETREE": "NCCL decides about that",
    "MXNET_KVSTORE_SERIAL_PUSH": "a worker's pushes of a key are always in order",
}
# Workers that may join a job beside those that it began with.
_LEAST_CAPACITY = 8


class Arrival(NamedTuple):
    """The place of this process: the name of its role and its number, and its connection to the scheduler."""

    name: str
    number: int
    scheduler_client: SchedulerClient
    listeners: list[int]  # descriptors of sockets, for a server in this process
    secret: bytes
    settings: dict[str, str]

    def world(self) -> World:
        """Waits for all other processes. Raises as `SchedulerClient.world`."""
        return self.scheduler_client.world()

    def say(self, text: str) -> None:
        say(int(float(self.settings["kv_verbose"])), f"{self.name} {self.number}", text)


def secret_of(role: Role) -> bytes:
    """Returns the secret of the job with this scheduler. Raises as `job_secret`."""
    return job_secret(f"kvstore {role.host}:{role.port}")


def times_of(settings: Mapping[str, str]) -> tuple[float, float]:
    """Returns the seconds between signs of life, and after how long a silent process is taken for dead."""
    timeout_s = float(settings["kv_timeout_s"])
    return min(float(settings["kv_heartbeat_s"]), timeout_s / 3), timeout_s


def arrive(role: Role, secret: bytes, settings: dict[str, str]) -> Arrival:
    """Takes a place. Raises as `SchedulerClient` and its `come`, OSError if it cannot listen, and RingtrainError if it
    cannot encrypt what is to be encrypted."""
    if why := why_not_encrypted(settings):
        raise RingtrainError(why)
    place, start_s = Place(role.host, [role.port]), float(settings["start_timeout_s"])
    client = SchedulerClient(place, secret, start_s, *times_of(settings))
    with Listeners() as listeners:
        named = addresses_of(settings["kv_interface"], "kv_interface (DMLC_INTERFACE)")
        hosts = named or [numbers_of(role.address) or client.own_address]
        is_server = role.name != WORKER or role.servers == 0
        addresses = [(host, port) for host, port in listeners.open(hosts)] if is_server else []
        name, number = client.come(role.name, role.task, role.attempt, addresses, (role.workers, role.servers))
        if name == WORKER and role.servers:
            return Arrival(name, number, client, [], secret, settings)
        arrival = Arrival(name, number, client, listeners.take(), secret, settings)
    arrival.say(f"listens at {', '.join(f'{host}:{port}' for host, port in addresses)}")
    return arrival


def numbers_of(host: str) -> str:
    """Returns the IP address of a host name in DMLC_NODE_HOST; "" of an empty name. Raises ValueError without one."""
    if not host:
        return ""
    try:
        return str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        remedy = "set it to an address of this host that the others reach"
        raise ValueError(f"DMLC_NODE_HOST={host} has no address ({error}); {remedy}") from None


def serve_metrics(arrival: Arrival, number: int) -> None:
    """Serves metrics: workers and then servers at the ports from metrics_port on. Raises as `metrics.serve`."""
    port = int(float(arrival.settings["metrics_port"]))
    if port:
        metrics.serve(arrival.settings["metrics_address"] or "127.0.0.1", port + number, arrival.number)


def make_scheduler(role: Role, sock: socket.socket, secret: bytes, settings: dict[str, str]) -> Scheduler:
    """Starts the scheduler in this process."""
    limits = Limits(
        *(role.workers, role.servers, max(_LEAST_CAPACITY, 2 * role.workers)),
        *(float(settings["kv_timeout_s"]), float(settings["kv_rejoin_s"])),
        keeps=os.environ.get(KEEP_VARIABLE) == "1",
        start_timeout_s=float(settings["start_timeout_s"]),
    )
    return Scheduler(sock, secret, limits, int(float(settings["kv_verbose"])))


# How long a scheduler looks who is at its port.
_LOOK_S = 2.0


def socket_of_scheduler(role: Role, secret: bytes, settings: Mapping[str, str]) -> socket.socket:
    """Returns the listening socket of the scheduler.

    Raises OSError if its port is in use, and ValueError if that is by another scheduler of this user; a job that waits
    there hears of it, since its processes may be of either job.
    """
    sock = listen(role.host, [role.port])
    if sock is not None:
        return sock
    with contextlib.suppress(StalledError, PeerLostError):  # it is something else
        place = Place(role.host, [role.port])
        SchedulerClient(place, secret, _LOOK_S, *times_of(settings)).come(SCHEDULER, None, 0, [])
    raise OSError(f"another process listens at {role.host}:{role.port} (DMLC_PS_ROOT_PORT); take another port")


def name_what_is_needless(verbose: int, environ: Mapping[str, str] = os.environ) -> None:
    """Prints which variables for ps-lite have no effect."""
    for name, reason in _NEEDLESS.items():
        if name in environ:
            say(verbose, os.path.basename(sys.argv[0]) or "python", f"{name} is not needed: {reason}")


# The default: more threads than cores only wait for each other.
_MOST_THREADS = 2


def _threads(settings: Mapping[str, str]) -> int:
    return int(float(settings["kv_threads"])) or min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def make_server(arrival: Arrival, world: World) -> _core.StoreServer:
    """Returns a server, which owns the listeners of the arrival."""
    settings = arrival.settings
    return _core.StoreServer(
        number=arrival.number,
        capacity=world.capacity,
        listeners=arrival.listeners,
        threads=_threads(settings),
        **_of_both(arrival, world),
    )


def make_client(arrival: Arrival, world: World) -> _core.StoreClient:
    """Returns a client that dials all servers. Its `meet()` waits for them; PeerLostError if one is missing."""
    return _core.StoreClient(
        worker=arrival.number,
        term=world.terms[arrival.number],
        workers=world.workers,
        capacity=world.capacity,
        servers=world.servers,
        is_sealed=arrival.settings["socket_encryption"] == "on",
        threads=_threads(arrival.settings),
        return_s=float(arrival.settings["kv_rejoin_s"]),
        outbox_mb=float(arrival.settings["kv_outbox_mb"]),
        **_of_both(arrival, world),
    )


def _of_both(arrival: Arrival, world: World) -> dict[str, Any]:
    settings = arrival.settings
    return {
        "secret": arrival.secret,
        "token": world.token,
        "node": node_name() if settings["shared_memory"] == "auto" else "",
        "timeout_s": float(settings["kv_timeout_s"]),
        "verbose": int(float(settings["kv_verbose"])),
    }
