"""The tests may ask for ranks: see harness/plugin.py."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import rooms
from harness.hosts import hosts_or_skip
from harness.plugin import pytest_configure
from harness.spec import FOLDER_OF_LAUNCHERS

rooms.put_on_path()

# Open MPI's way to libfabric, which no test takes, looks for its hardware for a second whenever a rank starts.
os.environ.setdefault("OMPI_MCA_btl", "^ofi")

# More processes than cores run here: a pool of threads in each would only be in the way.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# Ranks and tests of JAX compile the same programs: each is compiled once by all processes of this run of pytest.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    programs = tempfile.TemporaryDirectory(prefix="jax-programs-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Every rank imports this library and its tests: compiled once, they come in half the time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A script that runs the tests in the background has them ignore these, and what they start would ignore them, too.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def folder_of_launchers(monkeypatch):
    """Where the launchers that this test starts, and maybe kills, have their files."""
    with tempfile.TemporaryDirectory(prefix="ringtrain-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv(FOLDER_OF_LAUNCHERS, folder)
        yield


@pytest.fixture(scope="module")
def two_hosts():
    with hosts_or_skip(2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def three_hosts():
    with hosts_or_skip(3) as hosts:
        yield hosts


@pytest.fixture(params=["mpi", pytest.param("sockets", marks=pytest.mark.alike)])
def network(request, monkeypatch):
    """The network that ringrun starts jobs on."""
    monkeypatch.setenv("RINGTRAIN_NETWORK", request.param)
    return request.param


__all__ = ["pytest_configure"]
