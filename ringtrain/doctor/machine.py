"""Facts for the doctor about this machine and the job: its network, and where its ranks run."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import os
import platform
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ringtrain.doctor import gpu_facts
from ringtrain.doctor.gpu_facts import Data, Finding
from ringtrain.errors import RingtrainError, list_of_ranks
from ringtrain.job import launched_by, libmpi, network as job_network, sockets
from ringtrain.job.host import cgroup_quota
from ringtrain.job.rendezvous.secret import job_secret
from ringtrain.job.rendezvous.server import meet
from ringtrain.job.world import Exchange, node_name
from ringtrain.options import table
from ringtrain.runner.hosts import UsageError
from ringtrain.runner.launchers import choose_network
from ringtrain.runner.mpi_library import MpiNotFound, find_launcher, probe

# --- ranks ------------------------------------------------------------------------------------------------------------


def describe_network(launch: launched_by.Launch | None) -> Data:
    """The network of this job and, where no launcher has started this process, that of one that ringrun would start.

    `over_mpi` says whether MPI brings the ranks together.
    """
    try:
        wanted = table.resolve({})["network"]
        chosen = job_network.choose(wanted, None, launch)
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
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    leader = node.bcast(world.rank)
    node.Free()
    return topology(world.allgather, world.rank, leader, driver)


def topology_of_sockets(launch: launched_by.Launch, driver: Data) -> Data:
    """As `topology`, for all ranks that meet at the rendezvous, which call it together.

    Raises what `meet` raises, RuntimeError where nothing says where that is, and OSError where there is no secret.
    """
    place, timeout_s = sockets.place_of(launch), float(table.resolve({})["start_timeout_s"])
    if launch.size is None:
        raise RuntimeError(f"{launch.launcher} does not say how many ranks there are")
    with meet(place, job_secret(str(place)), "doctor", launch.rank, launch.size, timeout_s) as member:
        return topology(member.exchange, launch.rank, node_name(), driver)


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
            "gpu": gpu_facts.usual_gpu(nodes[:rank].count(node), driver),
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
    network, driver = describe_network(launch), gpu_facts.cuda()
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
        "nccl": gpu_facts.nccl(),
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
        "quota_cpus": cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text()),
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
        *gpu_facts.judge(report["cuda"], report["nccl"], report["packages"], report["topology"]),
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
        # who has no mpi4py wants no MPI
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
            f"no mpirun of {data['library']} lies beside Python, beside the library or on PATH",
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
    quota = f", of which the cgroup gives {processor['quota_cpus']:g}" if processor["quota_cpus"] else ""
    yield "CPU", f"{processor['machine']}, {processor['cpus']} CPUs{quota}, kernels: {own['simd'] or 'none'}"
    memory = report["shared_memory"]
    yield memory["path"], memory["error"] or f"{memory['free_mb']} MB free of {memory['size_mb']} MB"
    yield from gpu_facts.rows(report["cuda"], report["nccl"])
    for name, package in report["packages"].items():
        yield name, f"{package['version'] or 'version unknown'}, {package['path']}" if package else "none"


def _launcher_text(launch: Data | None) -> str:
    if launch is None:
        return "none: this is the only rank"
    return f"{launch['launcher']}, rank {launch['rank']} of {launch['size'] or 'unknown'}"
