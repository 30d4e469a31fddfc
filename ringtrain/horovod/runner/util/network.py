"""`horovod.runner.util.network`: addresses of hosts."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import ringtrain._core as _core
from ringtrain.runner.hosts import is_this_host


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
