"""The harness reports every way in which a body can end, and leaves nothing behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ringtrain as hvd
from harness import processes
from harness.exact import DTYPES, FLOATS, MAX_RANKS, OPS, data, data_of_ranks, reference, require_equal
from harness.examples import ExampleRanks
from harness.forked import forks_of
from harness.hosts import hosts_or_skip, simulated_hosts
from harness.plugin import IMPORTED_BY_COLLECTION
from harness.rooms import TEST_FOLDER

BODIES = """
import os, signal, time
from pathlib import Path
import pytest
from ringtrain.job import launched_by

def rank():
    launch = launched_by.detect()
    return launch.rank if launch else 0

def wait_for_ever():
    Path(__file__).with_name(f"pid{rank()}").write_text(str(os.getpid()))
    time.sleep(1000)

@pytest.mark.ranks(3, isolated=True)
def test_fails():
    number = rank()
    print(f"this is {number}")
    assert number != 1

@pytest.mark.ranks(2, isolated=True, timeout=6)
def test_hangs():
    if rank() == 0:
        wait_for_ever()

@pytest.mark.ranks(2, isolated=True)
def test_is_killed():
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)

@pytest.mark.ranks(1, 2, isolated=True, slow=[1], fast=[2])
def test_skips():
    pytest.skip("not on a Monday")

@pytest.mark.ranks(2, isolated=True)
def test_skips_on_one_rank():
    if rank() == 1:
        pytest.skip("not on this rank")

@pytest.mark.ranks(1, isolated=True)
def test_wants_a_fixture(monkeypatch):
    pass

@pytest.mark.ranks(1, isolated=True)
@pytest.mark.parametrize("value", [lambda: 1])
def test_gets_what_cannot_be_sent(value):
    pass

@pytest.mark.ranks(1, 2, isolated=True, env={"COLOUR": "green"}, dtypes=["int8"])
@pytest.mark.ranks(1, isolated=True, env={"COLOUR": "red"}, dtypes=["bool", "int8"], slow=True, way="stop")
@pytest.mark.parametrize("value", [{"a": 1}])
def test_gets_its_arguments(value, dtype, way, tmp_path):
    assert value == {"a": 1} and tmp_path.is_dir()
    assert (os.environ["COLOUR"], way) == ("green", "") or (way, dtype) == ("stop", "bool")

@pytest.mark.ranks(2, isolated=True)
def test_waits():
    wait_for_ever()
"""


def _pytest(folder, *arguments):
    (folder / "test_bodies.py").write_text(BODIES)
    plugins = ("-p", "harness.plugin", "-p", "no:cacheprovider")
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-rA", "--tb=short", *plugins, *arguments, "test_bodies.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TEST_FOLDER), *map(os.path.abspath, sys.path)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder and the report of one pytest session over BODIES."""
    folder = tmp_path_factory.mktemp("bodies")
    report, _ = _pytest(folder, "-k", "not waits").communicate(timeout=120)
    return folder, report


@pytest.fixture
def section(run, request):
    """The part of the report that is about the failure of one test."""
    parts = re.split(r"^_{3,} (\S+) _{3,}$", run[1], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_a_failing_rank_is_reported_by_number(section):
    report = section["test_fails[3ranks]"]
    assert "1 of 3 ranks did not pass" in report
    assert "rank 1: Traceback" in report and "assert 1 != 1" in report
    assert "passed on rank 0, 2" in report
    assert "this is 1" in report


def test_numbers_of_ranks_are_marked(run):
    for mark, size in (("slow", "1rank"), ("fast", "2ranks")):
        listed, _ = _pytest(run[0], "--collect-only", "-q", "-k", "skips", "-m", mark).communicate(timeout=60)
        assert re.findall(r"test_skips\[\w+\]", listed) == [f"test_skips[{size}]"], listed


def test_a_hanging_body_ends_at_its_deadline_with_its_stacks(run, section):
    report = section["test_hangs[2ranks]"]
    assert "rank 0: hung" in report and "in wait_for_ever" in report
    assert "passed on rank 1" in report
    assert processes.state(int((run[0] / "pid0").read_text())) == "gone"


def test_a_killed_rank_is_reported_with_its_signal(section):
    report = section["test_is_killed[2ranks]"]
    assert "rank 1: died; its process ended during the test, first" in report
    assert re.search(r"SIGKILL|signal 9|SIGNAL: 9", report)


@pytest.mark.parametrize("size", ["1rank", "2ranks"])
def test_a_skip_on_all_ranks_is_a_skip(run, size):
    assert f"test_skips[{size}]" not in re.findall(r"^(?:FAILED|ERROR|PASSED).*::(\S+)", run[1], re.MULTILINE)
    assert re.search(r"^SKIPPED .*not on a Monday", run[1], re.MULTILINE)


def test_a_skip_on_one_rank_is_a_failure(section):
    assert "rank 1: skipped; not on this rank" in section["test_skips_on_one_rank[2ranks]"]


def test_a_fixture_is_refused_by_name(section):
    assert "not monkeypatch" in section["test_wants_a_fixture[1rank]"]


def test_an_argument_that_cannot_be_sent_is_named(run):
    assert re.search(r"the arguments \['value'\] cannot be sent to the ranks", run[1])


def test_arguments_and_environment_reach_the_ranks_of_each_way(run):
    found = re.findall(r"^(PASSED|FAILED) .*test_gets_its_arguments\[(\S+)-value0\]", run[1], re.MULTILINE)
    passed = ["1rank-int8", "2ranks-int8", "stop-1rank-bool"]
    assert sorted(found) == sorted([("FAILED", "stop-1rank-int8"), *(("PASSED", way) for way in passed)])


def test_the_ranks_do_not_outlive_pytest(tmp_path):
    session = _pytest(tmp_path, "-k", "waits")
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    _wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    session.send_signal(signal.SIGKILL)
    session.communicate()
    _wait_until(lambda: all(processes.state(int(file.read_text())) == "gone" for file in files))


_served = []


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_job_serves_test_after_test(part):
    _served.append(part)
    assert _served == list(range(part + 1))


_worlds = []


@pytest.mark.ranks(2, initialised=False)
def test_a_body_that_calls_init_finds_nothing_initialised():
    assert not hvd.is_initialized()
    hvd.init(cache_capacity=3)  # and leaves it at that
    _worlds.append("own")


@pytest.mark.ranks(2)
def test_the_next_body_of_the_same_job_has_the_defaults_again():
    _worlds.append("default")
    with pytest.raises(hvd.RingtrainError, match="with another cache_capacity"):
        hvd.init(cache_capacity=3)


@pytest.mark.ranks(2, env={"RINGTRAIN_CACHE_CAPACITY": "7"})
def test_options_are_set_before_another_init_of_the_same_job():
    assert _worlds == ["own", "default"]
    hvd.init(cache_capacity=7)  # does nothing, since it is
    with pytest.raises(hvd.RingtrainError, match="with another cache_capacity"):
        hvd.init(cache_capacity=3)


def test_examples_run_in_ranks_that_stay_until_one_fails():
    with ExampleRanks("") as examples:
        for _ in range(2):
            assert examples.run(2, "process_sets.py").count("in a set of") == 2
        first = examples._jobs[2]
        with pytest.raises(pytest.fail.Exception, match="Two process sets need two ranks or more"):
            examples.run(1, "process_sets.py")
        assert examples.run(2, "process_sets.py").count("in a set of") == 2
        assert list(examples._jobs) == [2] and examples._jobs[2] is first


forks = forks_of("json")

FORKED = """
import os, sys, time
print(sys.argv[1:], os.environ["COLOUR"], "json" in sys.modules, flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(3)
"""


def test_forked_processes_are_those_that_python_would_have_been_started_for(forks, tmp_path):
    script, environment = tmp_path / "forked.py", {**os.environ, "COLOUR": "green"}
    script.write_text(FORKED)
    for number, words in enumerate((["-c", FORKED], [str(script)])):
        lives = forks.start([*words, "1000"], environment, tmp_path / f"lives{number}")
        ends = forks.start([*words, "0"], environment, tmp_path / f"ends{number}")
        assert (ends.ends(60), ends.returncode) == ("['0'] green True\n", 3)
        lives.wait_for("green", 60)
        assert lives.poll() is None
        lives.send_signal(signal.SIGKILL)
        assert lives.wait() == lives.poll() == -signal.SIGKILL
    wrong = forks.start(["-c", "raise ValueError('blue')"], environment, tmp_path / "wrong")
    assert wrong.ends(60).endswith("ValueError: blue\n") and wrong.returncode == 1


@pytest.mark.ranks(4, hosts=(2, 2), isolated=True)
def test_simulated_hosts_share_a_network_and_no_memory():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert world.Split_type(MPI.COMM_TYPE_SHARED).size == 2
    assert len(set(world.allgather(socket.gethostname()))) == 2
    sent = np.ones(1 << 20, np.float32)
    received = np.empty_like(sent)
    before = _bytes_sent()
    # no rank counts before all have counted, none ends before all have reduced
    world.Barrier()
    world.Allreduce(sent, received)
    world.Barrier()
    assert _bytes_sent() - before >= sent.nbytes / 2


@pytest.fixture
def network():
    """Skips where hosts cannot be simulated."""
    with hosts_or_skip(1):
        pass


def test_simulated_hosts_know_each_other_and_vanish(network):
    with simulated_hosts(2, rate="1gbit") as hosts:
        script = "import socket, sys; print(socket.gethostname(), socket.gethostbyname(sys.argv[1]))"
        command = hosts.command_on(1, [sys.executable, "-c", script, hosts.names[0]])
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert answer.split() == [hosts.names[1], "10.99.0.1"]
        assert hosts.bytes_sent(0) >= 0
    assert not any(Path(folder, name).exists() for folder in ("/run/netns", "/etc/netns") for name in hosts.names)


def test_hosts_of_a_killed_process_are_removed(network):
    dead = subprocess.Popen(["true"])
    dead.wait()
    stale = f"ringtrain{dead.pid}-1-host0"
    subprocess.run(["ip", "netns", "add", stale], check=True)
    with simulated_hosts(1):
        assert not Path("/run/netns", stale).exists()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_data_are_exact_in_every_order(op, dtype):
    combine = {"average": np.add, "sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[op]
    arrays = data_of_ranks(MAX_RANKS, (1000,), dtype, seed=1, op=op)
    expected = reference("sum" if op == "average" else op, arrays)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(MAX_RANKS)
        partial = arrays[order[0]]
        for rank in order[1:]:
            partial = combine(partial, arrays[rank])
        require_equal(partial, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_an_average_is_exact_by_division_and_by_multiplication(size, dtype):
    arrays = data_of_ranks(size, (1000,), dtype, op="average")
    total = sum(array.astype(np.float32) for array in arrays)
    for average in (total / np.float32(size), total * np.float32(1 / size)):
        require_equal(average.astype(dtype), reference("average", arrays))


def test_data_refuse_more_ranks_than_they_are_exact_for():
    with pytest.raises(ValueError, match=f"exact for {MAX_RANKS} ranks only"):
        data(MAX_RANKS, (1,), np.float32)


def test_a_difference_is_shown_where_it_begins():
    with pytest.raises(AssertionError, match=r"1 of 4 elements differ, the first at \[1, 0\]: 5.0 instead of 0.0"):
        require_equal(np.array([[0.0, 0], [5, 0]]), np.zeros((2, 2)))
    with pytest.raises(AssertionError, match=r"float32\[2\] instead of float64\[2\]"):
        require_equal(np.zeros(2, np.float32), np.zeros(2))


def _bytes_sent():
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def _wait_until(condition, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the wait failed"
        time.sleep(0.05)


def test_collecting_the_tests_imports_no_framework(pytestconfig):
    """Each process that runs tests collects all of them: it would take 5 s of CPU time more."""
    assert pytestconfig.stash[IMPORTED_BY_COLLECTION] == []


def test_each_test_of_slow_txt_exists():
    for name in (TEST_FOLDER / "slow.txt").read_text().split():
        file, _, function = name.partition("::")
        assert f"\ndef {function}(" in (TEST_FOLDER.parent / file).read_text(), name
