"""`python -m ringtrain.doctor`: what ringtrain finds here and in this job, what is wrong and how to mend it."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringtrain.errors import RingtrainError, list_of_ranks
from ringtrain.job import launched_by, libmpi, mpi as job_mpi, network as job_network, sockets
from ringtrain.job.host import cgroup_quota
from ringtrain.job.rendezvous.server import meet
from ringtrain.job.world import Exchange, node_name
from ringtrain.options import table
from ringtrain.runner.hosts import UsageError
from ringtrain.runner.launchers import choose_network
from ringtrain.runner.mpi_library import MpiNotFound, find_launcher, probe

# --- GPUs, the CUDA driver and NCCL -----------------------------------------------------------------------------------


Data = dict[str, Any]

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_OLDEST_DRIVER = (11, 4)


class Finding(NamedTuple):
    """Something to know: level is "error" (ringtrain will not run), "warning" (it will, worse) or "note"."""

    level: str
    what: str
    remedy: str


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


def _judge_gpus(driver: Data, library: Data, packages: Data, topology: Data | None) -> Iterator[Finding]:
    """Returns the problems of the topics `cuda`, `nccl`, `packages` and `topology`."""
    if driver["error"]:
        yield Finding(
            "warning",
            f"the CUDA driver {driver['driver']} is installed, but {driver['error']}",
            "look at nvidia-smi; start a container with --gpus all",
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
            f"{package['name']} needs a driver for CUDA {package['cuda']}, this one speaks CUDA {driver['driver']}",
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
        yield Finding("note", what, "start one rank for each GPU, if arrays are on GPUs")


def _gpu_rows(driver: Data, library: Data) -> Iterator[tuple[str, str]]:
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


# --- ranks ------------------------------------------------------------------------------------------------------------


def describe_network(launch: launched_by.Launch | None) -> Data:
    """The network of this job and, where no launcher has started this process, that of one that ringrun would start.

    `over_mpi` says whether MPI brings the ranks together.
    """
    try:
        chosen = job_network.choose(table.resolve({}), None, launch)
        of_ringrun = choose_network("auto") if launch is None else None
    except (ValueError, UsageError) as error:
        return {"network": None, "reason": str(error), "over_mpi": False, "of_ringrun": None, "error": str(error)}
    over_mpi = launch is not None and (chosen.network == "mpi" or not sockets.is_met_at_a_place(launch))
    of_ringrun_data = None if of_ringrun is None else of_ringrun._asdict()
    return {**chosen._asdict(), "over_mpi": over_mpi, "of_ringrun": of_ringrun_data, "error": None}


def topology_of_mpi(driver: Data) -> Data:
    """As `topology`, for all ranks of MPI_COMM_WORLD, which call it together."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return topology(job_mpi.exchange_over(world), world.rank, job_mpi.leader_of_node(world), driver)


def topology_of_sockets(launch: launched_by.Launch, driver: Data) -> Data:
    """As `topology`, for all ranks that meet at the rendezvous, which call it together.

    Raises what `meet` raises, RuntimeError where nothing says where that is, and OSError where there is no secret.
    """
    place, timeout_s = sockets.place_of(launch), float(table.resolve({})["start_timeout_s"])
    if launch.size is None:
        raise RuntimeError(f"{launch.launcher} does not say how many ranks there are")
    with meet(place, sockets.secret_of(launch, place), "doctor", launch.rank, launch.size, timeout_s) as member:
        found = topology(member.exchange, launch.rank, node_name(), driver)
        longest_s = max(member.exchange(member.round_trip_s()))
        return {**found, "connections": sockets.choose_streams(table.resolve({}), longest_s).text(longest_s)}


def topology(exchange: Exchange, rank: int, node: Any, driver: Data) -> Data:
    """The number of ranks, and of each node the host, its ranks, the CPUs that these may run on together, the GPU that
    each of them would take, and how many a rank sees.

    Args:
        node: the same on ranks of one node.
        driver: the topic `cuda`.
    """
    nodes = exchange(node)
    everybody = exchange(
        {
            "host": socket.gethostname(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "gpu": usual_gpu(nodes[:rank].count(node), driver),
            "visible_gpus": len(driver["gpus"]),
        }
    )
    ranks_of = {one: [rank for rank, its in enumerate(nodes) if its == one] for one in nodes}
    return {"size": len(nodes), "nodes": [_node(ranks, everybody) for ranks in ranks_of.values()]}


def _node(ranks: list[int], everybody: list[Data]) -> Data:
    of_ranks = [everybody[rank] for rank in ranks]
    return {
        "host": of_ranks[0]["host"],
        "ranks": ranks,
        "cpus": len(set().union(*(one["cpus"] for one in of_ranks))),
        "gpus": [one["gpu"] for one in of_ranks],
        "visible_gpus": max(one["visible_gpus"] for one in of_ranks),
    }


def find_topology(launch: launched_by.Launch | None, library: Data, driver: Data, own_network: Data) -> Data | None:
    """The topology of the job; None where there is no launcher, or the ranks do not meet, which is an error then.

    Args:
        library, driver: the topics `mpi` and `cuda`.
        own_network: the topic `network`, whose error it sets.
    """
    if launch is None or own_network["error"]:
        return None
    if own_network["over_mpi"]:
        return topology_of_mpi(driver) if library.get("thread_level") else None
    try:
        return topology_of_sockets(launch, driver)
    except (RingtrainError, RuntimeError, OSError, ValueError) as error:
        own_network["error"] = str(error)
        return None


def network_text(data: Data) -> str:
    """One line for people."""
    if data["network"] is None:
        return "none"
    own = f"{data['network']}: {data['reason']}"
    of_ringrun = data["of_ringrun"]
    return own if of_ringrun is None else f"{own}; ringrun takes {of_ringrun['network']}: {of_ringrun['reason']}"


# --- the machine ------------------------------------------------------------------------------------------------------


PACKAGES = ("numpy", "ml_dtypes", "cupy", "torch", "jax", "jaxlib", "mxnet")
SHARED_MEMORY = "/dev/shm"
# a container's /dev/shm has this size unless told otherwise, and the ranks of a node share it
SMALL_SHARED_MEMORY_MB = 64


def examine(launch: launched_by.Launch | None) -> Data:
    """Gather every topic. Under a launcher all ranks must call this together, since they meet."""
    network, driver = describe_network(launch), cuda()
    library = mpi(launch, network["over_mpi"])
    topology = find_topology(launch, library, driver, network)
    report: Data = {
        "ringtrain": core(),
        "launcher": None if launch is None else launch._asdict(),
        "network": network,
        "mpi": library,
        "topology": topology,
        "cpu": cpu(),
        "shared_memory": shared_memory(SHARED_MEMORY),
        "cuda": driver,
        "nccl": nccl(),
        "packages": packages(PACKAGES),
    }
    report["findings"] = [finding._asdict() for finding in judge(report)]
    return report


# --- topics -----------------------------------------------------------------------------------------------------------


def core() -> Data:
    """ringtrain's version, its compiled part and the instruction set that the reduction kernels chose."""
    version = _version("ringtrain")
    try:
        module = importlib.import_module("ringtrain._core")
    except ImportError as error:
        return {"version": version, "path": None, "simd": None, "error": str(error)}
    return {"version": version, "path": module.__file__, "simd": module.simd_in_use(), "error": None}


def mpi(launch: launched_by.Launch | None, is_used: bool) -> Data:
    """The MPI of mpi4py, tried in a process of its own, which a broken one may abort. If this job uses it, it is then
    initialised here, unless the launcher is of another MPI."""
    try:
        data = probe(initialize=launch is None)
    except MpiNotFound as error:
        return {"error": error.what, "remedy": error.remedy}
    if launch is not None and is_used and not launched_by.is_of_another_mpi(launch, data["library"]):
        data = libmpi.describe(initialize=True)
    return {**data, "mpirun": find_launcher(data["library"], data["path"]), "error": None}


def cpu() -> Data:
    """CPUs by affinity (what this process may run on) and by cgroup quota (how much time it gets there)."""
    return {
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "quota_cpus": cgroup_quota("/sys/fs/cgroup", Path("/proc/self/cgroup").read_text()),
    }


def shared_memory(folder: str) -> Data:
    """Size of /dev/shm in megabytes, and whether a file can be made there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
        space = os.statvfs(folder)
    except OSError as error:
        return {"path": folder, "size_mb": None, "free_mb": None, "error": error.strerror or str(error)}
    block_mb = space.f_frsize / 2**20
    return {
        "path": folder,
        "size_mb": round(space.f_blocks * block_mb),
        "free_mb": round(space.f_bavail * block_mb),
        "error": None,
    }


def packages(names: Sequence[str]) -> Data:
    """Version (None where it is not known) and folder of each importable package, or None. A package's distribution may
    be called otherwise (cupy-cuda12x, mxnet-cu112)."""
    owners = importlib.metadata.packages_distributions()
    found: Data = {}
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None:
            found[name] = None
            continue
        folder = next(iter(spec.submodule_search_locations or []), spec.origin)
        # Python 3.10 knows the owner only of packages with a top_level.txt; most of the others have their own name
        found[name] = {"version": _version(next(iter(owners.get(name, [])), name)), "path": folder}
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- judgement --------------------------------------------------------------------------------------------------------


def judge(report: Data) -> list[Finding]:
    """Returns the problems in a report, worst first."""
    findings = [
        *_judge_core(report["ringtrain"]),
        *_judge_network(report["network"]),
        *_judge_mpi(report),
        *_judge_launch(report),
        *_judge_cpus(report),
        *_judge_shared_memory(report["shared_memory"]),
        *_judge_gpus(report["cuda"], report["nccl"], report["packages"], report["topology"]),
        *_judge_packages(report["packages"]),
    ]
    return sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.level))


def _judge_core(data: Data) -> Iterator[Finding]:
    if data["error"]:
        yield Finding(
            "error",
            f"the compiled part of ringtrain cannot be loaded: {data['error']}",
            "install ringtrain again with this Python: pip install --force-reinstall ringtrain",
        )


def _judge_network(data: Data) -> Iterator[Finding]:
    if data["error"]:
        yield Finding(
            "error",
            f"the ranks do not meet: {data['error']}",
            "look at the variables RINGTRAIN_RANK, RINGTRAIN_SIZE, RINGTRAIN_RENDEZVOUS and RINGTRAIN_NETWORK, and at "
            "firewalls; ringrun sets all these",
        )


def _judge_mpi(report: Data) -> Iterator[Finding]:
    data = report["mpi"]
    if data["error"]:
        networks = [report["network"], report["network"]["of_ringrun"] or {}]
        is_wanted = any(one.get("network") == "mpi" or one.get("over_mpi") for one in networks)
        # without mpi4py nothing here is meant to use MPI
        if is_wanted:
            yield Finding("error", data["error"], data["remedy"])
        return
    if data["thread_level"] not in ("multiple", None):
        yield Finding(
            "error",
            f"MPI gives thread level {data['thread_level']}, but ringtrain calls it from a thread of its own",
            'leave mpi4py.rc.thread_level at "multiple" and use an MPI that was built with MPI_THREAD_MULTIPLE',
        )
    if data["mpirun"] is None:
        yield Finding(
            "warning",
            f"no mpirun of {data['library']} is beside Python, beside the library or on PATH",
            f"add the bin folder of {data['library']} to PATH, or start with srun",
        )


def _judge_launch(report: Data) -> Iterator[Finding]:
    if report["launcher"] is None or report["mpi"]["error"] or not report["network"]["over_mpi"]:
        return
    launch = launched_by.Launch(**report["launcher"])
    library = f"{report['mpi']['library']} {report['mpi']['version']}"
    if launched_by.is_of_another_mpi(launch, report["mpi"]["library"]):
        mpirun = report["mpi"]["mpirun"] or "the mpirun of that library"
        what = f"{launch.launcher} started this process, but mpi4py uses {library}"
        yield Finding("error", what, f"start with {mpirun}, or with ringrun, which picks the right one by itself")
        return
    try:
        launched_by.require_world(launch, report["topology"]["size"], library)
    except RuntimeError as error:
        what, _, remedy = str(error).partition(". ")
        yield Finding("error", what, remedy)


def _judge_cpus(report: Data) -> Iterator[Finding]:
    quota = report["cpu"]["quota_cpus"] or math.inf
    for node in (report["topology"] or {"nodes": []})["nodes"]:
        count, cpus = len(node["ranks"]), min(node["cpus"], quota)
        if count > cpus:
            what = f"{count} ranks of {node['host']} share {cpus:g} CPUs"
            yield Finding("warning", what, "start fewer ranks on a host, or give the container more CPUs")
        elif report["cpu"]["cpus"] == 1 < cpus:
            what = "this rank is bound to one CPU, which ringtrain's thread must share with the framework"
            yield Finding("warning", what, "start with ringrun, mpirun --bind-to none, or I_MPI_PIN=0 for Intel MPI")
            return


def _judge_shared_memory(data: Data) -> Iterator[Finding]:
    if data["error"]:
        yield Finding(
            "warning",
            f"{data['path']} cannot be used: {data['error']}",
            "mount it (docker run --shm-size=1g), or set RINGTRAIN_SHARED_MEMORY=off to send everything through MPI",
        )
    elif data["free_mb"] < SMALL_SHARED_MEMORY_MB:
        yield Finding(
            "warning",
            f"{data['path']} has only {data['free_mb']} MB free of {data['size_mb']} MB",
            "give the container more (docker run --shm-size=1g), or lower RINGTRAIN_MAILBOX_KB",
        )


def _judge_packages(found: Data) -> Iterator[Finding]:
    numpy, mxnet = found.get("numpy"), found.get("mxnet")
    if numpy is None:
        yield Finding("error", "NumPy is not installed", "pip install numpy")
    elif mxnet and numpy["version"] and _release(numpy["version"]) >= (1, 24):
        yield Finding(
            "warning",
            f"mxnet {mxnet['version']} cannot be imported with numpy {numpy['version']} (it uses numpy.bool)",
            'pip install "numpy<1.24"',
        )
    if found.get("ml_dtypes") is None:
        yield Finding("note", "without ml_dtypes NumPy arrays have no bfloat16", "pip install ml_dtypes")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


# --- output -----------------------------------------------------------------------------------------------------------


def as_table(report: Data) -> str:
    """The report as aligned lines for people."""
    rows = [*_rows(report)]
    width = max(len(label) for label, _ in rows)
    lines = [f"{label:<{width}}  {text}" for label, text in rows]
    if not report["findings"]:
        return "\n".join([*lines, "", "nothing is wrong"])
    lines.append("")
    for finding in report["findings"]:
        lines += [f"{finding['level']:<{width}}  {finding['what']}", f"{'':<{width}}  remedy: {finding['remedy']}"]
    return "\n".join(lines)


def _rows(report: Data) -> Iterator[tuple[str, str]]:
    own, library, processor = report["ringtrain"], report["mpi"], report["cpu"]
    yield "ringtrain", f"{own['version'] or 'version unknown'}, {own['path'] or 'no compiled part'}"
    yield "network", network_text(report["network"])
    if library["error"]:
        yield "MPI", "none"
    else:
        yield "MPI", f"{library['library']} {library['version']}, {library['path']}"
        ulfm = "ULFM" if library["ulfm"] else "no ULFM"
        handles = f"handles of {library['handle_bytes']} bytes"
        level = f"thread level {library['thread_level'] or 'unknown'}"
        aware = {True: ", CUDA-aware", False: ", not CUDA-aware", None: ""}[library["cuda_aware"]]
        yield "", f"MPI {library['standard']}, {handles}, {level}, {ulfm}{aware}"
        yield "", f"mpi4py {library['mpi4py']}; its launcher is {library['mpirun'] or 'nowhere to be found'}"
    yield "launcher", _launcher_text(report["launcher"])
    for node in (report["topology"] or {"nodes": []})["nodes"]:
        yield "node", f"{node['host']}, {list_of_ranks(node['ranks'])} on {node['cpus']} CPUs"
    connections = (report["topology"] or {}).get("connections")
    if connections:
        yield "connections", connections
    quota = f", of which the cgroup gives {processor['quota_cpus']:g}" if processor["quota_cpus"] else ""
    yield "CPU", f"{processor['machine']}, {processor['cpus']} CPUs{quota}, kernels: {own['simd'] or 'none'}"
    memory = report["shared_memory"]
    yield memory["path"], memory["error"] or f"{memory['free_mb']} MB free of {memory['size_mb']} MB"
    yield from _gpu_rows(report["cuda"], report["nccl"])
    for name, package in report["packages"].items():
        yield name, f"{package['version'] or 'version unknown'}, {package['path']}" if package else "none"


def _launcher_text(launch: Data | None) -> str:
    if launch is None:
        return "none: this is the only rank"
    return f"{launch['launcher']}, rank {launch['rank']} of {launch['size'] or 'unknown'}"


# --- which algorithm carries out which operation ----------------------------------------------------------------------


def algorithms(ranks_of_hosts: Sequence[int], settings: dict[str, str]) -> list[Data]:
    """Return what carries out arrays in host memory, from how many bytes on, and which options change it.

    Args:
        ranks_of_hosts: the number of ranks of each host.
        settings: all options, as `table.resolve` returns them.

    Raises:
        ValueError: link_rates does not have a rate for each host.
    """
    nodes = [host for host, ranks in enumerate(ranks_of_hosts) for _ in range(ranks)]
    rows = importlib.import_module("ringtrain._core").algorithms(nodes, settings)
    return [dict(zip(("operation", "from_bytes", "algorithm", "options"), row, strict=True)) for row in rows]


_MOST_HOSTS_IN_A_LINE, _MOST_RANKS = 32, 1 << 20
_PREDICTED_BYTES = tuple(4**power for power in range(1, 16))


def predictions(ranks_of_hosts: Sequence[int], settings: dict[str, str]) -> list[Data]:
    """Return the algorithm between hosts, its predicted seconds and its connections, by the bytes of an allreduce.

    Nothing where all ranks share memory, or MPI or reduction_order decides. Arguments as those of `algorithms`.
    """
    shares_memory = settings["shared_memory"] == "auto" and settings["allreduce_algorithm"] in ("auto", "measured")
    ranks, lanes = (len(ranks_of_hosts), min(ranks_of_hosts)) if shares_memory else (sum(ranks_of_hosts), 1)
    algorithm = settings["cross_algorithm" if shares_memory and max(ranks_of_hosts) > 1 else "allreduce_algorithm"]
    sharing = lanes if shares_memory else math.ceil(ranks / len(ranks_of_hosts)) if len(ranks_of_hosts) > 1 else 1
    bytes_per_s = 1e9 / 8 * float(settings["link_gbit"]) / sharing
    if ranks == 1 or algorithm == "mpi" or settings["reduction_order"] == "ranks":
        return []
    predict = importlib.import_module("ringtrain._core").predict_allreduce
    found: list[Data] = []
    for size in _PREDICTED_BYTES:
        row: Data = {"bytes": size}
        for kind, element_bytes in (("float32", 4), ("float16", 2)):
            name, seconds, connections = predict(
                algorithm,
                ranks,
                size // lanes,
                1e-6 * float(settings["link_hop_us"]),
                bytes_per_s,
                element_bytes,
                float(settings["ring_from_kb"]),
            )
            row[kind] = {"algorithm": name, "seconds": seconds, "connections": connections}
        found.append(row)
    return found


def _predictions_as_lines(rows: Sequence[Data], settings: dict[str, str]) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield (
        f"Predicted for allreduces between hosts, with link_hop_us={float(settings['link_hop_us']):g} and "
        f"link_gbit={float(settings['link_gbit']):g} (milliseconds, connections of a rank):"
    )
    for row in rows:
        cells = [
            f"{kind} {1e3 * row[kind]['seconds']:10.3f}  {row[kind]['connections']:3}  {row[kind]['algorithm']:<20}"
            for kind in ("float32", "float16")
        ]
        yield f"{_bytes_text(row['bytes']):>8}  {'  '.join(cells)}".rstrip()


def _bytes_text(size: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size >> power} {unit}"
    return f"{size} B"


def _algorithms_as_table(ranks_of_hosts: Sequence[int], rows: Sequence[Data], settings: dict[str, str]) -> str:
    ranks, hosts = sum(ranks_of_hosts), len(ranks_of_hosts)
    is_one_each = hosts > _MOST_HOSTS_IN_A_LINE and ranks == hosts
    of_each = "one on each" if is_one_each else ",".join(map(str, ranks_of_hosts))
    lines = [f"{ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}: {of_each}"]
    if not rows:
        lines.append("one rank has nothing to send: every operation is a copy")
    width = max((len(row["operation"]) for row in rows), default=0)
    for row, next_row in itertools.zip_longest(rows, rows[1:]):
        lines.append(f"{row['operation']:<{width}}  {_size_text(row['from_bytes']):>13}  {row['algorithm']}")
        is_said_below = next_row and all(row[key] == next_row[key] for key in ("operation", "options"))
        if row["options"] and not is_said_below:
            lines.append(f"{'':<{width}}  {'':>13}  options: {row['options']}")
    lines += [
        *_predictions_as_lines(predictions(ranks_of_hosts, settings), settings),
        "",
        "Sizes are bytes of an array that goes alone, or of the longest message of an alltoall.",
        *(
            ["Shares of an array are chosen in init(), where rank 0 logs them."]
            if settings["link_rates"] == "auto"
            else []
        ),
        "For arrays on GPUs see the options gpu_algorithm and gpu_cross_algorithm.",
    ]
    return "\n".join(lines)


def _size_text(from_bytes: int) -> str:
    if from_bytes == 0:
        return "any size"
    word, size = ("from", from_bytes) if from_bytes % 1024 == 0 else ("over", from_bytes - 1)
    return f"{word} {size >> 20} MiB" if size % (1 << 20) == 0 else f"{word} {size / 1024:g} KiB"


def _ranks_of_hosts(text: str) -> list[int]:
    numbers = [int(number) if number.isdecimal() else 0 for number in text.split(",")]
    if not all(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of ranks of each host, such as 4 or 8,8")
    return numbers


def _number_of_ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks from 1 to {_MOST_RANKS}")
    return int(text)


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report, under a launcher on rank 0 only. Returns 1 when it holds an error, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m ringtrain.doctor",
        description="Say what ringtrain finds on this machine, what is wrong and how to mend it.",
    )
    parser.add_argument("--json", action="store_true", help="print the data instead of the table")
    parser.add_argument(
        "--algorithms",
        metavar="RANKS",
        nargs="?",
        const=[],
        type=_ranks_of_hosts,
        help="print which algorithm carries out which operation from which size on, and the options that change it. "
        "RANKS is the number of ranks of each host, such as 4 or 8,8; by default the ranks are those of the job, or "
        "without a launcher as many as this host has CPUs. Predicted times of allreduces follow. The options are those "
        "of the environment, such as RINGTRAIN_ALLREDUCE_ALGORITHM=ring",
    )
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=_number_of_ranks,
        help="with --algorithms: as many ranks, one on each host",
    )
    arguments = parser.parse_args(argv)
    if arguments.ranks and arguments.algorithms != []:
        parser.error("--ranks is for --algorithms without the ranks of each host")
    launch = launched_by.detect()
    report = examine(launch)
    # the launcher's rank, not MPI's: under the wrong launcher every process is MPI's rank 0
    is_first = launch is None or launch.rank == 0
    if arguments.algorithms is not None:
        if is_first:
            of_job = [len(node["ranks"]) for node in (report["topology"] or {"nodes": []})["nodes"]]
            named = [1] * arguments.ranks if arguments.ranks else arguments.algorithms
            ranks_of_hosts = named or of_job or [report["cpu"]["cpus"]]
            settings = table.resolve({})
            try:
                rows = algorithms(ranks_of_hosts, settings)
            except ValueError as error:
                parser.error(str(error))
            print(
                json.dumps(rows, indent=2) if arguments.json else _algorithms_as_table(ranks_of_hosts, rows, settings)
            )
        return 0
    if is_first:
        print(json.dumps(report, indent=2) if arguments.json else as_table(report))
    return int(any(finding["level"] == "error" for finding in report["findings"]))


if __name__ == "__main__":
    sys.exit(main())
