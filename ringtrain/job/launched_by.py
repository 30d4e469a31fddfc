"""Which launcher started this process, read from the environment alone: MPI is neither loaded nor initialised."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple, Protocol


class Launch(NamedTuple):
    """The words of a launcher about the process that it started.

    `size` is None where the environment does not tell it (a bare PMIx server such as prterun), `local_rank` and
    `local_size` (the place among the ranks of this host) where the launcher does not.
    """

    launcher: str
    rank: int
    size: int | None
    local_rank: int | None
    local_size: int | None


class Environment(Protocol):
    """How one launcher describes itself in the environment of its ranks."""

    def read(self, environ: Mapping[str, str]) -> Launch | None:
        """The launch, or None when this launcher did not start the process."""


class OpenMpi:
    """mpirun of Open MPI."""

    NAME = "Open MPI"

    def read(self, environ: Mapping[str, str]) -> Launch | None:
        rank, size = _number(environ, "OMPI_COMM_WORLD_RANK"), _number(environ, "OMPI_COMM_WORLD_SIZE")
        if rank is None or size is None:
            return None
        local_rank = _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
        return Launch(self.NAME, rank, size, local_rank, _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"))


class Hydra:
    """mpirun of MPICH, Intel MPI and MVAPICH: the only PMI launcher that also numbers the ranks of a host."""

    NAME = "Hydra (MPICH or Intel MPI)"

    def read(self, environ: Mapping[str, str]) -> Launch | None:
        rank, size = _number(environ, "PMI_RANK"), _number(environ, "PMI_SIZE")
        local_rank = _number(environ, "MPI_LOCALRANKID")
        if rank is None or size is None or local_rank is None:
            return None
        return Launch(self.NAME, rank, size, local_rank, _number(environ, "MPI_LOCALNRANKS"))


class SlurmStep:
    """srun. Only inside a step: sbatch and salloc set SLURM_NTASKS for processes that are not ranks, too."""

    NAME = "Slurm"
    # slurm.h: from here on a step is Slurm's own (interactive shell, batch script, extern, pending)
    FIRST_SERVICE_STEP = 0xFFFFFFFA

    def read(self, environ: Mapping[str, str]) -> Launch | None:
        step, size = _number(environ, "SLURM_STEP_ID"), _number(environ, "SLURM_STEP_NUM_TASKS")
        rank = _number(environ, "SLURM_PROCID")
        if step is None or step >= self.FIRST_SERVICE_STEP or rank is None or size is None:
            return None
        return Launch(self.NAME, rank, size, _number(environ, "SLURM_LOCALID"), self._tasks_of_this_node(environ))

    def _tasks_of_this_node(self, environ: Mapping[str, str]) -> int | None:
        """SLURM_STEP_TASKS_PER_NODE is indexed by SLURM_NODEID."""
        node = _number(environ, "SLURM_NODEID")
        tasks = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        return tasks[node] if node is not None and node < len(tasks) else None


def expand_counts(text: str) -> list[int]:
    """Slurm's `4(x2),3` as numbers: 4, 4, 3."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def expand_node_list(text: str) -> list[str]:
    """Slurm's `n[01-03,7],m5` as names: n01, n02, n03, n7, m5."""
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        names += _expand_item(item)
    return names


def _expand_item(item: str) -> list[str]:
    """One name with any number of brackets: `rack[1-2]n[01-03]`."""
    before, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    inside, _, after = rest.partition("]")
    return [before + number + ending for number in _expand_range(inside) for ending in _expand_item(after)]


def _expand_range(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        width = len(first)
        numbers += [str(number).zfill(width) for number in range(int(first), int(last or first) + 1)]
    return numbers


class Pmix:
    """A bare PMIx server (prterun): it gives the rank, and the size only to those who ask it by PMIx."""

    def read(self, environ: Mapping[str, str]) -> Launch | None:
        rank = _number(environ, "PMIX_RANK")
        if rank is None or "PMIX_NAMESPACE" not in environ:
            return None
        return Launch("PMIx", rank, None, None, None)


class Pmi:
    """Any other process manager that speaks PMI (gforker, PALS)."""

    def read(self, environ: Mapping[str, str]) -> Launch | None:
        rank, size = _number(environ, "PMI_RANK"), _number(environ, "PMI_SIZE")
        return None if rank is None or size is None else Launch("PMI", rank, size, None, None)


class Ringrun:
    """ringrun without an MPI, or somebody who sets the same variables."""

    NAME = "ringrun"

    def read(self, environ: Mapping[str, str]) -> Launch | None:
        return _numbered(self.NAME, environ, ("RINGTRAIN_RANK", "RINGTRAIN_SIZE"), "RINGTRAIN_LOCAL_")


class Torchrun:
    """torchrun of PyTorch."""

    NAME = "torchrun"

    def read(self, environ: Mapping[str, str]) -> Launch | None:
        if "TORCHELASTIC_RUN_ID" not in environ:
            return None
        return _numbered(self.NAME, environ, ("RANK", "WORLD_SIZE"), "LOCAL_")


class ByHand:
    """Launchers that start processes for torch.distributed's `env://`."""

    NAME = "MASTER_ADDR and RANK"

    def read(self, environ: Mapping[str, str]) -> Launch | None:
        if not environ.get("MASTER_ADDR") or _number(environ, "MASTER_PORT") is None:
            return None
        return _numbered(self.NAME, environ, ("RANK", "WORLD_SIZE"), "LOCAL_")


def _numbered(launcher: str, environ: Mapping[str, str], names: tuple[str, str], of_host: str) -> Launch | None:
    for name in names:
        if environ.get(name) and _number(environ, name) is None:
            raise ValueError(f"{name}={environ[name]} is not a number: a rank is one from 0 on, the size one from 1 on")
    rank, size = (_number(environ, name) for name in names)
    if rank is None or size is None:
        return None
    if rank >= size == 1:  # with more ranks it is told where they meet, and the others, too
        raise ValueError(f"{names[0]}={rank} is not a rank of a job with {names[1]}={size}: ranks are numbered from 0")
    local_size = _number(environ, of_host + ("SIZE" if launcher == Ringrun.NAME else "WORLD_SIZE"))
    return Launch(launcher, rank, size, _number(environ, of_host + "RANK"), local_size)


# Variables set for ringtrain, and those of torchrun, which may run in any of the others, are first. Open MPI and
# Hydra come before Slurm because they start their daemons with srun, and the ranks inherit the variables of that step;
# Slurm comes before PMIx and PMI because its steps set theirs as well. Those of a script for torch may lie about
# anywhere.
ENVIRONMENTS: tuple[Environment, ...] = (
    Ringrun(),
    Torchrun(),
    OpenMpi(),
    Hydra(),
    SlurmStep(),
    Pmix(),
    Pmi(),
    ByHand(),
)


def detect(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Return what the launcher of this process says, or None when no launcher started it."""
    for environment in ENVIRONMENTS:
        launch = environment.read(environ)
        if launch is not None:
            return launch
    return None


# The variables by which ringrun describes a job without an MPI to its ranks.
OF_RINGRUN = (
    *("RINGTRAIN_RANK", "RINGTRAIN_SIZE", "RINGTRAIN_LOCAL_RANK", "RINGTRAIN_LOCAL_SIZE"),
    *("RINGTRAIN_RENDEZVOUS", "RINGTRAIN_SECRET_FILE", "_RINGTRAIN_SECRET_DESCRIPTOR"),
)


# Of the numbers of parts of a heterogeneous job of Slurm, the one of the whole job is first.
_OF_BATCH_SYSTEMS = ("SLURM_HET_JOB_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def batch_job(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the job of a batch system that this process is in, such as "SLURM_JOB_ID=7"; "" outside of one."""
    return next((f"{name}={environ[name]}" for name in _OF_BATCH_SYSTEMS if environ.get(name)), "")


def name_of_job(launch: Launch, environ: Mapping[str, str] = os.environ) -> str:
    """Returns what identifies the job, the same on all ranks, beside the place where they meet; "" if nothing does."""
    names = _NAMES_OF_JOBS.get(launch.launcher, ())
    return " ".join(f"{name}={environ.get(name, '')}" for name in names)


_NAMES_OF_JOBS = {
    SlurmStep.NAME: ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    Torchrun.NAME: ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    OpenMpi.NAME: ("PMIX_NAMESPACE",),
}


def job_on_one_host(launch: Launch, environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns what names the job, the same on all ranks, where mpirun has started all of them on this host; else None.

    Only of Open MPI: the variables of Hydra name no job.
    """
    is_here = launch.launcher == OpenMpi.NAME and launch.size is not None and launch.local_size == launch.size > 1
    return environ.get("PMIX_NAMESPACE") if is_here else None


# In the environment of all processes that a rank starts: which process is the rank, and what identifies the rank. The
# underscore keeps it out of the variables that users set. A job that a rank starts is given none: see runner/job.py.
OWNER_VARIABLE = "_RINGTRAIN_RANK_OWNER"
# Variables that differ between two ranks, beside the numbers of `Launch`. Those that are not set are left out.
_OF_ELASTIC_JOBS = ("RINGTRAIN_ELASTIC", "RINGTRAIN_MEMBER")
_OF_JOBS = ("RINGTRAIN_RENDEZVOUS", "PMIX_NAMESPACE", "PMI_FD", "PMI_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
_OF_TORCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_OF_WORKERS = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_ROLE", "DMLC_TASK_ID")

# The process that has called `own_place`, which a forked child has from its parent.
_owner_pid: int | None = None


def own_place(call: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Mark this process, for all that it starts, as the one that takes the place that the launcher gave it.

    A process that a rank starts inherits the environment, and with it what makes a process a rank. A rank that replaces
    itself by execve() stays the same process, so it may call this again. A forked child is left to the core.

    Args:
        call: what is called, for the error.

    Raises:
        RuntimeError: a rank has started this process, or multiprocessing has, and the process is still importing the
            script.
    """
    global _owner_pid
    if _owner_pid not in (None, os.getpid()):
        return
    _refuse_while_importing_the_script(call, environ)
    identity = _identity(environ)
    if not identity:
        return
    process = f"{os.getpid()} {_start_time()}"
    owner, _, owned = environ.get(OWNER_VARIABLE, "").partition("|")
    if owned == identity and owner != process:
        place, pid = _place_in_words(environ), owner.split()[0]
        kind = "worker" if place.startswith("worker") else "rank"
        raise RuntimeError(
            f"process {os.getpid()} was started by {place} (process {pid}) and is not a {kind}: call {call} in "
            f'process {pid} alone, behind `if __name__ == "__main__":`, or start a job of its own with ringrun'
        )
    environ[OWNER_VARIABLE] = f"{process}|{identity}"
    _owner_pid = os.getpid()


def _refuse_while_importing_the_script(call: str, environ: Mapping[str, str]) -> None:
    """Also where the parent has no launcher or has not called init() yet, so that a script fails with any size."""
    of_multiprocessing = sys.modules.get("multiprocessing.process")
    # set while a spawned process imports the script and unpickles its target
    if of_multiprocessing is not None and getattr(of_multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            f"process {os.getpid()} was started by multiprocessing for {_place_in_words(environ)} and is not a rank, "
            f'but importing the script calls {call}: put {call} and the training behind `if __name__ == "__main__":`'
        )


def _place_in_words(environ: Mapping[str, str]) -> str:
    launch = detect(environ)
    if launch is not None:
        return f"rank {launch.rank}"
    if environ.get("DMLC_TASK_ID") and environ.get("DMLC_ROLE"):
        return f"{environ['DMLC_ROLE']} {environ['DMLC_TASK_ID']}"
    return "a rank of an elastic job" if _is_elastic(environ) else "rank 0"


def _is_elastic(environ: Mapping[str, str]) -> bool:
    return environ.get("RINGTRAIN_ELASTIC", "0") not in ("", "0")


def _identity(environ: Mapping[str, str]) -> str:
    """The same for all processes with the place of this one; "" for a process without a place.

    A worker without DMLC_TASK_ID has any place that is free, and so has a process that it starts.
    """
    launch = detect(environ)
    names: tuple[str, ...] = ()
    if _is_elastic(environ):
        names += (*_OF_ELASTIC_JOBS, *_OF_JOBS)
    elif launch is not None:
        names += (*_OF_JOBS, *(_OF_TORCH if launch.launcher in (Torchrun.NAME, ByHand.NAME) else ()))
    if environ.get("DMLC_TASK_ID"):
        names += _OF_WORKERS
    if not names:
        return ""
    words = [f"{launch.launcher} {launch.rank}/{launch.size}"] if launch is not None else []
    return " ".join([*words, *(f"{name}={environ[name]}" for name in names if name in environ)])


def _start_time() -> str:
    """In ticks since the system started; with the process id, it identifies a process."""
    with open("/proc/self/stat") as file:
        return file.read().rpartition(")")[2].split()[19]


def is_of_another_mpi(launch: Launch, library: str) -> bool:
    """Whether the launcher belongs to another MPI than `library`, named as mpi4py's `MPI.get_vendor()` names it.

    Known before MPI is initialised, where such a pair may abort the process. False where it cannot be told.
    """
    if launch.launcher == OpenMpi.NAME:
        return library != "Open MPI"
    return launch.launcher == Hydra.NAME and library == "Open MPI"


def require_world(launch: Launch | None, mpi_size: int, mpi_library: str) -> None:
    """Refuse a world whose size is not what the launcher says.

    Started by the launcher of another MPI, each process would silently be rank 0 of 1.

    Args:
        launch: what `detect` returned.
        mpi_size: number of ranks of MPI_COMM_WORLD.
        mpi_library: name and version of the library that mpi4py found; only its first line is shown.

    Raises:
        RuntimeError: the launcher started another number of ranks.
    """
    if launch is None or launch.size is None or launch.size == mpi_size:
        return
    library = (mpi_library.strip().splitlines() or ["another MPI"])[0].rstrip("\x00").split(", package:")[0]
    raise RuntimeError(
        f"{launch.launcher} started {_ranks(launch.size)}, but mpi4py found {library}, whose world has "
        f"{_ranks(mpi_size)}: {_way_out(launch.launcher, launch.size)}, which picks the right one by itself."
    )


def _way_out(launcher: str, size: int) -> str:
    if launcher == SlurmStep.NAME:  # any library will do, if srun speaks its language
        return (
            "srun's --mpi does not fit the library. Start with `srun --mpi=pmix` for Open MPI and Intel MPI, "
            f"`srun --mpi=pmi2` for MPICH, or with `ringrun --launcher srun -np {size} python ...`"
        )
    return (
        f"the launcher and the library are of different MPIs. Start with {_own_mpirun()}, or with "
        f"`ringrun -np {size} python ...`"
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _own_mpirun() -> str:
    """An MPI from PyPI brings its mpirun along, beside the Python executable."""
    beside_python = os.path.join(sys.prefix, "bin", "mpirun")
    is_there = os.path.exists(beside_python)
    return f"the mpirun of that library, {beside_python}" if is_there else "the mpirun of that library"


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdigit() else None


class NetworkChoice(NamedTuple):
    """The network of a job, "mpi", "sockets" or "none" (a job of one rank), and the reason, for people."""

    network: str
    reason: str
