"""Which GPU a rank works on, and where NCCL may be.

The start of the CUDA driver takes up to a second, so it is not asked before a library that uses GPUs is loaded.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ringtrain._core as _core

_PLUGINS_OF_JAX = ("jax_cuda12_plugin", "jax_cuda13_plugin")


class Choice(NamedTuple):
    """The GPU of a rank, as all ranks get to know it.

    `device` is its number among the `visible` ones, those that the process may use: CUDA_VISIBLE_DEVICES. `mark` tells
    the GPUs of a node apart; the UUID, which does not compress, would be half of all that ranks are told of each other.
    `is_kept`: the script works on it already, although init() would have taken another one.
    """

    device: int
    mark: str
    visible: int
    is_kept: bool


# No library that uses GPUs is loaded yet, or there are no GPUs: the first array on a GPU decides.
NO_CHOICE = Choice(-1, "", 0, False)


def usual(local_rank: int, gpus_per_rank: int, visible: int) -> int:
    """The number of the GPU that a rank works on unless an option says otherwise."""
    return local_rank * gpus_per_rank % visible


def choose(local_rank: int, gpus_per_rank: int) -> Choice:
    """The GPU on which this rank is to work, or works already. Any thread; no context is made."""
    visible = _core.gpu_count() if _libraries() else 0
    if visible == 0:
        return NO_CHOICE
    device = usual(local_rank, gpus_per_rank, visible)
    taken = [number for number in range(visible) if _core.gpu_has_context(number)]
    if not taken or device in taken:
        return Choice(device, _mark(device), visible, is_kept=False)
    if len(taken) == 1:
        return Choice(taken[0], _mark(taken[0]), visible, is_kept=True)
    return NO_CHOICE


def _mark(device: int) -> str:
    return f"{zlib.crc32(_core.gpu_uuid(device).encode()):08x}"


def use(choice: Choice) -> None:
    """Make it the current GPU of the loaded libraries in this thread, unless the script has made its own choice."""
    if choice.device < 0 or choice.is_kept:
        return
    for tell in _libraries():
        tell(choice.device)


def _libraries() -> list[Callable[[int], object]]:
    """How each library of this process that can use GPUs is told which one."""
    cupy, torch, jax = (sys.modules.get(name) for name in ("cupy", "torch", "jax"))
    found: list[Callable[[int], object]] = []
    if cupy is not None:
        found.append(lambda device: _tell_cupy(cupy, device))
    if torch is not None and torch.version.cuda is not None:
        found.append(lambda device: _tell_torch(torch, device))
    if jax is not None and any(map(importlib.util.find_spec, _PLUGINS_OF_JAX)):
        found.append(lambda device: _tell_jax(jax, device))
    return found


def _tell_cupy(cupy: Any, device: int) -> None:
    if cupy.cuda.is_available():
        cupy.cuda.Device(device).use()


def _tell_torch(torch: Any, device: int) -> None:
    """When it first needs a GPU, or now if it has one: a job that only has a PyTorch with CUDA makes no context."""
    if torch.cuda.is_available():
        torch.cuda._lazy_call(lambda: torch.cuda.set_device(device))


def _tell_jax(jax: Any, device: int) -> None:
    """Before it looks for GPUs, which it does with its first array: then it keeps what it has found."""
    if jax.config.read("jax_cuda_visible_devices") == "all":
        jax.config.update("jax_cuda_visible_devices", str(device))


def describe_sharing(nodes: Sequence[int], local_ranks: Sequence[int], choices: Sequence[Choice]) -> str:
    """A sentence about two ranks of a node that share a GPU while another one is idle; "" where there are none.

    Args: of every rank its node, its local rank and its GPU.
    """
    pair = _core.needless_sharing(
        list(nodes), [choice.mark for choice in choices], [choice.visible for choice in choices]
    )
    if pair is None:
        return ""
    device, visible = choices[pair[1]].device, choices[pair[1]].visible
    beginning = f"ranks {pair[0]} and {pair[1]} share GPU {device}, although they see {visible} GPUs"
    kept = next((rank for rank in reversed(pair) if choices[rank].is_kept), None)
    if kept is None:
        return f"{beginning}: look at gpus_per_rank and CUDA_VISIBLE_DEVICES"
    return (
        f"{beginning}: rank {kept} had a CUDA context there before init(), although its local rank is "
        f"{local_ranks[kept]}; call ringtrain.init() before anything is put on a GPU, or choose the GPU before that "
        "(torch.cuda.set_device, cupy.cuda.Device.use)"
    )


def nccl_candidates() -> list[tuple[str, int]]:
    """Returns the paths of NCCL in packages nvidia-nccl-cu*, with their major version of CUDA, the newest first.

    Looks for the packages' records and imports nothing: importlib.metadata alone would take longer to import than all
    of this.
    """
    found = [candidate for folder in dict.fromkeys(sys.path) for candidate in _nccl_packages_in(folder)]
    return sorted(found, key=lambda candidate: -candidate[1])


def _nccl_packages_in(folder: str) -> Iterator[tuple[str, int]]:
    try:
        names = os.listdir(folder or ".")
    except OSError:  # no folder
        return
    for name in names:
        record = os.path.join(folder, name, "RECORD")
        if not (name.startswith("nvidia_nccl_cu") and name.endswith(".dist-info") and os.path.exists(record)):
            continue
        version = name.removeprefix("nvidia_nccl_cu").partition("-")[0]
        with open(record) as lines:
            files = [line.strip().rsplit(",", 2) for line in lines]
        for file, _, size in files:
            path = os.path.join(folder, file)
            if file.endswith("/libnccl.so.2") and version.isdecimal() and _has_size(path, size):
                yield path, int(version)


def _has_size(path: str, size: str) -> bool:
    """Packages for different versions of CUDA put their files at the same place, where those of the last one stay."""
    return os.path.exists(path) and size in ("", str(os.path.getsize(path)))
