"""The timeline: one file of all ranks that a viewer can open, whatever happens to the job."""

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from harness.timelines import Gradient, MadeUpJob
from measure.process import threads_that_take_signals

import ringtrain as hvd
from ringtrain.optim import SGD
from ringtrain.record import timeline_files as files
from ringtrain.record.timeline_files import ranks_of
from ringtrain.timeline import recording
from ringtrain.timeline.__main__ import main
from ringtrain.timeline.report.trace import read


def events_of(path):
    return json.loads(path.read_text())


def spans(events, name, rank):
    return [event for event in events if event["ph"] == "X" and event["name"] == name and event["pid"] == rank]


def leave_parts(path, ranks):
    """Writes the files of a job that was killed: rank 0's part at `path`, the others beside it."""
    job = MadeUpJob(ranks, 2, lambda rank, step: 1_000, [Gradient("layer1", 1000, 100)])
    for rank, part in enumerate(job.parts()):
        files.part_of(path, rank).write_bytes(part)


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
        operations = [one for one in spans(events, "ALLREDUCE", rank) if one["args"]["name"] == 'a "quoted" name']
        assert len(operations) == 3
        assert operations[0]["args"]["bytes"] == 4000
        assert "test_timeline.py:" in operations[0]["args"]["site"]
        track = operations[0]["tid"]
        phases = [one for one in events if one["ph"] == "X" and (one["pid"], one["tid"]) == (rank, track)]
        begin, end = operations[0]["ts"], operations[0]["ts"] + operations[0]["dur"]
        within = [one for one in phases if begin - 1 <= one["ts"] and one["ts"] + one["dur"] <= end + 1]
        assert {one["name"] for one in within} >= {"ALLREDUCE", "NEGOTIATE_ALLREDUCE"}
        names = [one["args"]["name"] for one in events if one["ph"] == "M" and one["pid"] == rank]
        assert names[0].startswith(f"rank {rank} on ") and 'allreduce.a "quoted" name' in names
        (began,) = [
            one["args"]["start_time_since_epoch_in_micros"]
            for one in events
            if one["name"] == "process_name" and one["pid"] == rank
        ]
        assert began + begin == pytest.approx(time.time() * 1e6, abs=60e6)
        if last > 0 and rank != last:  # waited for the last one, whose submissions have ticks that much later
            assert operations[1]["dur"] > 40_000
            waits = spans(events, "waiting", rank)
            assert sum(one["dur"] for one in waits) > 100_000
    assert any(one["name"] == "CYCLE_START" for one in events)
    if last:
        ticks = [one for one in events if one["ph"] == "i" and one["name"] == f"rank {last}" and one["pid"] == 0]
        first = [one for one in spans(events, "ALLREDUCE", 0) if one["args"]["name"] == 'a "quoted" name']
        own = [tick for tick in ticks if tick["tid"] == first[0]["tid"]]
        late = [tick["ts"] - one["ts"] for tick, one in zip(own, first, strict=True)]
        assert all(microseconds > 40_000 for microseconds in late[1:])
    assert not list(tmp_path.glob("*.rank-*"))


@pytest.mark.ranks(2, isolated=True, env={"HOROVOD_TIMELINE": "DYNAMIC", "HOROVOD_TIMELINE_MARK_CYCLES": "true"})
def test_a_dynamic_timeline_begins_with_start_timeline(tmp_path):
    os.chdir(tmp_path)
    hvd.init()
    hvd.allreduce(np.ones(3), name="before")
    hvd.start_timeline(str(tmp_path / "t.json"))
    hvd.allreduce(np.ones(3), name="within")
    hvd.stop_timeline()
    hvd.barrier()
    names = [one["args"]["name"] for one in spans(events_of(tmp_path / "t.json"), "ALLREDUCE", 0)]
    assert names == ["within"]
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    hvd.barrier()


def take_steps(count):
    optimizer = hvd.DistributedOptimizer(SGD(lr=0.1))
    params = [np.ones(10)]
    for _ in range(count):
        optimizer.step(params, [np.ones(10)])


@pytest.mark.ranks(2, initialised=False)
@pytest.mark.parametrize(
    ("window", "shown"), [("3-4", [3, 4]), ("3-3", [3]), ("5", [5]), ("0-2", [1, 2]), ("5-100", [5])]
)
def test_a_window_of_steps_is_shown_whole(tmp_path, window, shown):
    path = tmp_path / "timeline.json"
    hvd.init(timeline_filename=str(path), timeline_steps=window)
    take_steps(6)
    hvd.stop_timeline()
    hvd.barrier()
    assert read(path).steps == shown
    names = [one["args"]["name"] for one in spans(events_of(path), "ALLREDUCE", 1)]
    gradients = [name for name in names if name.startswith("gradients") and "<" not in name]
    assert len(gradients) == (2 if window == "5-100" else len(shown))


@pytest.mark.ranks(2, initialised=False)
@pytest.mark.parametrize("window", ["7-9", "0"])
def test_a_window_that_never_came_is_told(tmp_path, window):
    path = tmp_path / "timeline.json"
    hvd.init(timeline_filename=str(path), timeline_steps=window)
    take_steps(6)
    rank, said = hvd.rank(), io.StringIO()
    hvd.barrier()
    with contextlib.redirect_stderr(said):
        hvd.shutdown()
    sentence = f"{path} was not written: timeline_steps is {window}, and the optimizers made 6 steps"
    assert (sentence in said.getvalue()) == (rank == 0)
    assert not path.exists()


@pytest.mark.ranks(2, initialised=False)
def test_steps_without_a_file_have_no_effect_and_this_is_told():
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        hvd.init(timeline_steps="3-4")
    assert ("timeline_steps has no effect without timeline_filename" in said.getvalue()) == (hvd.rank() == 0)


@pytest.mark.ranks(2, initialised=False)
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
    assert 20 < len(spans(events, "ALLREDUCE", 0)) < 500


@pytest.mark.ranks(1)
def test_the_writing_thread_takes_no_signal(tmp_path):
    before = threads_that_take_signals()
    hvd.start_timeline(str(tmp_path / "timeline.json"))
    hvd.allreduce(np.ones(3))
    assert threads_that_take_signals() <= before  # a thread of before may have ended
    hvd.stop_timeline()


@pytest.mark.ranks(2)
def test_mistakes_are_refused(tmp_path):
    hvd.start_timeline(str(tmp_path / "one.json"))
    with pytest.raises(ValueError, match="there is a timeline already"):
        hvd.start_timeline(str(tmp_path / "two.json"))
    hvd.stop_timeline()
    hvd.stop_timeline()  # there is none


@pytest.mark.ranks(2)
def test_where_no_file_can_be_no_rank_writes(tmp_path):
    (tmp_path / "folder").mkdir(exist_ok=True)
    hvd.barrier()
    with pytest.raises(hvd.RingtrainError, match=r"file_path must be a file, but .*folder is a folder"):
        hvd.start_timeline(str(tmp_path / "folder"))
    with pytest.raises(hvd.RingtrainError, match=r"file_path is .*one.json, but there is no folder .*none$"):
        hvd.start_timeline(str(tmp_path / "none" / "one.json"))
    with pytest.raises(hvd.RingtrainError, match="file_path must be a file, but /dev/null is a device"):
        hvd.start_timeline("/dev/null")
    hvd.stop_timeline()  # there is none
    hvd.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.ranks(2, initialised=False)
@pytest.mark.parametrize("steps", ["", "100-110"])
def test_a_folder_as_the_option_ends_init_on_all_ranks(tmp_path, steps):
    with pytest.raises(hvd.RingtrainError, match=r"timeline_filename must be a file, but .* is a folder"):
        hvd.init(timeline_filename=str(tmp_path), timeline_steps=steps)
    assert not list(tmp_path.parent.glob(f"{tmp_path.name}.rank-*"))


@pytest.mark.ranks(2)
def test_files_of_a_larger_job_do_not_get_into_a_new_timeline(tmp_path):
    path = tmp_path / "a [1].json"
    if hvd.rank() == 0:
        leave_parts(path, ranks=4)
        (tmp_path / "a [1].json.rank-best").write_text("not ours")
    hvd.barrier()
    hvd.start_timeline(str(path))
    hvd.barrier()
    assert {part.name for part in tmp_path.iterdir()} == {path.name, f"{path.name}.rank-1", f"{path.name}.rank-best"}
    hvd.stop_timeline()
    hvd.barrier()
    assert ranks_of(path) == {0, 1}


@pytest.mark.ranks(2)
def test_an_adasum_has_horovods_names(tmp_path):
    path = tmp_path / "timeline.json"
    hvd.start_timeline(str(path))
    hvd.allreduce(np.ones(10, np.float32), op=hvd.Adasum, name="update")
    hvd.stop_timeline()
    hvd.barrier()
    for rank in range(2):
        (span,) = spans(events_of(path), "ADASUM", rank)
        assert span["args"]["name"] == "update"
        assert spans(events_of(path), "NEGOTIATE_ADASUM", rank)


@pytest.mark.ranks(3)
def test_one_timeline_after_the_other_at_the_same_place(tmp_path):
    path = tmp_path / "timeline.json"
    for _ in range(20):
        hvd.start_timeline(str(path))
        hvd.stop_timeline()
    hvd.barrier()
    assert ranks_of(path) == {0, 1, 2}
    assert not list(tmp_path.glob("*.rank-*"))


def test_a_place_whose_file_another_rank_removes_is_no_device(tmp_path):
    path = tmp_path / "timeline.json"
    is_over = threading.Event()

    def come_and_go():
        while not is_over.is_set():
            path.touch()
            path.unlink()

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        for _ in range(5000):
            recording.check(path, "file_path")
    finally:
        is_over.set()
        other.join()


def large_part(rank, megabytes=60):
    """The events of a rank, a kilobyte each, of more names than there are tracks."""
    for number in range(megabytes * 1000):
        name = number % MANY_NAMES
        place = f'"pid":{rank},"tid":{min(name, 4096) + 1}'
        arguments = f'"name":"g{name}","bytes":4,"process_set":0,"site":"{"x" * 850}"'
        yield f'{{"name":"allreduce","ph":"X","ts":{number}.{rank},"dur":1.000,{place},"args":{{{arguments}}}}}'


MANY_NAMES = 5000


def memory_mb(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


@pytest.mark.ranks(2, initialised=False)
def test_parts_that_are_larger_than_the_memory_are_brought_together(tmp_path):
    hvd.init()
    path = tmp_path / "timeline.json"
    hvd.start_timeline(str(path))
    large = tmp_path / f"large-{hvd.rank()}"
    with open(large, "w") as file:
        file.write("[\n" + next(events := large_part(hvd.rank())))
        file.writelines(",\n" + event for event in events)
        file.write("\n]\n")
    large.rename(files.part_of(path, hvd.rank()))  # as if this had been written while the job ran
    hvd.barrier()
    before = memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    hvd.stop_timeline()
    assert memory_mb("VmHWM") - before < 64
    if hvd.rank() == 0:
        with open(path) as merged:
            assert next(merged) == "[\n"
            expected = ((rank, event) for rank in (0, 1) for event in large_part(rank))
            for number, (rank, event) in enumerate(expected):
                if number % MANY_NAMES < 4096 if rank == 0 else (number - 60_000) % MANY_NAMES < 4096:
                    tick = json.loads(next(merged).rstrip(",\n"))
                    assert (tick["name"], tick["pid"], tick["ph"]) == (f"rank {rank}", 0, "i")
                    own = json.loads(event)
                    assert (tick["ts"], tick["tid"]) == (own["ts"], own["tid"])
                assert next(merged) == event + (",\n" if number < 119_999 else "\n")
            assert merged.read() == "]\n"


@pytest.mark.ranks(3)
def test_a_full_disk_is_told_to_all_ranks_and_the_parts_stay(tmp_path):
    path = tmp_path / "timeline.json"
    hvd.start_timeline(str(path))
    for _ in range(30):
        hvd.allreduce(np.ones(1), name="small")
    time.sleep(0.5)  # until the file has been written
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if hvd.rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5000, limits[1]))
    try:
        with pytest.raises(
            hvd.RingtrainError, match=r"rank 0 cannot make one file .*json, which stay .*: File too large"
        ):
            hvd.stop_timeline()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    hvd.barrier()
    assert {part.name for part in tmp_path.iterdir()} == {"timeline.json", *(f"timeline.json.rank-{r}" for r in (1, 2))}
    hvd.barrier()
    if hvd.rank() == 0:
        assert main(["merge", str(path)]) == 0
        assert len(spans(events_of(path), "ALLREDUCE", 2)) == 30


DISK_FULL = """
import resource, sys
import numpy as np, ringtrain as hvd
hvd.init()
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
hvd.start_timeline(sys.argv[1])
for number in range(300):
    hvd.allreduce(np.ones(1), name=f"number {number}")
hvd.stop_timeline()
"""


def test_a_file_that_ends_in_the_middle_of_a_write_says_why(tmp_path):
    path = tmp_path / "timeline.json"
    ended = subprocess.run([sys.executable, "-c", DISK_FULL, path], capture_output=True, text=True, timeout=60)
    assert f"the timeline {path} ends here: File too large" in ended.stderr


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


def test_the_file_of_a_killed_job_is_valid(tmp_path):
    path = tmp_path / "timeline.json"
    command = [sys.executable, "-m", "ringtrain.run", "-np", "2", sys.executable, "-c", KILLED, str(path)]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode != 0
    assert len(spans(events_of(path), "ALLREDUCE", 0)) > 50
    assert len(spans(events_of(tmp_path / "timeline.json.rank-1"), "ALLREDUCE", 1)) > 50
    assert main(["merge", str(path)]) == 0
    events = events_of(path)
    assert len(spans(events, "ALLREDUCE", 1)) > 50 and any(event["name"] == "rank 1" for event in events)


def test_a_file_that_was_cut_anywhere_is_read_up_to_there():
    whole = '[\n{"name":"a","ph":"M"},\n{"name":"b","ph":"M"},\n{"args":{"name":"c\u00e9"},"ph":"M"}'.encode()
    for length in range(whole.index(b"\n{", 30) + 1, len(whole)):
        events = [json.loads(event) for event in files.events_in(whole[:length].split(b"\n"))]
        assert [event["name"] for event in events] == ["a", "b"]


def test_a_file_that_is_not_there_is_not_merged(tmp_path):
    assert main(["merge", str(tmp_path / "none.json")]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ranks", "said"), [(1, "1 rank"), (2, "2 ranks")])
def test_merging_twice_is_merging_once(ranks, said, tmp_path, capsys):
    path = tmp_path / "timeline.json"
    leave_parts(path, ranks)
    for _ in range(2):
        assert main(["merge", str(path)]) == 0
        assert capsys.readouterr().out == f"{path} has {said}\n"
    ticks = [event for event in events_of(path) if event["ph"] == "i" and event["name"] == "rank 1"]
    assert len(ticks) == (2 if ranks == 2 else 0)  # of two steps
    assert [file.name for file in tmp_path.iterdir()] == ["timeline.json"]


def test_a_cut_file_of_one_rank_becomes_valid(tmp_path):
    path = tmp_path / "timeline.json"
    leave_parts(path, ranks=1)
    path.write_bytes(path.read_bytes()[:-20])
    assert main(["merge", str(path)]) == 0
    assert len(events_of(path)) > 10


FOREIGN = b'[\n{"ph":"X","ts":1,"dur":2,"pid":0,"tid":3,"args":{"stream":7}}\n]\n'


@pytest.mark.parametrize(
    "content", [b"a text\nof two lines\n", b'{"a":1}', b"[1]", b"[\n1,\n2\n]\n", b"\xff\x00", FOREIGN]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_files_that_are_not_timelines_are_not_merged_and_stay_as_they_are(content, rank, tmp_path, capsys):
    path = tmp_path / "timeline.json"
    leave_parts(path, ranks=3)
    wrong = files.part_of(path, rank)
    wrong.write_bytes(content)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert main(["merge", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"python -m ringtrain.timeline: {wrong} is ") and said.count("\n") == 1
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    if rank == 0:
        assert main(["report", str(path)]) == 2
        assert capsys.readouterr().err == said


def test_operations_of_different_process_sets_have_nothing_to_do_with_each_other(tmp_path):
    path = tmp_path / "timeline.json"
    for rank, process_set in ((0, 1), (1, 2), (2, 1)):
        event = {"name": "allreduce", "ph": "X", "ts": rank, "dur": 1, "pid": rank, "tid": 1}
        event["args"] = {"name": "a", "bytes": 4, "process_set": process_set}
        files.part_of(path, rank).write_text(f"[\n{json.dumps(event, separators=(',', ':'))}\n]\n")
    assert main(["merge", str(path)]) == 0
    assert [event["name"] for event in events_of(path) if event["ph"] == "i"] == ["rank 0", "rank 2"]


def test_each_part_is_read_once(tmp_path, monkeypatch):
    path = tmp_path / "timeline.json"
    leave_parts(path, ranks=3)
    read, read_events = [], files.read_events

    def noted(part):
        read.append(part)
        return read_events(part)

    monkeypatch.setattr("ringtrain.record.timeline_files.read_events", noted)
    assert main(["merge", str(path)]) == 0
    assert read == [files.part_of(path, rank) for rank in range(3)]


def test_a_rank_that_wrote_nothing_does_not_keep_the_others_from_being_merged(tmp_path, capsys):
    path = tmp_path / "timeline.json"
    leave_parts(path, ranks=3)
    files.part_of(path, 1).write_bytes(b"")  # the disk of its host was full
    assert main(["merge", str(path)]) == 0
    assert ranks_of(path) == {0, 2} and capsys.readouterr().out == f"{path} has 2 ranks\n"
    path.write_bytes(b"")
    assert main(["merge", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"python -m ringtrain.timeline: {path} is empty")
    assert path.read_bytes() == b""
