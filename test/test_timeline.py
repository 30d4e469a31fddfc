"""The timeline: one file of all ranks that a viewer can open, whatever happens to the job."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest

import ringtrain as hvd
from ringtrain import timeline
from ringtrain.optim import SGD
from ringtrain.timeline import parts
from ringtrain.timeline.__main__ import main


def events_of(path):
    return json.loads(path.read_text())


def spans(events, name, rank):
    return [event for event in events if event["ph"] == "X" and event["name"] == name and event["pid"] == rank]


@pytest.mark.ranks(1, 2, 3)
def test_one_file_shows_all_ranks_on_one_clock(tmp_path):
    path = tmp_path / "timeline.json"
    hvd.start_timeline(str(path), mark_cycles=True)
    for _ in range(3):
        if hvd.rank() == hvd.size() - 1:
            time.sleep(0.05)
        hvd.allreduce(np.ones(1000, np.float32), name='a "quoted" name')
    hvd.stop_timeline()
    hvd.barrier()
    events = events_of(path)
    last = hvd.size() - 1
    for rank in range(hvd.size()):
        operations = [one for one in spans(events, "allreduce", rank) if one["args"]["name"] == 'a "quoted" name']
        assert len(operations) == 3
        assert operations[0]["args"]["bytes"] == 4000
        assert "test_timeline.py:" in operations[0]["args"]["site"]
        track = operations[0]["tid"]
        phases = [one for one in events if one["ph"] == "X" and (one["pid"], one["tid"]) == (rank, track)]
        begin, end = operations[0]["ts"], operations[0]["ts"] + operations[0]["dur"]
        within = [one for one in phases if begin - 1 <= one["ts"] and one["ts"] + one["dur"] <= end + 1]
        assert {one["name"] for one in within} >= {"allreduce", "negotiating"}
        names = [one["args"]["name"] for one in events if one["ph"] == "M" and one["pid"] == rank]
        assert names[0].startswith(f"rank {rank} on ") and 'a "quoted" name' in names
        if last > 0 and rank != last:  # waited for the last one, whose submissions have ticks that much later
            assert operations[1]["dur"] > 40_000
            waits = spans(events, "waiting", rank)
            assert sum(one["dur"] for one in waits) > 100_000
    assert any(one["name"] == "round" for one in events)
    if last:
        ticks = [one for one in events if one["ph"] == "i" and one["name"] == f"rank {last}" and one["pid"] == 0]
        first = [one for one in spans(events, "allreduce", 0) if one["args"]["name"] == 'a "quoted" name']
        own = [tick for tick in ticks if tick["tid"] == first[0]["tid"]]
        late = [tick["ts"] - one["ts"] for tick, one in zip(own, first, strict=True)]
        assert all(microseconds > 40_000 for microseconds in late[1:])
    assert not list(tmp_path.glob("*.rank-*"))


@pytest.mark.ranks(2, isolated=True)
def test_a_window_of_steps(tmp_path):
    path = tmp_path / "timeline.json"
    hvd.init(timeline_filename=str(path), timeline_steps="3-4")
    optimizer = hvd.DistributedOptimizer(SGD(lr=0.1))
    params = [np.ones(10)]
    for _ in range(6):
        optimizer.step(params, [np.ones(10)])
    events = events_of(path)
    marks = [event["name"] for event in events if event["ph"] == "i" and event["pid"] == 0 and event["tid"] == 0]
    assert marks == ["step 3", "step 4"]
    gradients = [one for one in spans(events, "allreduce", 1) if one["args"]["name"].startswith("gradients")]
    assert len(gradients) == 2


@pytest.mark.ranks(2, isolated=True)
def test_the_file_does_not_grow_beyond_its_limit(tmp_path):
    path = tmp_path / "timeline.json"
    hvd.init(timeline_filename=str(path), timeline_limit_mb=0.05)
    for _ in range(500):
        hvd.allreduce(np.ones(1), name="small")
    hvd.stop_timeline()
    hvd.barrier()
    events = events_of(path)
    assert path.stat().st_size < 400_000  # of two ranks, with ticks
    assert any("the timeline is full" in event["name"] for event in events)
    assert 20 < len(spans(events, "allreduce", 0)) < 500


@pytest.mark.ranks(2)
def test_mistakes_are_refused(tmp_path):
    hvd.start_timeline(str(tmp_path / "one.json"))
    with pytest.raises(ValueError, match="there is a timeline already"):
        hvd.start_timeline(str(tmp_path / "two.json"))
    hvd.stop_timeline()
    hvd.stop_timeline()  # there is none
    for text in ("a", "3-", "4-3", "-1"):
        with pytest.raises(ValueError, match="timeline_steps must be steps such as 100-110"):
            timeline._Window.of(text)


KILLED = """
import os, signal, sys, time
import numpy as np, ringtrain as hvd
hvd.init(timeline_filename=sys.argv[1])
begin = time.monotonic()
number = 0
while time.monotonic() < begin + 1:
    hvd.allreduce(np.ones(100), name=f"number {number % 50}")
    number += 1
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_job_has_written_is_valid(tmp_path):
    path = tmp_path / "timeline.json"
    command = [sys.executable, "-m", "ringtrain.run", "-np", "2", sys.executable, "-c", KILLED, str(path)]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode != 0
    assert len(spans(events_of(path), "allreduce", 0)) > 50
    assert len(spans(events_of(tmp_path / "timeline.json.rank-1"), "allreduce", 1)) > 50
    assert main(["merge", str(path)]) == 0
    events = events_of(path)
    assert len(spans(events, "allreduce", 1)) > 50 and any(event["name"] == "rank 1" for event in events)


def test_a_file_that_was_cut_is_read_up_to_there(tmp_path):
    whole = b'[\n{"name":"a","ph":"M"},\n{"name":"b","ph":"M"},\n{"name":"c","p'
    assert [event["name"] for event in parts.events_of(whole)] == ["a", "b"]
    assert main(["merge", str(tmp_path / "none.json")]) == 2
