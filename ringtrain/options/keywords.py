"""The keywords of `init()`, for type checkers and editors."""

# Generated from the table in the core by `make docs`.

from __future__ import annotations

from os import PathLike
from typing import Literal, TypedDict


class Options(TypedDict, total=False):
    """Each option is described in docs/options.md."""

    fusion_threshold_mb: float
    cache_capacity: float
    stall_warning_time_s: float
    stall_shutdown_time_s: float
    start_timeout_s: float
    mailbox_kb: float
    ring_chunk_kb: float
    ring_from_kb: float
    link_hop_us: float
    link_gbit: float
    network: Literal["auto", "mpi", "sockets"]
    socket_interfaces: str | PathLike[str]
    socket_streams: int | Literal["auto"]
    peer_timeout_s: float
    socket_encryption: bool | Literal["on", "off"]
    on_state_lost: Literal["restart", "fail"]
    shared_memory: Literal["auto", "off"]
    allreduce_algorithm: Literal["auto", "ring", "doubling", "mpi", "measured"]
    cross_algorithm: Literal["auto", "ring", "doubling", "mpi", "measured"]
    link_rates: str
    wire_format: Literal["none", "fp16", "bf16"]
    reduction_order: Literal["auto", "ranks"]
    gpu_algorithm: Literal["auto", "nccl", "hierarchical", "staged"]
    gpu_cross_algorithm: Literal["nccl", "mpi", "cuda_aware_mpi"]
    gpus_per_rank: float
    simd: Literal["auto", "scalar", "avx2", "avx512", "neon"]
    autotune: bool | Literal["on", "off"]
    autotune_file: str | PathLike[str]
    timeline_filename: str | PathLike[str]
    timeline_mark_cycles: bool | Literal["on", "off"]
    timeline_steps: str
    timeline_limit_mb: float
    flight_dir: str | PathLike[str]
    preemption_notice: str | PathLike[str]
    log_level: Literal["info", "trace", "debug", "warning", "error", "fatal"]
    metrics_port: float
    metrics_address: str | PathLike[str]
    status: bool | Literal["on", "off"]
    kv_servers: float
    kv_threads: float
    kv_bound: float
    kv_outbox_mb: float
    kv_heartbeat_s: float
    kv_timeout_s: float
    kv_rejoin_s: float
    kv_verbose: float
    kv_interface: str | PathLike[str]
    kv_snapshot_dir: str | PathLike[str]
    kv_python_updaters: bool | Literal["on", "off"]
    kv_snapshot_s: float
