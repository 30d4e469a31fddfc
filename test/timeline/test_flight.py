"""The flight recorder: what each rank writes down when something goes wrong, and what the comparison says of it."""

import contextlib
import ctypes
import json
import os
import signal
import sys
import tempfile
import threading
import time

import numpy as np
import pytest

import ringtrain as hvd
import ringtrain._core as _core
from ringtrain import flight
from ringtrain.errors import list_of_ranks
from ringtrain.record import flight_recorder


def written(folder, rank):
    return json.loads((folder / f"rank-{rank}.json").read_text())


def wait_for(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


@pytest.mark.ranks(2, 3, initialised=False)
def test_a_stall_is_written_down_with_the_lines_that_submitted(tmp_path):
    hvd.init(stall_warning_time_s=0.3, stall_shutdown_time_s=0.6, flight_dir=str(tmp_path))
    for _ in range(3):
        hvd.allreduce(np.ones(4), name="done")
    rank, last = hvd.rank(), hvd.size() - 1
    if rank != last:
        with pytest.raises(hvd.StalledError, match=rf"\(at .*test_flight.py:\d+\), rank {last} did not"):
            hvd.allreduce(np.ones(4), name="slow")
        content = written(tmp_path, rank)
        assert content["rank"] == rank and content["pid"] == os.getpid()
        assert content["reason"].startswith('StalledError: allreduce "slow"')
        *before, slow = content["operations"]
        assert [one["name"] for one in before[-3:]] == ["done"] * 3
        assert all(one["group"] == "shm" and not one["error"] for one in before[-3:])
        times = [before[-1][key] for key in ("submitted_s", "announced_s", "agreed_s", "begun_s", "ended_s")]
        assert times == sorted(times) and times[0] > 0
        assert (slow["name"], slow["error"], slow["tensors"]) == ("slow", "StalledError", ["float64[4]"])
        assert "test_flight.py:" in slow["site"]
    else:
        time.sleep(0.8)
    hvd.barrier()
    difference = flight.first_difference(flight.read_folder(tmp_path))
    assert difference.startswith('allreduce "slow" (allreduce Average float64[4]) was submitted by rank ')
    assert f"but not by rank {last}. Rank {last} was in test_a_stall_is_written_down" in difference


def load_next_batch(how):
    end = time.monotonic() + 2.5
    if how == "keeps the GIL":
        ctypes.PyDLL(None).usleep(2_500_000)
    elif how == "computes":
        while time.monotonic() < end:
            pass
    else:
        time.sleep(2.5)


@pytest.mark.ranks(2, initialised=False)
@pytest.mark.parametrize("how", ["sleeps", "computes", "keeps the GIL"])
def test_a_stuck_rank_is_named_with_the_line_where_it_is(tmp_path, how):
    hvd.init(stall_warning_time_s=0.5, stall_shutdown_time_s=2, flight_dir=str(tmp_path))
    rank, keeps_gil = hvd.rank(), how == "keeps the GIL"
    thread = threading.Thread(target=time.sleep, args=(2.5,), name="reader of rank 1")
    if rank == 1:
        thread.start()
        load_next_batch(how)
    else:
        end = r", where it keeps the GIL\." if keeps_gil else r"\."
        with pytest.raises(hvd.StalledError, match=rf"did not: it is in load_next_batch\(\) at .*py:\d+{end}"):
            hvd.allreduce(np.ones(4), name=f"while it {how}")
        if keeps_gil:
            reason, *stacks = (tmp_path / "rank-1.stacks").read_text().splitlines()
            assert any(line.endswith("in load_next_batch") for line in stacks)
        else:
            content = written(tmp_path, 1)
            reason = content["reason"]
            main, *others = content["threads"]
            assert main["is_main"] and main["whereabouts"].startswith("in load_next_batch() at ")
            assert "reader of rank 1" in [thread["name"] for thread in others]
        assert reason == f'stall: allreduce "while it {how}" waits for rank 1'
        assert written(tmp_path, 0)["threads"][0]["whereabouts"].startswith("in test_a_stuck_rank_is_named")
    if thread.ident is not None:
        thread.join()
    hvd.barrier()


@contextlib.contextmanager
def standard_error_in(path):
    before = os.dup(2)
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)


def warn_of_a_rank_that_comes_late(tmp_path, late):
    """The others submit one after the other what all have done before."""
    hvd.init(stall_warning_time_s=0.6, flight_dir=str(tmp_path))
    rank, said = hvd.rank(), tmp_path / f"said by {hvd.rank()}"
    for _ in range(3):
        hvd.allreduce(np.ones(4), name="slow")
    hvd.barrier()
    time.sleep(1.8 if rank == late else rank * 0.08)
    with standard_error_in(said):
        line = sys._getframe().f_lineno + 1
        hvd.allreduce(np.ones(4), name="slow")
    hvd.barrier()
    if rank == 0:
        others = list_of_ranks(one for one in range(hvd.size()) if one != late)
        (warning,) = [line for line in said.read_text().splitlines() if line.startswith("ringtrain warning: ")]
        assert f"{others} submitted it (at timeline/test_flight.py:{line})" in warning
        assert f"), rank {late} did not: it is in warn_of_a_rank_that_comes_late() at " in warning


@pytest.mark.ranks(3, initialised=False)
@pytest.mark.parametrize("late", [1, 2])
def test_a_stall_warning_names_only_the_rank_that_is_late(tmp_path, late):
    warn_of_a_rank_that_comes_late(tmp_path, late)


@pytest.mark.ranks(3, initialised=False, hosts=(1, 1, 1))
def test_a_stall_warning_over_a_network_names_only_the_rank_that_is_late(tmp_path):
    warn_of_a_rank_that_comes_late(tmp_path, 2)


@pytest.mark.ranks(4, initialised=False, hosts=(2, 2))
@pytest.mark.parametrize("late", [1, 3])
def test_a_stall_warning_on_several_hosts_names_only_the_rank_that_is_late(tmp_path, late):
    warn_of_a_rank_that_comes_late(tmp_path, late)


@pytest.mark.ranks(1, initialised=False)
def test_folders_of_earlier_jobs_are_removed_but_for_the_latest(tmp_path):
    for number in range(20):
        folder = tmp_path / f"ringtrain-flight-{number:02}"
        folder.mkdir()
        (folder / "rank-0.json").touch()
        os.utime(folder, (time.time() - 3600 + number,) * 2)
    others = [tmp_path / "ringtrain-flight-new", tmp_path / "of-another-program"]
    for folder in others:
        folder.mkdir()
    tempfile.tempdir = str(tmp_path)
    try:
        hvd.init()
        written_to = flight_recorder.write("a test").parent
        hvd.shutdown()
    finally:
        tempfile.tempdir = None
    kept = {tmp_path / f"ringtrain-flight-{number:02}" for number in range(13, 20)}
    private = tmp_path / f"ringtrain-{os.geteuid()}"  # the private folder of this user
    assert set(tmp_path.iterdir()) - {private} == {*kept, *others, written_to}


@pytest.mark.ranks(2, isolated=True)
def test_a_rank_that_hears_of_a_failure_when_it_submits_writes_it_down_too(tmp_path):
    hvd.init(flight_dir=str(tmp_path))
    never = hvd.allreduce_async(np.ones(4), name=f"of rank {hvd.rank()} alone")
    (tmp_path / f"{hvd.rank()} has submitted").touch()
    wait_for(lambda: len(list(tmp_path.glob("* has submitted"))) == 2)  # a report reaches the other rank, too
    _core.report_loss("rank 7 is gone")
    wait_for(never.poll)  # it has failed, and nobody waits for it
    assert not (tmp_path / f"rank-{hvd.rank()}.json").exists()
    for submit in (hvd.allreduce_async_, hvd.allgather_async):
        with pytest.raises(hvd.PeerLostError, match="rank 7 is gone"):
            submit(np.ones(4), name="next")
        assert written(tmp_path, hvd.rank())["reason"] == "PeerLostError: rank 7 is gone"


@pytest.mark.ranks(2, initialised=False)
def test_sigusr1_writes_what_is_done_and_what_is_pending(tmp_path):
    hvd.init(flight_dir=str(tmp_path))
    hvd.allgather(np.ones(2), name="done")
    if hvd.rank() == 0:
        pending = hvd.allreduce_async(np.ones(4), name="pending", op=hvd.Sum)
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_for(lambda: (tmp_path / "rank-0.json").exists() and (tmp_path / "rank-1.json").exists())
    content = written(tmp_path, hvd.rank())
    assert content["reason"] == "SIGUSR1"
    flights = flight.read_folder(tmp_path)
    assert [one.rank for one in flights] == [0, 1]
    assert [one["name"] for one in flights[0].pending] == ["pending"] and not flights[1].pending
    difference = flight.first_difference(flights)
    assert 'allreduce "pending"' in difference and "but not by rank 1" in difference
    assert 'The last that rank 1 did was allgather "done"' in difference
    report = "\n".join(flight.report(flights))
    assert 'waiting  allreduce "pending"' in report and 'done     allgather "done"' in report
    if hvd.rank() == 1:
        hvd.allreduce(np.ones(4), name="pending", op=hvd.Sum)
    else:
        hvd.synchronize(pending)


@pytest.mark.ranks(1, isolated=True)
def test_a_handler_of_the_script_is_left_alone():
    calls = []
    signal.signal(signal.SIGUSR1, lambda *_: calls.append(1))
    hvd.init()
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_for(lambda: calls == [1])


@pytest.mark.ranks(2)
def test_the_last_1024_operations_are_kept():
    from ringtrain import _core

    for number in range(1100):
        hvd.allreduce_(np.ones(1), name=f"number {number}")
    names = [one["name"] for one in _core.last_operations()]
    assert names == [f"number {number}" for number in range(76, 1100)]


# The comparison, of made-up flights


def operation(name, submitted=1.0, ended=0.0, error="", **more):
    return {
        "number": 1, "kind": "allreduce", "name": name, "process_set": 0, "op": "Sum", "tensors": ["float32[2]"],
        "bytes": 8, "site": f"train.py:{name}", "group": "", "error": error, "submitted_s": submitted,
        "announced_s": 0.0, "agreed_s": 0.0, "begun_s": 0.0, "ended_s": ended, **more,
    }  # fmt: skip


def flight_of(rank, *operations, ranks=(0, 1)):
    ended = [one for one in operations if one["ended_s"]]
    pending = [one for one in operations if not one["ended_s"]]
    return flight.Flight("job", 0.0, rank, "host", 100 + rank, "SIGUSR1", {0: list(ranks)}, ended, pending)


def test_ranks_that_wait_for_different_operations():
    flights = [flight_of(0, operation("a")), flight_of(1, operation("b", submitted=2.0))]
    text = flight.first_difference(flights)
    assert text.startswith('allreduce "a" (allreduce Sum float32[2]) was submitted by rank 0 at train.py:a')
    assert text.endswith('but not by rank 1. Rank 1 waited for allreduce "b" at train.py:b instead.')


def test_the_report_says_where_the_threads_of_a_missing_rank_are(tmp_path):
    late = flight_of(1, operation("a", ended=2.0))
    late.threads = [
        {"name": "MainThread", "is_main": True, "stack": ["in wait() at threading.py:1", "in load() at train.py:17"],
         "whereabouts": "in load() at train.py:17"},
        {"name": "reader", "is_main": False, "stack": ["in read() at d.py:5"], "whereabouts": "in read() at d.py:5"},
    ]  # fmt: skip
    flights = [flight_of(0, operation("b", submitted=3.0)), late]
    assert "Rank 1 was in load() at train.py:17. The last that rank 1 did" in flight.first_difference(flights)
    lines = list(flight.report(flights))
    assert "    MainThread was in load() at train.py:17, in wait() at threading.py:1" in lines
    assert "    reader was in read() at d.py:5" in lines
    (tmp_path / "rank-2.stacks").write_text('stall: allreduce "b" waits for rank 2\nThread 1:\n  File "x.py"\n')
    (tmp_path / "rank-1.stacks").write_text("stall: earlier\n")
    assert list(flight.stacks_without_gil(tmp_path, flights)) == [
        'rank 2, where a thread keeps the GIL: stall: allreduce "b" waits for rank 2',
        "    Thread 1:",
        '      File "x.py"',
    ]


def test_ranks_that_wait_for_another_shape():
    flights = [flight_of(0, operation("a")), flight_of(1, operation("a", submitted=2.0, tensors=["float32[3]"]))]
    assert flight.first_difference(flights) == (
        'allreduce "a": rank 0 submitted allreduce Sum float32[2] at train.py:a, rank 1 submitted allreduce Sum '
        "float32[3] at train.py:a."
    )


def test_ranks_that_agree():
    assert "agree" in flight.first_difference([flight_of(0, operation("a")), flight_of(1, operation("a"))])
    assert (
        flight.first_difference([flight_of(0), flight_of(1, operation("a", ended=2.0))])
        == "No rank waited for anything."
    )


def test_the_command_says_what_is_no_flight_record(tmp_path, capsys):
    assert flight.main([str(tmp_path)]) == 2
    assert "there are no files rank-*.json" in capsys.readouterr().err
    (tmp_path / "rank-0.json").write_text("{}")
    assert flight.main([str(tmp_path)]) == 2
    assert "was not written by ringtrain" in capsys.readouterr().err


def test_files_of_an_earlier_job_are_not_compared(tmp_path, capsys):
    for rank, (job, written_s) in enumerate([("new", 20.0), ("new", 21.0), ("old", 10.0)]):
        content = {
            **{"job": job, "rank": rank, "host": "h", "pid": 1, "reason": "SIGUSR1", "time_s": written_s},
            **{"monotonic_s": 0.0, "process_sets": {"0": [0, 1]}, "operations": []},
        }
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(content))
    assert flight.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "rank 1 on h" in printed and "rank 2 on h" not in printed
    assert "an earlier job wrote it: what rank 2 wrote" in printed
