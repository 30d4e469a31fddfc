"""How much of the CPU this process may use."""

from __future__ import annotations

import os
from pathlib import Path


def physical_cores() -> int:
    """Cores in this process's affinity; launchers count these, not hardware threads, as slots."""
    return len({_siblings(cpu) for cpu in os.sched_getaffinity(0)})


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def cgroup_quota(root: Path, own_cgroup: str) -> float | None:
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
        base = root / controllers
        # in a container the path may be the host's and not exist here: the base always counts
        folder = base / path.lstrip("/")
        quotas += [_quota_of(place) for place in (folder, *folder.parents) if place.is_relative_to(base)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(folder: Path) -> float | None:
    """Version 2 has cpu.max, version 1 two files; "max" and "-1" mean no quota."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{part}_us").read_text().strip() for part in ("quota", "period"))
    except OSError:
        return None
    return int(quota) / int(period) if quota.isdigit() else None
