"""The C++ core; see csrc/python/."""

from collections.abc import Callable
from typing import Any

DTYPES: dict[str, int]

class RingtrainError(RuntimeError): ...
class MismatchError(RingtrainError): ...
class PeerLostError(RingtrainError): ...
class StalledError(RingtrainError): ...
class DeadlockError(RingtrainError): ...
class ShutDownError(RingtrainError): ...
class NotInitializedError(RingtrainError, ValueError): ...

class _Enum:
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class OpKind(_Enum):
    ALLREDUCE: OpKind
    ALLGATHER: OpKind
    BROADCAST: OpKind
    ALLTOALL: OpKind
    REDUCESCATTER: OpKind
    BARRIER: OpKind
    JOIN: OpKind
    ADD_PROCESS_SET: OpKind
    REMOVE_PROCESS_SET: OpKind

class ReduceOp(_Enum):
    Average: ReduceOp
    Sum: ReduceOp
    Min: ReduceOp
    Max: ReduceOp
    Product: ReduceOp
    Adasum: ReduceOp

class Site:
    def __init__(self, text: str) -> None: ...

class Handle:
    def is_done(self) -> bool: ...
    def tensors(self) -> list[tuple[Any, int, list[int]]]: ...
    def received_splits(self) -> list[int]: ...
    def number(self) -> int: ...

class Request:
    def __init__(
        self,
        kind: OpKind,
        name: str,
        dtype: int = ...,
        shape: list[int] | tuple[int, ...] = ...,
        op: ReduceOp = ...,
        root: int = 0,
        process_set: int = 0,
        priority: int = 0,
        numbers: list[int] = ...,
    ) -> None: ...

class Simulation:
    def __init__(
        self,
        size: int,
        cache_capacity: int = 1024,
        fusion_threshold_bytes: int = ...,
        stall_warning_s: float = 60.0,
        stall_shutdown_s: float = 600.0,
        *,
        is_star: bool = False,
    ) -> None: ...
    def round(self, fresh: list[list[Request]]) -> list[list[list[tuple[str, str, list[int], int]]]]: ...
    def is_due(self) -> bool: ...
    def messages_handled(self) -> list[int]: ...
    def bytes_handled(self) -> list[int]: ...

def simulate_autotune(
    threshold: int,
    mailbox: int,
    thresholds: list[int],
    mailboxes: list[int],
    speed: Callable[[int, int], float],
) -> tuple[int, int, int, str]: ...
def init(
    rank: int,
    names: list[tuple[str, int]],
    nodes: list[int],
    cores: int,
    token: str,
    mpi: Any,
    options: dict[str, str],
    set_by_user: list[str],
) -> None: ...
def shutdown() -> None: ...
def is_initialized() -> bool: ...
def require_initialized() -> None: ...
def submit(
    kind: OpKind,
    inputs: list[tuple[int, int, tuple[int, ...]]],
    outputs: list[tuple[int, int, tuple[int, ...]]],
    name: str,
    op: ReduceOp = ...,
    root: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: int = 0,
    priority: int = 0,
    splits: list[int] = ...,
    numbers: list[int] = ...,
    is_awaited: bool = False,
    site: Site = ...,
) -> Handle: ...
def allreduce_in_place(
    view: tuple[int, int, tuple[int, ...]],
    name: str,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: int,
    priority: int,
    is_awaited: bool,
    site: Site,
    /,
) -> Handle: ...
def start_timeline(path: str, start_s: float, limit_mb: float, marks_rounds: bool) -> None: ...
def stop_timeline() -> None: ...
def mark(text: str) -> None: ...
def say_blocked(is_blocked: bool) -> None: ...
def last_operations() -> list[dict[str, Any]]: ...
def counters() -> dict[str, int]: ...
def totals() -> dict[str, dict[str, Any]]: ...
def empty_bytes(bytes: int) -> Any: ...
def wait(handle: Handle, timeout_s: float) -> bool: ...
def address(object: Any) -> int: ...
def writable_view(object: Any) -> tuple[int, int, tuple[int, ...]] | None: ...
def option_table() -> list[dict[str, Any]]: ...
def check_option(name: str, text: str) -> None: ...
def simd_in_use() -> str: ...

ROUND_TRIP_BYTES: int

def scale(dtype: int, factor: float, destination: int, source: int, count: int) -> None: ...
def mpi_sum(dtype: int) -> int: ...
def round_trip_ns(board: int, begins: bool, limit_s: float) -> float: ...
