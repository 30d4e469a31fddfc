"""Ranks that die, stop, raise or leave, by real signals: the others get a typed error in bounded time, and nothing is
left behind."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from harness.compiling import DoubleUnavailable, run_compiler
from harness.faults import describe, processes_of, require_clean_end, require_error, run, start, victim
from harness.rooms import TEST_FOLDER
from measure.faults import trial
from measure.faults.injection import exhausts_memory, exits, interrupt, kill, raises, stop, vanishes
from measure.faults.trial import leftovers

import ringtrain as hvd
from ringtrain import _core

LATE = Path(__file__).resolve().parent / "late" / "late.cc"
GONE = "is gone: its process was killed or exited early"
SILENT = r" has not answered rank \d for \d s: its process is stopped"
RING = {"allreduce_algorithm": "ring"}
SHORT_STALL = {"stall_warning_time_s": 0.3, "stall_shutdown_time_s": 1}
BY_SOCKETS = {"network": "sockets", "shared_memory": "off"}
SHORT_START = {"start_timeout_s": 2}


@pytest.mark.ranks(2, timeout=60)
def test_a_wait_ends_in_time_while_another_rank_is_stopped_in_the_middle_of_a_round():
    """A barrier is nothing but a round, and one with a new name has three exchanges: a stop falls into each of them."""
    pids = hvd.allgather_object(os.getpid())
    longest = 0.0
    for trial_number in range(8):
        stopping = threading.Timer(0.01 + 0.0017 * trial_number, os.kill, (pids[1], signal.SIGSTOP))
        going_on = threading.Timer(0.5, os.kill, (pids[1], signal.SIGCONT))
        if hvd.rank() == 0:
            stopping.start()
            going_on.start()
        for step in range(1000):
            operation = _core.Operation(_core.OpKind.BARRIER, f"trial {trial_number} step {step}")
            handle = _core.submit(operation, [], [], is_awaited=True)
            is_done = False
            while not is_done:
                begin = time.monotonic()
                is_done = _core.wait(handle, 0.05)
                longest = max(longest, time.monotonic() - begin)
        if hvd.rank() == 0:
            going_on.join()
    assert hvd.rank() == 1 or longest < 0.4, longest


@pytest.mark.parametrize(("phase", "ranks"), [("idle", 3), ("negotiate", 3), *(("reduce", n) for n in (2, 3, 4))])
def test_a_killed_rank_is_named_by_all_others(phase, ranks):
    outcome = run(kill(rank=1).during(phase), ranks)
    require_error(outcome, hvd.PeerLostError, victim(outcome), GONE)
    require_clean_end(outcome)


@pytest.mark.parametrize(
    ("phase", "options"),
    [("reduce in place", {}), ("step", {}), ("reduce", RING), ("scatter", {}), ("scatter", RING)],
)
def test_a_rank_is_killed_in_other_kinds_of_reductions(phase, options):
    outcome = run(kill(rank=0).during(phase), **options)
    require_error(outcome, hvd.PeerLostError, victim(outcome), GONE)
    require_clean_end(outcome)


@pytest.mark.parametrize("phase", ["call", pytest.param("call without a name", marks=pytest.mark.slow)])
def test_a_rank_is_killed_while_small_values_travel_between_sockets(phase):
    outcome = run(kill(rank=1).during(phase), **BY_SOCKETS)
    require_error(outcome, hvd.PeerLostError, victim(outcome), GONE)
    require_clean_end(outcome)


def test_a_rank_is_stopped_while_small_values_travel_between_sockets():
    outcome = run(stop(rank=1).during("call"), **BY_SOCKETS, **SHORT_STALL)
    require_error(outcome, hvd.StalledError, victim(outcome) + SILENT, limit_s=3.5)
    require_clean_end(outcome)


@pytest.mark.parametrize(
    ("network", "phase"), [("sockets", "idle"), ("sockets", "reduce"), ("mpi", "negotiate"), ("mpi", "reduce")]
)
def test_a_stopped_rank_is_named_by_ranks_that_share_no_memory(phase, network):
    outcome = run(stop(rank=2).during(phase), 4, network=network, shared_memory="off", **SHORT_STALL)
    require_error(outcome, hvd.StalledError, victim(outcome) + SILENT, limit_s=3.5)
    require_clean_end(outcome)


PAUSED = """
import os, signal, threading
import numpy as np
import ringtrain as hvd

hvd.init(network="sockets", shared_memory="off", stall_warning_time_s=1.5)
pids = hvd.allgather_object(os.getpid())
for _ in range(2):
    if hvd.rank() == 0:
        threading.Timer(5, os.kill, (pids[2], signal.SIGCONT)).start()
        os.kill(pids[2], signal.SIGSTOP)
    assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [4, 4, 4]
"""


def test_a_rank_is_named_each_time_it_stops_and_others_never(tmp_path):
    job = start(PAUSED, 4, tmp_path)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0, output
    # Not from the time of a question of the stop before, which is 5 s or more.
    named = re.findall(r"rank (\d+) \(host [\w-]+, pid \d+\) has not answered rank (\d+) for [1-4] s", output)
    assert named.count(("2", "0")) == 2, output
    assert {rank for rank, _ in named} == {"2"}, output


@pytest.mark.ranks(3, hosts=(1, 1, 1), rate="100mbit", isolated=True, timeout=60)
def test_ranks_in_a_long_operation_answer_another_rank():
    """Eight seconds of a stream that never pauses, while rank 0 waits for these ranks."""
    hvd.init(stall_shutdown_time_s=2.5)
    pair = hvd.add_process_set([1, 2])
    hvd.barrier()
    begin = time.monotonic()
    if hvd.rank() > 0:
        assert (hvd.allreduce(np.ones(25_000_000, np.float32), op=hvd.Sum, process_set=pair) == 2).all()
        assert time.monotonic() - begin > 5
    else:
        with pytest.raises(hvd.StalledError, match="ranks 1-2 did not: rank 1 is in test_ranks_in_a_long_operation"):
            hvd.allreduce(np.ones(1), name="of rank 0 alone")
        assert time.monotonic() - begin < 5
        time.sleep(4)  # else the next one waits too long for the others
    assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="after").tolist() == [3]


@pytest.mark.parametrize(("rank", "phase"), [(2, "reduce"), (3, "reduce"), (3, "call")])
def test_a_stopped_rank_is_named_on_all_hosts(rank, phase):
    """Ranks of its own host read in /proc that it is stopped; another host only finds that it does not answer."""
    outcome = run(stop(rank).during(phase), hosts=(2, 2), **SHORT_STALL)
    require_error(outcome, hvd.StalledError, f"{victim(outcome)}({SILENT}| is stopped)", limit_s=5)
    require_clean_end(outcome)


@pytest.mark.parametrize("phase", ["idle", pytest.param("negotiate", marks=pytest.mark.slow), "call", "reduce"])
def test_a_killed_rank_is_named_on_all_hosts(phase):
    outcome = run(kill(rank=1).during(phase), hosts=(2, 2))
    require_error(outcome, hvd.PeerLostError, victim(outcome), GONE)
    require_clean_end(outcome)


def test_a_lane_between_hosts_is_killed_in_the_middle_of_a_stream():
    outcome = run(kill(rank=1).together_with(3).during("reduce float16"), hosts=(2, 2), rate="1gbit")
    require_error(outcome, hvd.PeerLostError, "is gone|process failed")
    require_clean_end(outcome)


def test_half_of_a_ring_is_killed_in_the_middle_of_a_stream():
    outcome = run(kill(rank=1).together_with(2).during("reduce"), hosts=(1, 1, 1, 1), rate="1gbit")
    require_error(outcome, hvd.PeerLostError, "is gone|process failed")
    require_clean_end(outcome)


@pytest.mark.parametrize("phase", ["negotiate", "reduce"])
def test_an_exception_reaches_all_others_with_its_traceback(phase):
    outcome = run(raises(rank=0).during(phase))
    require_error(
        outcome, hvd.RemoteError, victim(outcome) + " raised InjectedError: told to fail", "line .* in strike"
    )
    require_clean_end(outcome)


def test_an_exception_reaches_all_other_hosts():
    outcome = run(raises(rank=3).during("reduce"), hosts=(2, 2))
    require_error(
        outcome, hvd.RemoteError, victim(outcome) + " raised InjectedError: told to fail", "line .* in strike"
    )
    require_clean_end(outcome)


def test_a_rank_without_memory_says_so():
    outcome = run(exhausts_memory(rank=1).at_step(3))
    require_error(outcome, hvd.RemoteError, victim(outcome) + " raised MemoryError: Unable to allocate")
    require_clean_end(outcome)


def test_ctrl_c_on_one_rank_ends_the_others():
    outcome = run(interrupt(rank=1).during("negotiate"))
    require_error(outcome, hvd.RemoteError, victim(outcome) + " raised KeyboardInterrupt")
    require_clean_end(outcome)


def test_a_rank_that_exits_early_is_named():
    outcome = run(exits(rank=1).at_step(3))
    require_error(outcome, hvd.ShutDownError, victim(outcome) + " exited early")
    require_clean_end(outcome)


LEAVES = """
import sys, time
import numpy as np
import ringtrain as hvd

hvd.init(**eval(sys.argv[2]))
rank = hvd.rank()
pair, others = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])
hvd.barrier()
if rank == 2:
    sys.exit(0)

def fails(process_set, leaver):
    for name in ("the first", "another one"):
        try:
            hvd.allreduce(np.ones(3), op=hvd.Sum, name=name, process_set=process_set)
            raise SystemExit(f"rank {rank}: an operation of ranks that have left is done")
        except hvd.ShutDownError as error:
            assert f"rank {leaver} " in str(error) and "exited early" in str(error), error

fails(hvd.global_process_set, 2)
if rank == 1:
    fails(others, 2)
for count in (1, 5, 300_000):
    for step in range(40):
        values = np.full(count, float(step + rank))
        assert (hvd.allreduce(values, op=hvd.Sum, name=f"of {count}", process_set=pair) == 2 * step + 1).all()
print(f"rank {rank} is done")
if rank == 0:
    fails(pair, 1)
    print("rank 0 was told")
"""


@pytest.mark.parametrize(
    "options", [{}, BY_SOCKETS, {"shared_memory": "off"}], ids=["shared memory", "sockets", "no shared memory"]
)
def test_process_sets_go_on_without_ranks_that_have_left_and_are_not_theirs(options, tmp_path):
    job = start(LEAVES, 3, tmp_path, repr(options))
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0, output
    for line in ("rank 0 is done", "rank 1 is done", "rank 0 was told"):
        assert line in output, output


@pytest.mark.parametrize("ranks", [2, 3])  # with 2, Open MPI's launcher is gone before the other rank says anything
def test_a_rank_that_ends_without_a_word_is_named(ranks):
    outcome = run(vanishes(rank=ranks - 1).during("negotiate"), ranks)
    require_error(outcome, hvd.PeerLostError, victim(outcome), GONE)
    require_clean_end(outcome)


def test_a_stopped_rank_ends_the_wait_with_a_stalled_error():
    outcome = run(stop(rank=2).at_step(3), **SHORT_STALL)
    stopped = victim(outcome) + r' is stopped, .*; pending here: allreduce "stream" \(at .*rank.py:\d+\)'
    require_error(outcome, hvd.StalledError, stopped, limit_s=3)
    assert "ringtrain warning: waiting for other ranks" in outcome.output
    require_clean_end(outcome)


def require_loss_reported_by_all(outcome):
    """Each rank that the launcher has not ended got a typed error."""
    assert outcome.struck_at is not None, describe(outcome)
    assert outcome.silent() == [] or trial.ends_all(outcome.injection.kind), describe(outcome)
    for report in outcome.reports.values():
        assert report.error in ("PeerLostError", "StalledError"), describe(outcome)
        assert outcome.slowest_s() < 5
    require_clean_end(outcome)


@pytest.mark.parametrize("phase", ["connect", "share"])
def test_a_rank_is_killed_in_init(phase):
    require_loss_reported_by_all(run(kill(rank=1).during(phase, after_s=0), **SHORT_START))


# Open MPI's launcher ends as soon as a rank exits with an error, and leaves the others alone; Hydra waits for them.
@pytest.mark.parametrize(("phase", "ranks"), [("connect", 2), ("share", 3)])
def test_init_ends_with_the_launcher(phase, ranks):
    require_loss_reported_by_all(run(vanishes(rank=1).during(phase, after_s=0), ranks, **SHORT_START))


def test_a_rank_that_is_stopped_in_init_ends_it_for_the_others():
    outcome = run(stop(rank=1).during("connect", after_s=0), **SHORT_START)
    require_error(outcome, hvd.StalledError, r"start_timeout_s", limit_s=5)
    require_clean_end(outcome)


def test_a_rank_that_never_calls_init_ends_the_job():
    outcome = run(stop(rank=1).during("start", after_s=0), **SHORT_START)
    assert "MPI_Init has not ended in 2 s (start_timeout_s)" in outcome.output, describe(outcome)
    require_clean_end(outcome)


def test_a_rank_is_killed_while_the_others_shut_down():
    outcome = run(kill(rank=1).during("shutdown"))
    assert outcome.struck_at is not None, describe(outcome)
    assert outcome.silent() == [] or trial.ends_all("kill"), describe(outcome)
    for report in outcome.reports.values():  # shutdown() does not raise
        assert (report.error, report.again) in (("", ""), ("PeerLostError", "")), describe(outcome)
        assert outcome.slowest_s() < 2, describe(outcome)
    assert outcome.orphans == [] and outcome.leftovers == [], describe(outcome)


def test_a_rank_is_stopped_while_the_others_shut_down():
    outcome = run(stop(rank=0).during("shutdown"), **SHORT_STALL)
    assert outcome.silent() == [] and outcome.slowest_s() < 3, describe(outcome)
    require_clean_end(outcome)


PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import ringtrain as hvd

folder = Path(sys.argv[1])
"""


@pytest.mark.parametrize("what", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_to_the_launcher_ends_all_ranks(what, tmp_path):
    program = """
hvd.init()
while True:
    hvd.allreduce(np.ones(1000), name="busy")
    (folder / f"rank{hvd.rank()}").touch()
"""
    launcher = start(PROGRAM + program, 3, tmp_path)
    _wait_for(lambda: len(list(tmp_path.glob("rank*"))) == 3)
    launcher.send_signal(what)
    assert launcher.wait(10) != 0
    _wait_for(lambda: not processes_of(str(tmp_path)))
    assert leftovers() == []


def test_ctrl_c_ends_the_wait_for_a_rank_that_was_stopped_at_any_moment(tmp_path):
    program = """
hvd.init()
what, when = [(signal.SIGINT, 1.0), (signal.SIGSTOP, 0.3)][hvd.rank()]
threading.Timer(when, os.kill, (os.getpid(), what)).start()
begin = time.monotonic()
try:
    while True:
        hvd.allreduce_(np.ones(4), name="small")
except KeyboardInterrupt:
    print(f"interrupted after {time.monotonic() - begin:.1f} s", flush=True)
    raise
"""
    output, status = finish(start(PROGRAM + program, 2, tmp_path))
    seconds = re.search(r"interrupted after ([0-9.]+) s", output)
    assert seconds and float(seconds[1]) < 4 and status != 0, output


def test_a_rank_that_does_not_come_to_init_is_warned_of_and_named_by_all(tmp_path):
    program = """
from mpi4py import MPI
from ringtrain.job.rendezvous import server
server.WARNS_AFTER_S = 0.3
if MPI.COMM_WORLD.Get_rank() == 2:
    time.sleep(60)
try:
    hvd.init(start_timeout_s=1)
except hvd.StalledError as error:
    (folder / f"rank{MPI.COMM_WORLD.Get_rank()}").write_text(str(error))
    raise
"""
    output, status = finish(start(PROGRAM + program, 3, tmp_path))
    texts = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
    assert set(texts) == {"rank0", "rank1"} and status != 0, output
    assert all(text.endswith("(start_timeout_s) for all ranks: rank 2 did not come") for text in texts.values()), texts
    # Rank 1 may be late, too.
    warnings = re.findall(
        r"init\(\) has waited 0.3 s for ranks? (?:1-)?2, which ha(?:s|ve) not called init\(\)", output
    )
    assert len(warnings) == 1, output


def test_a_rank_that_waits_in_mpi_init_warns(tmp_path):
    """There the other ranks cannot be told apart."""
    program = """
from ringtrain.job.rendezvous import server
server.WARNS_AFTER_S = 0.5
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    time.sleep(60)
hvd.init(start_timeout_s=3)
"""
    output, status = finish(start(PROGRAM + program, 2, tmp_path))
    assert "[0] ringtrain: init() has waited 0.5 s in MPI_Init for all ranks to call it. Has the script ended" in output
    assert "[1] ringtrain: init() has waited" not in output
    assert "MPI_Init has not ended in 3 s (start_timeout_s): some rank has not called init()" in output and status != 0


def test_a_long_traceback_loses_its_middle(tmp_path):
    program = """
hvd.init()
def recur(depth):
    if depth == 0:
        raise ValueError("ä" * 30_000 + " the end")
    recur(depth - 1)
if hvd.rank() == 1:
    recur(3)
try:
    hvd.allreduce(np.ones(4), name="x")
except hvd.RemoteError as error:
    (folder / "rank0").write_text(str(error))
"""
    output, _ = finish(start(PROGRAM + program, 2, tmp_path))
    text = (tmp_path / "rank0").read_text()
    assert 8000 < len(text.encode()) < 8192, output
    assert re.match(r"rank 1 .* raised ValueError: ää", text) and " KB cut " in text and text.endswith(" the end"), text


def test_a_hook_for_exceptions_is_called_after_ours_and_is_back_after_shutdown(tmp_path):
    program = """
sys.excepthook = mine = lambda *what: print("mine", flush=True)
hvd.init()
assert sys.excepthook is not mine
hvd.shutdown()
assert sys.excepthook is mine
hvd.init()
if hvd.rank() == 1:
    raise ValueError
try:
    hvd.allreduce(np.ones(4), name="x")
except hvd.RemoteError:
    print("told", flush=True)
"""
    output, status = finish(start(PROGRAM + program, 2, tmp_path))
    assert output.count("mine") == output.count("told") == 1 and status != 0, output


def test_the_failure_of_another_rank_is_not_announced_again(tmp_path):
    program = """
hvd.init()
if hvd.rank() == 0:
    raise ValueError("the first")
try:
    hvd.allreduce(np.ones(4), name="x")
except hvd.RemoteError as error:
    if hvd.rank() == 2:
        raise KeyError("the second") from error
    time.sleep(0.5)
    try:
        hvd.allreduce(np.ones(4), name="y")
    except hvd.RemoteError as later:
        (folder / "later").write_text(str(later))
"""
    output, _ = finish(start(PROGRAM + program, 3, tmp_path))
    later = (tmp_path / "later").read_text()
    assert later.startswith("rank 0 ") and "the second" not in later, output


def test_a_script_may_end_while_daemon_threads_are_inside_operations(tmp_path):
    program = """
hvd.init()
def work(number):
    while True:
        hvd.allreduce(np.ones(50_000, np.float32), name=f"of thread {number}")
for number in range(8):
    threading.Thread(target=work, args=(number,), daemon=True).start()
time.sleep(0.3)
"""
    for _ in range(3):
        output, status = finish(start(PROGRAM + program, 2, tmp_path))
        assert status == 0 and "terminate called" not in output, output


def call_late(tmp_path, *calls):
    """Returns the output of threads that call the core after its static objects were destroyed: see late.cc.

    glibc fills memory that is freed, so a destroyed object shows.
    """
    library = tmp_path / "late.so"
    try:
        run_compiler(["-std=c++17", "-shared", "-fPIC", "-pthread", str(LATE), "-ldl", "-o", str(library)])
    except DoubleUnavailable as error:
        pytest.skip(str(error))
    program = [
        f"import ctypes\nlate = ctypes.CDLL({str(library)!r})",
        "import ringtrain as hvd\nfrom ringtrain import _core\nhvd.init()",
        *calls,
    ]
    environment = {**os.environ, "MALLOC_PERTURB_": "85"}
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(program)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_thread_of_another_library_may_call_until_the_process_has_ended(tmp_path):
    said = call_late(
        tmp_path,
        "_core.carry_collectives_of_xla(hvd.rank(), hvd.size())",
        "late.ask_at_the_end(_core.__file__.encode())",
    )
    assert said.startswith("size 1: ringtrain.NotInitializedError: "), said


def test_mxnet_may_begin_an_operation_until_the_process_has_ended(tmp_path):
    said = call_late(
        tmp_path,
        """
names = "MXEnginePushAsyncND", "MXShallowCopyNDArray", "MXNDArrayFree", "MXNDArrayToDLPack", "MXGetLastError"
_core.use_mxnet({name: ctypes.cast(getattr(late, name), ctypes.c_void_p).value for name in names})
number = ctypes.c_float(1)
operation = _core.Operation(_core.OpKind.ALLREDUCE, "late")
_core.mxnet_push(operation, [], [ctypes.addressof(number)], 0, _core.Site("x.py:1"))
""",
    )
    assert said.startswith("completed: ") and "Error: " in said, said


def test_a_forked_child_ends_with_its_own_exit_code(tmp_path):
    program = """
hvd.init()
child = os.fork()
if child == 0:
    sys.exit(7)
deadline = time.monotonic() + 10
while not (ended := os.waitpid(child, os.WNOHANG))[0]:
    if time.monotonic() > deadline:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        sys.exit("the child does not end")
    time.sleep(0.02)
assert os.waitstatus_to_exitcode(ended[1]) == 7
hvd.allreduce(np.ones(4), name="after the fork")
"""
    output, status = finish(start(PROGRAM + program, 2, tmp_path))
    assert status == 0, output


def test_a_forked_child_of_a_script_that_imports_mpi4py_is_ended_with_a_message(tmp_path):
    program = """
from mpi4py import MPI
hvd.init()
child = os.fork()
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (1, 7)  # some MPIs end
hvd.allreduce(np.ones(4), name="after the fork")
"""
    output, status = finish(start(PROGRAM + program, 2, tmp_path))
    assert status == 0, output


def test_ranks_that_cannot_look_into_each_other_share_memory_by_name(tmp_path):
    program = """
from ringtrain import _core
init = _core.init
_core.init = lambda rank, names, *others, **more: init(rank, [(host, 1) for host, _ in names], *others, **more)
hvd.init()
hvd.allreduce(hvd.empty(1000), name="x")
names = [line.split()[-2] for line in open("/proc/self/maps") if "/dev/shm/" in line]
print("by name" if any("ringtrain-" in name for name in names) else "otherwise", flush=True)
"""
    output, status = finish(start(PROGRAM + program, 2, tmp_path))
    assert status == 0 and "by name" in output and "warning" not in output, output
    assert leftovers() == []


def test_shared_memory_that_a_killed_job_left_is_removed(tmp_path):
    old, young = (Path(f"/dev/shm/ringtrain-{name}{os.getpid()}-node-0") for name in ("old", "young"))
    try:
        for path in (old, young):
            path.write_bytes(bytes(4096))
        os.utime(old, (time.time() - 3600,) * 2)
        finish(start(PROGRAM + "hvd.init()", 2, tmp_path))
        assert not old.exists() and young.exists()
    finally:
        for path in (old, young):
            path.unlink(missing_ok=True)


@pytest.mark.slow
def test_a_short_soak_of_random_faults_shows_no_hang():
    command = [sys.executable, "-m", "measure", "faults", "--count", "6", "--max-ranks", "3", "--seed", "3"]
    result = subprocess.run(command, cwd=TEST_FOLDER, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 hung, 0 orphans, 0 leftovers, 0 unexpected" in result.stdout


def finish(launcher, timeout_s=30):
    output, _ = launcher.communicate(timeout=timeout_s)
    return output, launcher.returncode


def _wait_for(is_so, seconds=10):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
