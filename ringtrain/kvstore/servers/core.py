"""The core's server and client of a process, made of its place and its options."""

from __future__ import annotations

import os
from typing import Any

import ringtrain._core as _core
from ringtrain.job.world import node_name
from ringtrain.kvstore.servers.arrival import Arrival
from ringtrain.kvstore.servers.seat import World

# Where nobody has chosen: more threads than cores only wait for each other.
_MOST_THREADS = 2


def make_server(arrival: Arrival, world: World) -> _core.StoreServer:
    """Owns the listeners of the arrival from here on."""
    settings = arrival.settings
    return _core.StoreServer(
        number=arrival.number,
        capacity=world.capacity,
        listeners=arrival.listeners,
        threads=int(float(settings["kv_threads"])) or min(_MOST_THREADS, len(os.sched_getaffinity(0))),
        **_of_both(arrival, world),
    )


def make_client(arrival: Arrival, world: World) -> _core.StoreClient:
    """Dials all servers; `meet()` of it waits for them, and raises PeerLostError where one of them is not there."""
    return _core.StoreClient(
        worker=arrival.number,
        term=world.terms[arrival.number],
        workers=world.workers,
        capacity=world.capacity,
        servers=world.servers,
        resend_s=float(arrival.settings["kv_resend_ms"]) / 1000,
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
        "drop_percent": float(settings["kv_drop_percent"]),
        "verbose": int(float(settings["kv_verbose"])),
    }
