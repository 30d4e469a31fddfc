"""This host: how much of its CPUs the ranks may use, and its addresses."""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
from collections.abc import Iterable
from typing import NamedTuple

import ringtrain._core as _core

# --- CPUs -------------------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """The CPU time that one process may use. Processes of one container have their quota together."""

    cpus: int  # a bit for each CPU of its affinity
    container: tuple[str, str]
    quota: float | None  # in CPUs


def own_share() -> Share:
    cgroup = _text_of("/proc/self/cgroup") or ""
    cpus = sum(1 << cpu for cpu in os.sched_getaffinity(0))
    return Share(cpus, (socket.gethostname(), cgroup), cgroup_quota("/sys/fs/cgroup", cgroup))


def usable_together(shares: Iterable[Share]) -> int:
    """How many CPUs processes of one machine can keep busy at once: by affinity, and by quota if all have one."""
    shares = list(shares)
    cpus = 0
    for share in shares:
        cpus |= share.cpus
    quotas = {share.container: share.quota for share in shares}
    if any(quota is None for quota in quotas.values()):
        return cpus.bit_count()
    allowed = sum(quota for quota in quotas.values() if quota is not None)
    return max(1, min(cpus.bit_count(), math.ceil(allowed)))


def physical_cores() -> int:
    """Cores in this process's affinity; launchers count these, not hardware threads, as slots."""
    return len({_siblings(cpu) for cpu in os.sched_getaffinity(0)})


def _siblings(cpu: int) -> str:
    return _text_of(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _text_of(path: str) -> str | None:
    """Returns what is in a file of the kernel, or None if it cannot be read."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return None


def cgroup_quota(root: str, own_cgroup: str) -> float | None:
    """Tightest CPU quota, in CPUs, between this process's cgroup and the root; None where there is none.

    Args:
        root: where cgroups are mounted.
        own_cgroup: text of /proc/self/cgroup.
    """
    quotas = []
    for line in own_cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = os.path.join(root, controllers).rstrip("/")
        # in a container the path may be the host's and not exist here: the base always counts
        folder = os.path.join(base, path.strip("/")).rstrip("/")
        while folder != base:
            quotas.append(_quota_of(folder))
            folder = os.path.dirname(folder)
        quotas.append(_quota_of(base))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(folder: str) -> float | None:
    """Version 2 has cpu.max, version 1 two files; "max" and "-1" mean no quota."""
    text = _text_of(f"{folder}/cpu.max")
    if text is None:
        parts = [_text_of(f"{folder}/cpu.cfs_{part}_us") for part in ("quota", "period")]
        text = " ".join(part for part in parts if part is not None)
    if len(text.split()) != 2:
        return None
    quota, period = text.split()
    return int(quota) / int(period) if quota.isdigit() else None


# --- addresses --------------------------------------------------------------------------------------------------------


INTERFACES_VARIABLE = "RINGTRAIN_SOCKET_INTERFACES"


def addresses_of(interfaces: str, option: str = "socket_interfaces") -> list[str]:
    """Returns addresses of this host: of these interfaces, addresses or ranges such as 10.1.0.0/16, in that order.

    Raises ValueError where there is none, which names `option`.
    """
    if not interfaces:
        return []
    import ipaddress  # slow, and only a job that names its interfaces needs it

    found: list[str] = []
    here = _core.interface_addresses()
    for word in filter(None, interfaces.split(",")):
        try:
            network = ipaddress.ip_network(word, strict=False)
            matching = [address for _, address in here if ipaddress.ip_address(address.partition("%")[0]) in network]
        except ValueError:
            matching = _of_one_family([address for name, address in here if name == word])
        if not matching:
            known = ", ".join(f"{name} {address}" for name, address in here)
            raise ValueError(f"{option}={word}: this host has no such interface or address, but {known}")
        found += [address for address in matching if address not in found]
    return found


def _of_one_family(addresses: list[str]) -> list[str]:
    """IPv4 where there is some: an interface has an address of each family, and is used once."""
    return [address for address in addresses if "." in address][:1] or addresses[:1]


def usual_address() -> str:
    """One that other hosts probably know this one by."""
    others = [
        address
        for name, address in _core.interface_addresses()
        if name != "lo" and not re.match("docker|virbr|veth|cni", name) and not address.startswith("fe80:")
    ]
    return next(iter(sorted(others, key=lambda address: ":" in address)), "127.0.0.1")


def address_towards(host: str) -> str:
    """Returns the address of this host from which packets to another one would be sent. Sends none."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as sock:
        sock.connect(address)
        return str(sock.getsockname()[0])
