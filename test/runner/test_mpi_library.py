"""Installed MPIs: an mpi4py older than that of PyPI, and MPI libraries under all their names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.ringrun_job import ROOT, TIMEOUT_S, needs_mpi, ringrun

# Takes away what mpi4py has only since 4.0, before anybody sees the module. As in Debian 12, which has 3.1.4.
MPI4PY_3 = """
import importlib.util, sys


class Finder:
    def find_spec(self, name, path, target=None):
        if name != "mpi4py.MPI":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)))
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for one in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED"):
                delattr(module, one)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""

TRAIN = """
import numpy as np, ringtrain as hvd
from mpi4py import MPI
from ringtrain import doctor
from ringtrain.job import launched_by
from ringtrain.job.mpi import meet

assert not hasattr(MPI, "ERR_PROC_FAILED") and not hasattr(MPI, "ERR_REVOKED")
hvd.init()
print("sum", hvd.allreduce(np.arange(3.0) + hvd.rank(), op=hvd.Sum).tolist())


def send_to_nobody(own):
    MPI.COMM_WORLD.send(None, dest=1000)


try:
    meet(MPI, MPI.COMM_WORLD, range(MPI.COMM_WORLD.size), 0, send_to_nobody)
except MPI.Exception as error:
    print("raised", error.Get_error_class() == MPI.ERR_RANK)
print("ulfm", doctor.examine(launched_by.detect())["mpi"]["ulfm"])
"""


@needs_mpi
@pytest.mark.fast
def test_an_mpi4py_before_4_trains_and_is_described(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(MPI4PY_3)
    path = os.pathsep.join([str(tmp_path), ROOT])
    result = ringrun("-np", "2", "python", "-c", TRAIN, PYTHONPATH=path, RINGTRAIN_NETWORK="mpi")
    assert result.returncode == 0, result.stderr
    said = ["sum [1.0, 3.0, 5.0]", "raised True", "ulfm False"]
    assert sorted(result.stdout.splitlines()) == sorted(f"[{rank}] {line}" for rank in (0, 1) for line in said)


# Prints which of the files named on the command line would be the MPI library if it was mapped.
MAP = """
import mmap, sys
from ringtrain.job.libmpi import loaded_library

for path in sys.argv[1:]:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        if loaded_library() == path:
            print(path.rpartition("/")[2])
"""


def test_the_mpi_library_is_known_by_each_of_its_names(tmp_path: Path) -> None:
    names = ["libmpi.so.40.30.4", "libmpich.so.12", "libmpi_abi.so.0", "libmpi_ibm.so.3", "libmpi_cray.so.12.0.0"]
    names += ["libmpi_gnu_91.so.12.0.0", "libmpi_nvidia.so.12", "libmpi_intel.so.12", "libmpi_amd.so.12"]
    others = [
        "libmpi_cxx.so.40",
        "libmpi_mpifh.so.40",
        "libmpi_usempif08.so.40",
        "libmpifort.so.12",
        "libmpich.so.12.py",
    ]
    for name in [*names, *others]:
        (tmp_path / name).write_bytes(b"no library")
    words = [sys.executable, "-c", MAP, *(str(tmp_path / name) for name in [*names, *others])]
    result = subprocess.run(
        words, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, "PYTHONPATH": ROOT}
    )
    assert result.stdout.split() == names, result.stderr
