"""Binds a rank to its share of the processors of its host, by its local rank, and limits its threads to that share.

Scripts that do not import ringtrain load this file by its path, so it needs nothing but Python itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

# In the environment of a wrapper: a kind, or nothing.
BIND_VARIABLE = "RINGRUN_BIND"
KINDS = ("none", "core", "numa")

_SYSTEM = "/sys/devices/system"

Thing = TypeVar("Thing")


def bind(environ: Mapping[str, str]) -> None:
    """Binds this process, and all that it starts, as `environ` says. Does nothing where it says no local rank."""
    kind, place = (
        environ.get(BIND_VARIABLE, "none"),
        [environ.get(f"HOROVOD_LOCAL_{what}") for what in ("RANK", "SIZE")],
    )
    if kind == "none" or not all(place):
        return
    local_rank, local_size = (int(text or 0) for text in place)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus_of(kind, local_rank, local_size, allowed, _SYSTEM))


def threads(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that gives libraries of this process its share of the processors, unless the user set it.

    Without it each of several ranks starts as many threads as there are processors, and they take turns. Called before
    `bind`, so that the processors are those of all ranks of this host.
    """
    local_size = int(environ.get("HOROVOD_LOCAL_SIZE") or 1)
    if local_size == 1 or "OMP_NUM_THREADS" in environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(len(os.sched_getaffinity(0)) // local_size, 1))}


def cpus_of(kind: str, local_rank: int, local_size: int, allowed: set[int], system: str) -> set[int]:
    """Returns the processors of a rank.

    Args:
        kind: "core" or "numa": whether whole cores or whole NUMA nodes are shared out. Ranks share one if there are
            fewer than ranks.
        allowed: the processors of all ranks of this host.
        system: the folder with the topology, /sys/devices/system.
    """
    units: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(allowed):
        node = _node_of(cpu, system)
        units.setdefault((node,) if kind == "numa" else (node, _first_sibling(cpu, system)), []).append(cpu)
    shared = _share([units[place] for place in sorted(units)], local_rank, local_size)
    return {cpu for unit in shared for cpu in unit}


def _share(things: Sequence[Thing], number: int, count: int) -> Sequence[Thing]:
    """Returns share `number` of `count` equal ones, at least one thing."""
    first = number * len(things) // count
    return things[first : max(first + 1, (number + 1) * len(things) // count)]


def _node_of(cpu: int, system: str) -> int:
    """Returns 0 where the kernel knows of no nodes."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"{system}/cpu/cpu{cpu}"):
            if name.startswith("node") and name[4:].isdigit():
                return int(name[4:])
    return 0


def _first_sibling(cpu: int, system: str) -> int:
    """Returns the first of the processors that are one core: `0,64` and `0-1` are lists of the kernel."""
    try:
        with open(f"{system}/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
            return int(file.read().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu
