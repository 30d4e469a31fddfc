"""The flight recorder: what each rank writes down when something goes wrong, and what the comparison says of it."""

import json
import os
import signal
import time

import numpy as np
import pytest

import ringtrain as hvd
import ringtrain._core as _core
from ringtrain import flight


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
    assert f"but not by rank {last}." in difference and f"Of rank {last} there is no file" in difference


@pytest.mark.ranks(2, isolated=True)
def test_a_rank_that_hears_of_a_failure_when_it_submits_writes_it_down_too(tmp_path):
    hvd.init(flight_dir=str(tmp_path))
    never = hvd.allreduce_async(np.ones(4), name=f"of rank {hvd.rank()} alone")
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


def test_what_an_earlier_job_has_left_is_not_compared(tmp_path, capsys):
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
