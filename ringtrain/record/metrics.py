"""Counters of what this rank has done, for programs and for Prometheus."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import ringtrain._core as _core

# Counters of `metrics()` for each kind of operation -> name and explanation for Prometheus.
_OF_A_KIND = {
    "operations": ("ringtrain_operations", "Operations that have ended."),
    "failed": ("ringtrain_failed_operations", "Operations that have ended with an error."),
    "bytes": ("ringtrain_bytes", "Bytes of this rank's tensors that were sent."),
    "queued_s": ("ringtrain_queued_seconds", "Time until operations were announced to the other ranks."),
    "waiting_s": ("ringtrain_waiting_seconds", "Time from then on until all ranks were ready."),
    "ready_s": ("ringtrain_ready_seconds", "Time from then on until their turn came."),
    "working_s": ("ringtrain_working_seconds", "Time while they were carried out."),
}
_OF_ALL = {
    "cache_hits": ("ringtrain_cache_hits", "Operations that were agreed on by one bit."),
    "cache_misses": ("ringtrain_cache_misses", "Operations that were announced in full."),
    "came_last": ("ringtrain_came_last", "Cached operations for which all others waited for this rank."),
    "came_with_values": (
        "ringtrain_came_with_values",
        "Cached operations whose values came beside their bits, so that nothing else had to be exchanged.",
    ),
    "rounds": ("ringtrain_rounds", "Rounds of the negotiation."),
    "rounds_on_node": ("ringtrain_rounds_on_node", "Those of them in which no other node took part."),
    "exposed_s": ("ringtrain_exposed_seconds", "Time in which the script has waited for operations."),
}
_OF_ELASTIC = {
    "generation": ("ringtrain_generation", "Which generation of the elastic job this is."),
    "seconds_lost": (
        "ringtrain_lost_seconds",
        "Time between generations, in which none of them trained.",
    ),
}
_TRAFFIC = {
    "sent_messages": "Messages that were sent over TCP.",
    "sent_bytes": "Bytes that were sent over TCP.",
    "received_messages": "Messages that came over TCP.",
    "received_bytes": "Bytes that came over TCP.",
}
# The values that may fall; all others only grow.
_LEVELS = ("outbox_bytes", "connections", "waiting_requests")
_OF_STORES = {
    "kvstore": {
        "pushes": "Values that this worker has pushed.",
        "push_bytes": "Their bytes.",
        "pulls": "Values that this worker has pulled.",
        "pull_bytes": "Their bytes.",
        "waiting_s": "Seconds in which calls of this worker have waited for servers and for other workers.",
        **_TRAFFIC,
        "outbox_bytes": "Bytes that are on their way to servers over TCP.",
    },
    "kvstore_server": {
        **_TRAFFIC,
        "connections": "Workers that are connected.",
        "waiting_requests": "Requests that came over TCP and wait for other workers.",
    },
}


_COUNTS_VARIABLE = "RINGRUN_COUNTS"  # that of rank_wrapper.py

_generation: dict[str, Callable[[], float]] = {}
# By part of _OF_STORES; there may be several, of process sets.
_stores: list[tuple[str, Callable[[], dict[str, float]]]] = []


def set_generation(generation: int, seconds_lost: Callable[[], float]) -> None:
    """Called by init() of an elastic job. `seconds_lost` returns those until now."""
    _generation.update(generation=lambda: generation, seconds_lost=seconds_lost)


def count_store(part: str, count: Callable[[], dict[str, float]]) -> Callable[[], None]:
    """Called when a worker, "kvstore", or a server, "kvstore_server", begins. Returns a function to call at its end."""
    entry = part, count
    _stores.append(entry)
    return lambda: _stores.remove(entry)


def metrics() -> dict[str, Any]:
    """Returns what this rank has done since init().

    Returns:
        "cache_hits", "cache_misses", "rounds", "rounds_on_node" (those of them in which no other node took part),
        "came_last" and "came_with_values", which are numbers, the seconds "exposed_s" in which threads of the script
        waited for operations, and for each kind of operation that there was ("allreduce", "barrier", ...; "all_reduce"
        and the other names of torch for its groups) a dict: "operations" and "failed" (numbers), "bytes" of this rank's
        tensors, and the seconds, summed over the operations, that they were "queued_s" before they were announced,
        "waiting_s" until all ranks were ready, "ready_s" until their turn came, and "working_s" while they were carried
        out.

        In an elastic job also "generation", the number of this one, and "seconds_lost", in which generations had ended
        and the next one had not begun to train.

        The straggler is the rank whose "came_last" grows: it counts the cached operations that others had announced in
        an earlier round, and that were complete as soon as this rank announced them. Its "waiting_s" is small, too.

        With a key-value store that has servers also "kvstore", a dict of what this worker has done: "pushes" and
        "pulls" of values and their "push_bytes" and "pull_bytes", the seconds "waiting_s" for servers and others, and
        what has gone over TCP: "sent_bytes", "sent_messages", "received_bytes", "received_messages", and "outbox_bytes"
        that are under way now. Of a server in this process "kvstore_server":
        the same of its TCP, its "connections", and the "waiting_requests" there.

    Raises:
        NotInitializedError: before init(), and where there is no such store or server either.

    Examples:
        >>> before = hvd.metrics().get("broadcast", {}).get("bytes", 0)
        >>> result = hvd.broadcast(np.zeros(100, np.float32), root_rank=0)
        >>> hvd.metrics()["broadcast"]["bytes"] - before
        400
    """
    of_stores = _counted_stores()
    if of_stores and not _core.is_initialized():
        return of_stores
    of_generation = {name: count() for name, count in _generation.items()}
    return {**_core.counters(), **_core.totals(), **of_generation, **of_stores}


_began_at = 0.0


def begin() -> None:
    """Called when this process has joined a job."""
    global _began_at
    _began_at = time.monotonic()


def tell_ringrun() -> None:
    """Writes what ringrun tells from at the end of a job, before this process leaves it. Does nothing elsewhere."""
    descriptor, _, inode = os.environ.get(_COUNTS_VARIABLE, "").partition(" ")
    counted = _core.counters()
    counts = [counted["came_last"], counted["cache_hits"], counted["exposed_s"], time.monotonic() - _began_at]
    with contextlib.suppress(OSError, ValueError):  # a process that the rank has started may not have the pipe
        if os.fstat(int(descriptor)).st_ino == int(inode):
            os.write(int(descriptor), json.dumps(counts).encode() + b"\n")


def _counted_stores() -> dict[str, Any]:
    totals: dict[str, dict[str, float]] = {}
    for part, count in list(_stores):
        of_part = totals.setdefault(part, {})
        for key, value in count().items():
            of_part[key] = of_part.get(key, 0) + value
    return totals


class _Collector:
    """Returns the metrics; prometheus-client calls it at each request."""

    def __init__(self, rank: int):
        self._rank = str(rank)

    def collect(self) -> Iterator[Any]:
        yield from self._collect_stores()
        if _core.is_initialized():
            yield from self._collect_operations()

    def _collect_stores(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for part, counted in _counted_stores().items():
            for key, meaning in _OF_STORES[part].items():
                kind = GaugeMetricFamily if key in _LEVELS else CounterMetricFamily
                unit = key.removesuffix("_s") + "_seconds" if key.endswith("_s") else key
                family = kind(f"ringtrain_{part}_{unit}", meaning, labels=["rank"])
                family.add_metric([self._rank], counted[key])
                yield family

    def _collect_operations(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counted = {name: it for name, it in metrics().items() if name not in _OF_STORES}
        for key, (name, meaning) in _OF_ALL.items():
            family = CounterMetricFamily(name, meaning, labels=["rank"])
            family.add_metric([self._rank], counted[key])
            yield family
        for key in _generation:
            name, meaning = _OF_ELASTIC[key]
            gauge = GaugeMetricFamily(name, meaning, labels=["rank"])
            gauge.add_metric([self._rank], counted[key])
            yield gauge
        kinds = {kind: totals for kind, totals in counted.items() if isinstance(totals, dict)}
        for key, (name, meaning) in _OF_A_KIND.items():
            family = CounterMetricFamily(name, meaning, labels=["rank", "kind"])
            for kind, totals in kinds.items():
                family.add_metric([self._rank, kind], totals[key])
            yield family


_server: Any = None


def serve(address: str, port: int, rank: int) -> None:
    """Serve the metrics at a port of this host until `stop_serving`. Called for option `metrics_port`, by init() or by
    workers and servers without it.

    Raises:
        RuntimeError: the package prometheus-client is missing.
        OSError: the port or the address cannot be had; says which.
    """
    global _server
    stop_serving()  # a store that was there before init()
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise RuntimeError("metrics_port needs the package prometheus-client; pip install prometheus-client") from None
    registry = CollectorRegistry()
    registry.register(_Collector(rank))
    try:
        _server, _ = start_http_server(port, addr=address, registry=registry)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            f"the metrics of rank {rank} cannot be served at port {port} of {address} on {socket.gethostname()}: "
            f"{reason}; choose another metrics_port, of which each host takes one for each of its ranks, or another "
            "metrics_address"
        ) from None


def stop_serving() -> None:
    """Called by shutdown()."""
    global _server
    if _server is not None:
        _server.shutdown()
        _server.server_close()
        _server = None
