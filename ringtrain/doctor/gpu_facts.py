"""Facts for the doctor about GPUs, the CUDA driver and NCCL, and the problems among them."""

from __future__ import annotations

import ctypes
import os
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

from ringtrain.errors import list_of_ranks

Data = dict[str, Any]

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_OLDEST_DRIVER = (11, 4)


class Finding(NamedTuple):
    """Something to know: level is "error" (ringtrain will not run), "warning" (it will, worse) or "note"."""

    level: str
    what: str
    remedy: str


# --- topics -----------------------------------------------------------------------------------------------------------


def cuda() -> Data:
    """The CUDA driver: the CUDA version that it speaks, and name and UUID of each GPU that this process may use."""
    found: Data = {"driver": None, "gpus": [], "visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "error": None}
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return found
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    found["driver"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status == 0:
        found["gpus"] = [_describe_gpu(driver, number) for number in range(count.value)]
    elif status != _NO_DEVICE:
        found["error"] = f"cuInit answers error {status}"
    return found


def _describe_gpu(driver: ctypes.CDLL, number: int) -> Data:
    device, name, identity = ctypes.c_int(), ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    driver.cuDeviceGet(ctypes.byref(device), number)
    driver.cuDeviceGetName(name, len(name), device)
    # the second one, of CUDA 11.4, tells the parts of a divided GPU apart
    get_uuid = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
    get_uuid(identity, device)
    return {"name": name.value.decode(errors="replace"), "uuid": f"GPU-{uuid.UUID(bytes=bytes(identity))}"}


def nccl() -> Data:
    """The NCCL that operations on GPUs would use here, and the packages that have one.

    `origin` is "loaded" (this process had it already), "package" or "system"; `error` says why there is none. Asks the
    compiled part of ringtrain, without which there are no operations.
    """
    found: Data = {"version": None, "path": None, "origin": None, "packages": [], "error": None}
    try:
        import ringtrain._core as _core
        from ringtrain.job import gpus
    except ImportError as error:
        return {**found, "error": str(error)}
    candidates = gpus.nccl_candidates()
    found["packages"] = [{"name": f"nvidia-nccl-cu{major}", "path": path, "cuda": major} for path, major in candidates]
    was_loaded = _is_loaded("libnccl.so.2")
    try:
        version, path = _core.nccl_version(candidates)
    except _core.RingtrainError as error:
        return {**found, "error": str(error)}
    origin = "package" if path in dict(candidates) else "system"
    text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return {**found, "version": text, "path": path, "origin": "loaded" if was_loaded else origin}


def _is_loaded(library: str) -> bool:
    with open("/proc/self/maps") as maps:
        return any(line.rstrip().endswith(f"/{library}") for line in maps)


def usual_gpu(local_rank: int, found: Data) -> str | None:
    """UUID of the GPU that init() would take for this rank, or None. `found`: what cuda() returns."""
    if not found["gpus"]:
        return None
    try:
        from ringtrain.job import gpus
        from ringtrain.options import table

        per_rank = int(float(table.resolve({})["gpus_per_rank"]))
    except (ImportError, ValueError):  # without the core there is no rank, and init() says which option is wrong
        return None
    number = gpus.usual(local_rank, per_rank, len(found["gpus"]))
    return str(found["gpus"][number]["uuid"])


# --- judgement --------------------------------------------------------------------------------------------------------


def judge(driver: Data, library: Data, packages: Data, topology: Data | None) -> Iterator[Finding]:
    """Returns the problems of the topics `cuda`, `nccl`, `packages` and `topology`."""
    if driver["error"]:
        yield Finding(
            "warning",
            f"the CUDA driver {driver['driver']} is installed, but {driver['error']}",
            "look at nvidia-smi; a container wants --gpus all",
        )
    if not driver["gpus"]:
        return
    spoken = tuple(map(int, driver["driver"].split(".")))
    if spoken < _OLDEST_DRIVER:
        yield Finding(
            "warning",
            f"the CUDA driver speaks CUDA {driver['driver']}, and arrays on GPUs need 11.4 or newer",
            "update the driver",
        )
        return
    yield from _judge_nccl(driver, library)
    if not any(packages.get(name) for name in ("cupy", "torch", "jax", "mxnet")):
        yield Finding("note", "no package here makes arrays on a GPU", f"pip install cupy-cuda{spoken[0]}x")
    for node in (topology or {"nodes": []})["nodes"]:
        yield from _judge_sharing(node)


def _judge_nccl(driver: Data, library: Data) -> Iterator[Finding]:
    major = int(driver["driver"].split(".")[0])
    too_new = [package for package in library["packages"] if package["cuda"] > major]
    for package in too_new:
        yield Finding(
            "warning",
            f"{package['name']} wants a driver for CUDA {package['cuda']}, this one speaks CUDA {driver['driver']}",
            f"pip install nvidia-nccl-cu{major} and remove {package['name']}, or update the driver",
        )
    if library["version"] is None and not too_new:
        yield Finding(
            "warning",
            f"arrays on GPUs would go through host memory, since there is no NCCL: {library['error']}",
            f"pip install nvidia-nccl-cu{major}",
        )


def _judge_sharing(node: Data) -> Iterator[Finding]:
    used = [gpu for gpu in node["gpus"] if gpu is not None]
    shared = sorted({gpu for gpu in used if used.count(gpu) > 1})
    if not shared:
        return
    ranks = [rank for rank, gpu in zip(node["ranks"], node["gpus"], strict=True) if gpu == shared[0]]
    what = f"{list_of_ranks(ranks)} of {node['host']} would share {shared[0]}"
    if len(set(used)) < node["visible_gpus"]:
        idle = f"{what}, although they see {node['visible_gpus']} GPUs"
        yield Finding("warning", idle, "look at gpus_per_rank and CUDA_VISIBLE_DEVICES")
    else:
        yield Finding("note", what, "start one rank for each GPU, if arrays lie on GPUs")


# --- output -----------------------------------------------------------------------------------------------------------


def rows(driver: Data, library: Data) -> Iterator[tuple[str, str]]:
    """Lines of the doctor's table."""
    yield "CUDA", _driver_text(driver)
    for number, gpu in enumerate(driver["gpus"]):
        yield "", f"GPU {number}: {gpu['name']}, {gpu['uuid']}"
    yield "NCCL", _nccl_text(library)


def _driver_text(driver: Data) -> str:
    if driver["driver"] is None:
        return "no driver"
    visible = "" if driver["visible"] is None else f", CUDA_VISIBLE_DEVICES={driver['visible']}"
    return f"driver for CUDA {driver['driver']}, {len(driver['gpus'])} GPUs{visible}"


def _nccl_text(library: Data) -> str:
    names = {package["path"]: package["name"] for package in library["packages"]}
    if library["version"] is None:
        return f"none in use, but {', '.join(names.values())} is installed" if names else "none"
    origins = {
        "loaded": "loaded before ringtrain looked for one",
        "package": f"of {names.get(library['path'])}",
        "system": "found by the loader",
    }
    return f"{library['version']}, {library['path']}, {origins[library['origin']]}"
