"""Counters of what this rank has done, for programs and for Prometheus."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import ringtrain._core as _core

# What `metrics()` counts for each kind of operation -> name and explanation for Prometheus.
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
    "rounds": ("ringtrain_rounds", "Rounds of the negotiation."),
}
_OF_ELASTIC = {
    "generation": ("ringtrain_generation", "Which generation of the elastic job this is."),
    "seconds_lost": ("ringtrain_lost_seconds", "Time in which a rank was lost and the next generation had not begun."),
}


_generation: dict[str, Any] = {}


def set_generation(generation: int, seconds_lost: float) -> None:
    """Called by init() of an elastic job."""
    _generation.update(generation=generation, seconds_lost=seconds_lost)


def metrics() -> dict[str, Any]:
    """What this rank has done since init().

    Returns:
        "cache_hits", "cache_misses", "rounds" and "came_last", which are numbers, and for each kind of operation that
        there was ("allreduce", "barrier", ...) a dict: "operations" and "failed" (numbers), "bytes" of this rank's
        tensors, and the seconds, summed over the operations, that they were "queued_s" before they were announced,
        "waiting_s" until all ranks were ready, "ready_s" until their turn came, and "working_s" while they were carried
        out.

        In an elastic job also "generation", the number of this one, and "seconds_lost", in which all generations until
        now had lost a rank and the next one had not begun.

        The straggler is the rank whose "came_last" grows: it counts the cached operations that others had announced in
        an earlier round, and that were complete as soon as this rank announced them. Its "waiting_s" is small, too.

    Raises:
        NotInitializedError: before init().
    """
    return {**_core.counters(), **_core.totals(), **_generation}


class _Collector:
    """What prometheus-client asks for at each request."""

    def __init__(self, rank: int):
        self._rank = str(rank)

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if not _core.is_initialized():
            return
        counted = metrics()
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
    """Serve the metrics at a port of this host until `stop_serving`. Called by init() for option `metrics_port`.

    Raises:
        RuntimeError: the package prometheus-client is missing.
        OSError: the port or the address cannot be had; says which.
    """
    global _server
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
