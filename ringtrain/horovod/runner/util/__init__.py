"""`horovod.runner.util`: threads and addresses of hosts.

All its modules are here: `finder` finds this one under each of their names.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ringtrain._core as _core
from ringtrain.runner.hosts import is_this_host

# --- `horovod.runner.util.network`: addresses of hosts ----------------------------------------------------------------


def get_local_host_addresses() -> list[str]:
    """The addresses of all interfaces of this host."""
    return [address for _, address in _core.interface_addresses()]


def get_local_intfs(nic: str | None = None) -> set[str]:
    """The names of the interfaces of this host; only `nic`, if it is given and exists."""
    return {name for name, _ in _core.interface_addresses() if nic is None or name == nic}


def resolve_host_address(host_name: str) -> str | None:
    """The address of a host, or None where it is not known."""
    try:
        return socket.gethostbyname(host_name)
    except OSError:
        return None


def filter_local_addresses(all_host_names: Iterable[str]) -> list[str]:
    """The names of hosts other than this one."""
    return [name for name in all_host_names if not is_this_host(name)]


# --- `horovod.runner.util.threads`: functions in threads --------------------------------------------------------------


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts `target(*args)` in a thread, which it returns; `silent` drops an exception.

    Raises ValueError where `args` is not a tuple.
    """
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {args!r}; for a single argument use (arg,)")

    def call() -> None:
        try:
            target(*args)
        except Exception:
            if not silent:
                raise

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Calls `fn(*args)` for each of `args_list`, in threads.

    Returns the results by the place of their arguments, or None without waiting for them.
    """
    calls: queue.SimpleQueue[tuple[int, Sequence[Any]]] = queue.SimpleQueue()
    for call in enumerate(args_list):
        calls.put(call)
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while True:
            try:
                place, args = calls.get_nowait()
            except queue.Empty:
                return
            try:
                results[place] = fn(*args)
            except BaseException as error:
                errors.append(error)

    threads = [in_thread(work) for _ in range(min(max_concurrent_executions, len(args_list)))]
    if not block_until_all_done:
        return None
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Calls `func(*args)` in a thread once `event` is set, unless `stop` is set before."""

    def wait() -> None:
        while not event.wait(check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(wait, daemon=daemon, silent=silent)
