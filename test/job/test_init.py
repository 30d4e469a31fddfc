"""Joining and leaving the job."""

import functools
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from harness.exact import require_equal
from measure.process import measure_asleep

import ringtrain as hvd
from ringtrain.job import launched_by, libmpi, mpi
from ringtrain.runner import launchers


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 4)
def test_place_in_the_world():
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1)
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, size, 0, 1)
    assert hvd.is_initialized() and hvd.is_homogeneous() and hvd.mpi_threads_supported() and hvd.mpi_built()
    assert hvd.mpi_enabled() == (size > 1 and os.environ.get("RINGTRAIN_NETWORK") != "sockets")
    assert not any((hvd.gloo_built(), hvd.gloo_enabled(), hvd.rocm_built(), hvd.ddl_built(), hvd.ccl_built()))
    assert hvd.global_process_set.ranks == list(range(size))


@pytest.mark.ranks(1, 2, 3, fast=[2], initialised=False)
def test_init_and_shutdown_many_times():
    for round_ in range(10):
        hvd.init()
        require_equal(hvd.allreduce(np.full(3, float(round_)), name="x"), np.full(3, float(round_)))
        hvd.shutdown()
        assert not hvd.is_initialized()
        with pytest.raises(hvd.NotInitializedError):
            hvd.allreduce(np.ones(3))


@pytest.mark.fast
@pytest.mark.ranks(4, initialised=False)
def test_init_with_a_communicator():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    half = world.Split(world.Get_rank() % 2)
    hvd.init(comm=half)
    assert (hvd.rank(), hvd.size()) == (half.Get_rank(), 2)
    require_equal(hvd.allgather(np.array([world.Get_rank()])), np.array([0, 2]) + world.Get_rank() % 2)
    assert half.allreduce(1) == 2  # the user's own traffic
    hvd.shutdown()
    half.Free()


@pytest.mark.ranks(3, initialised=False)
def test_init_with_a_list_of_ranks():
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    if rank == 1:
        with pytest.raises(ValueError, match="rank 1, which is not in it"):
            hvd.init(comm=[0, 2])
        with pytest.raises(ValueError, match="different and between"):
            hvd.init(comm=[1, 1])
        with pytest.raises(TypeError, match="communicator or a list of ranks"):
            hvd.init(comm="all")
    else:
        hvd.init(comm=[0, 2])
        require_equal(hvd.allgather(np.array([rank])), np.array([0, 2]))
        hvd.shutdown()


@pytest.mark.fast
@pytest.mark.ranks(2, initialised=False, env={"RINGTRAIN_CACHE_CAPACITY": "7"})
def test_a_second_init_does_nothing_unless_it_wants_something_else():
    hvd.init(process_sets=[[0]], fusion_threshold_mb=64)
    hvd.init()
    hvd.init(process_sets="dynamic")
    hvd.init(process_sets=[[0]], fusion_threshold_mb=64.0, cache_capacity="7")
    for other, name in (
        ({"comm": [0]}, "comm"),
        ({"process_sets": [[0], [0]]}, "process_sets"),
        ({"cache_capacity": 8}, "cache_capacity"),
        ({"fusion_threshold_mb": 1, "cache_capacity": 8}, "fusion_threshold_mb and another cache_capacity"),
    ):
        with pytest.raises(hvd.RingtrainError, match=f"initialised already, with another {name};"):
            hvd.init(**other)
    with pytest.raises(TypeError, match="no option 'nothing'"):
        hvd.init(nothing=1)
    require_equal(hvd.allreduce(np.ones(3)), np.ones(3))
    hvd.shutdown()
    hvd.init(cache_capacity=8)
    hvd.shutdown()


@pytest.mark.fast
@pytest.mark.ranks(2, isolated=True)
def test_init_initialises_an_mpi4py_that_was_told_not_to():
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    assert not MPI.Is_initialized()
    hvd.init()
    require_equal(hvd.allreduce(np.ones(3)), np.ones(3))
    assert MPI.COMM_WORLD.Get_size() == hvd.size() and MPI.Query_thread() == MPI.THREAD_MULTIPLE


@pytest.mark.ranks(2, initialised=False, env={"RINGTRAIN_CACHE_CAPACITY": "7"})
def test_a_keyword_beats_the_variable():
    hvd.init(cache_capacity=1)
    require_equal(hvd.allreduce(np.ones(3)), np.ones(3))
    hvd.shutdown()


def test_a_job_over_mpi_without_mpi4py_says_what_to_install():
    script = 'import sys; sys.modules["mpi4py"] = None; import ringtrain as hvd; hvd.init()'
    of_mpirun = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    environment = {**os.environ, **{f"OMPI_COMM_WORLD_{name}": value for name, value in of_mpirun.items()}}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.search(r"ModuleNotFoundError: .*mpi4py.*: pip install mpi4py, or start the ranks by ringrun", done.stderr)


@pytest.mark.fast
@pytest.mark.ranks(1, 3, timeout=60)
def test_an_idle_rank_sleeps():
    hvd.allreduce(np.ones(3))
    time.sleep(0.2)
    asleep = measure_asleep(2)
    assert asleep.wakeups < 25 and asleep.cpu_s < 0.1


@pytest.mark.ranks(2, 3, timeout=60)
def test_a_rank_that_waits_for_a_straggler_leaves_the_core_to_others():
    if hvd.rank() == hvd.size() - 1:
        time.sleep(1)
        hvd.allreduce(np.ones(3), name="late")
    else:
        begin, before = time.monotonic(), time.process_time()
        hvd.allreduce(np.ones(3), name="late")
        assert time.process_time() - before < 0.3 * (time.monotonic() - begin)  # who spins has all of it


def run_python(code, *, launcher=(), environment=None):
    return subprocess.run(
        [*launcher, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(environment or {})},
    )


RINGRUN = [sys.executable, "-m", "ringtrain.run", "-np"]


def test_plain_python_is_one_rank_and_does_not_load_mpi():
    result = run_python(
        "import sys, numpy, ringtrain as hvd; hvd.init(); print(hvd.allreduce(numpy.ones(2)), hvd.size());"
        "print('mpi4py' in sys.modules)"
    )
    assert (result.returncode, result.stdout) == (0, "[1. 1.] 1\nFalse\n"), result.stderr


@pytest.mark.alike
def test_mpirun_on_one_host_needs_no_mpi4py():
    mpirun = launchers.choose_launcher("mpirun").launcher
    if not isinstance(mpirun, launchers.OpenMpi):
        pytest.skip(f"the variables of {type(mpirun).__name__} name no job at whose place ranks could meet")
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "import numpy, ringtrain as hvd\n"
        "for number in range(2):\n"
        "    hvd.init(network='auto')\n"
        "    print(number, hvd.rank(), hvd.local_rank(), hvd.mpi_enabled(), hvd.allreduce(numpy.ones(1), op=hvd.Sum))\n"
        "    hvd.shutdown()\n"
    )
    command = [*RINGRUN, "2", "--no-prefix-output", "--network", "mpi", sys.executable, "-c", code]
    # two jobs at a time do not meet each other
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    expected = [f"{number} {rank} {rank} False [2.]" for number in range(2) for rank in range(2)]
    for job in jobs:
        output, _ = job.communicate(timeout=60)
        assert (job.returncode, sorted(output.splitlines())) == (0, expected)


@pytest.mark.fast
def test_a_script_that_ends_without_shutdown_ends_well():
    code = "import numpy, ringtrain as hvd; hvd.init(); assert hvd.allreduce(numpy.ones(2))[0] == 1"
    result = run_python(code, launcher=[*RINGRUN, "3"])
    assert result.returncode == 0, result.stderr


@pytest.mark.fast
def test_a_rank_that_ends_early_is_named_by_the_others():
    code = """
import numpy, time, ringtrain as hvd
hvd.init()
hvd.allreduce(numpy.ones(2))
if hvd.rank() == 1:
    raise SystemExit(0)
begin = time.monotonic()
try:
    hvd.allreduce(numpy.ones(2), name="alone")
except hvd.ShutDownError as error:
    assert time.monotonic() - begin < 5
    print(f"told {error}", flush=True)
"""
    result = run_python(code, launcher=[*RINGRUN, "3"])
    told = re.findall(r"told rank 1 \(host .*, pid \d+\) exited early", result.stdout)
    assert len(told) == 2, result.stdout + result.stderr


@pytest.mark.fast
def test_nothing_is_left_in_shared_memory():
    code = "import ringtrain as hvd; hvd.init(); hvd.add_process_set([0, 1])"
    assert run_python(code, launcher=[*RINGRUN, "3"]).returncode == 0
    # A user who can write nowhere else has a folder there.
    assert not [one.name for one in os.scandir("/dev/shm") if one.name.startswith("ringtrain") and one.is_file()]


@pytest.mark.ranks(3, isolated=True)
def test_a_rank_that_learns_of_a_death_in_init_tells_the_others():
    from mpi4py import MPI

    if launched_by.detect().rank == 1:  # MPI tells it, and nobody else, who then waits for this rank

        def fail(*arguments):
            raise MPI.Exception(libmpi.ulfm_error_classes(MPI)[0])

        mpi.introduce = fail
    began = time.monotonic()
    with pytest.raises(hvd.PeerLostError, match="died while the others were in init"):
        hvd.init()
    assert time.monotonic() - began < 5


class Forgetful:
    """A communicator one of whose collectives delivers nothing of rank 1, and ends well."""

    def __init__(self, comm, method):
        self._comm, self._method = comm, method

    def __getattr__(self, name):
        function = getattr(self._comm, name)
        return functools.partial(self._call, function) if name == self._method else function

    def _call(self, function, own, received):
        function(own, received)
        buffer = received if isinstance(received, bytearray) else received[0]
        begin = len(buffer) // self._comm.Get_size()
        buffer[begin : begin + 8] = b"\x7f" * 8


@pytest.mark.ranks(2, isolated=True)
@pytest.mark.parametrize("method", ["Allgather", "Allgatherv"])
def test_nobody_reads_what_mpi_has_not_delivered(method):
    own_communicator = mpi._own_communicator
    mpi._own_communicator = lambda *arguments: Forgetful(own_communicator(*arguments), method)
    with pytest.raises(hvd.PeerLostError, match=r"a rank died .* in init\(\): MPI has not delivered all"):
        hvd.init()
