"""The packages of a machine: Open MPI 4.1, MPICH 4.0, mpi4py 3.1 and NumPy of Debian 12, and the oldest NumPy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.ringrun_job import ROOT, needs_mpi

pytestmark = [pytest.mark.slow, needs_mpi]

PYTHON = "/usr/bin/python3"
LIBRARIES = Path("/usr/lib", f"{os.uname().machine}-linux-gnu")
OLDEST_NUMPY = "1.23.5"
WHERE = """
import mpi4py, numpy as np, ringtrain as hvd
hvd.init()
from mpi4py import MPI
vendor, release = MPI.get_vendor()
told = [hvd.rank(), hvd.allreduce(np.ones(1), op=hvd.Sum)[0], vendor, release[0], mpi4py.__version__[0], np.__version__]
print("told", *told)
"""


class Environment:
    """Of Debian's Python, with or without its packages."""

    def __init__(self, folder: Path, options: list[str], packages: list[str]):
        subprocess.run([PYTHON, "-m", "venv", "--without-pip", *options, str(folder)], check=True, timeout=120)
        # to install another pip, and to compile what nobody imports, takes longer than all else here
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
        pip += ["install", "-q", "--no-compile", "--only-binary=:all:"]
        of_ringtrain = ["ml_dtypes<0.5", "PyYAML", "Jinja2"]
        subprocess.run([*pip, *of_ringtrain, *packages], cwd=folder, check=True, timeout=300)
        self.programs = folder / "bin"

    def run(self, *words: str, **variables: str) -> tuple[int, str]:
        done = subprocess.run(
            [*words, str(self.programs.parent / "where.py")],
            env={
                "PATH": f"{self.programs}:/usr/bin:/bin",
                "PYTHONPATH": ROOT,
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=90,
        )
        return done.returncode, done.stdout


def printed_by_debian(program: str) -> str:
    return subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, timeout=30).stdout.strip()


def made(folder: Path, options: list[str], packages: list[str]) -> Environment:
    if shutil.which("mpirun.openmpi") is None or shutil.which("mpirun.mpich") is None:
        pytest.skip("Debian's MPIs are not installed; make debian")
    if printed_by_debian("import sys; print(sys.version_info[:2])") != str(sys.version_info[:2]):
        pytest.skip("the core is compiled for another version of Python than Debian's")
    environment = Environment(folder, options, packages)
    (folder / "where.py").write_text(WHERE)
    return environment


@pytest.fixture(scope="module")
def of_debian(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return made(tmp_path_factory.mktemp("of_debian"), ["--system-site-packages"], ["numpy<2"])


@pytest.fixture(scope="module")
def of_pypi(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return made(tmp_path_factory.mktemp("of_pypi"), [], [f"numpy=={OLDEST_NUMPY}", "mpi4py>=4"])


def told_in(output: str) -> list[list[str]]:
    return sorted(line[line.index("told") :].split()[1:] for line in output.splitlines() if "told" in line)


MPIRUN = ("mpirun.openmpi", "-np", "2", "--oversubscribe", "python")
MPIRUN_OF_MPICH = ("mpirun.mpich", "-np", "2", "python")
RINGRUN = ("python", "-m", "ringtrain.run", "-np", "2", "python")


@pytest.mark.parametrize("words", [MPIRUN, RINGRUN], ids=["mpirun", "ringrun"])
def test_mpi4py_3_of_debian_runs_on_its_open_mpi(of_debian: Environment, words: tuple[str, ...]) -> None:
    code, output = of_debian.run(*words)
    assert code == 0, output
    assert [told[:5] for told in told_in(output)] == [[str(rank), "2.0", "Open", "MPI", "4"] for rank in (0, 1)]
    numpy = printed_by_debian("import numpy; print(numpy.__version__)")
    assert {tuple(told[5:]) for told in told_in(output)} == {("3", numpy)}, output


def test_the_mpirun_of_another_mpi_is_refused(of_debian: Environment) -> None:
    code, output = of_debian.run(*MPIRUN_OF_MPICH)
    assert code != 0 and "Hydra (MPICH or Intel MPI) started 2 ranks, but mpi4py found Open MPI v4.1" in output


@pytest.mark.parametrize("words", [MPIRUN, RINGRUN], ids=["mpirun", "ringrun"])
def test_mpi4py_4_runs_on_the_open_mpi_of_debian_and_the_oldest_numpy(
    of_pypi: Environment, words: tuple[str, ...]
) -> None:
    code, output = of_pypi.run(*words)
    assert code == 0, output
    expected = ["2.0", "Open", "MPI", "4", "4", OLDEST_NUMPY]
    assert told_in(output) == [[str(rank), *expected] for rank in (0, 1)]


@pytest.mark.parametrize("words", [MPIRUN_OF_MPICH, RINGRUN], ids=["mpirun", "ringrun"])
def test_mpi4py_4_runs_on_the_mpich_of_debian_by_a_link(
    of_pypi: Environment, words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "libmpi.so.12").symlink_to(LIBRARIES / "libmpich.so.12")
    code, output = of_pypi.run(*words, LD_LIBRARY_PATH=str(tmp_path), MPI4PY_LIBMPI="libmpi.so.12")
    assert code == 0, output
    assert told_in(output) == [[str(rank), "2.0", "MPICH", "4", "4", OLDEST_NUMPY] for rank in (0, 1)]
