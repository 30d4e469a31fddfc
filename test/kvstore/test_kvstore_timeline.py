"""Stores in a timeline: what workers ask for, and what the threads of servers do."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from harness.ringrun_job import ROOT, needs_mpi, ringrun

from ringtrain.record.timeline_files import FIRST_SERVER
from ringtrain.timeline import __main__ as command

ROUNDS, CHUNK = 4, (64 << 10) // 4
TRAIN = f"""
import numpy as np
import ringtrain as hvd
from ringtrain import kvstore

hvd.init()
kv = kvstore.create("dist_async")
kv.set_optimizer("test")
kv.init(["w", 'with "quotes"'], [np.zeros({3 * CHUNK}, np.float32), np.zeros(5, np.float32)])
optimizer = hvd.DistributedOptimizer(hvd.optim.SGD(lr=0.1))
for _ in range({ROUNDS}):
    kv.push("w", np.ones({3 * CHUNK}, np.float32))
    kv.pull("w")
    kv.push(["w", 'with "quotes"'], [np.ones({3 * CHUNK}, np.float32), np.ones(5, np.float32)])
    optimizer.step([np.zeros(2)], [np.ones(2)])
kv.wait()
kv.barrier()
assert (kv.pull("w") == 2 * hvd.size() * {ROUNDS}).all()
"""


def shown_in(path: Path) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """Returns the events of keys, by process and track."""
    events = json.loads(path.read_text())
    tracks = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    found: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event.get("cat") == "kvstore":
            found[event["pid"]][tracks[event["pid"], event["tid"]]].append(event)
    return found


def counts_of(tracks: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, int]]:
    return {track: dict(Counter(one["name"] for one in events)) for track, events in tracks.items()}


def job(path: Path, *options: str) -> Path:
    (path / "train.py").write_text(TRAIN)
    words = ["--timeline-filename", str(path / "t.json"), "--shared-memory", "off", *options]
    done = ringrun("-np", "3", *words, sys.executable, str(path / "train.py"))
    assert done.returncode == 0, done.stderr
    return path / "t.json"


@pytest.fixture(scope="module")
def with_server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of two workers, with that of their server beside it."""
    return job(tmp_path_factory.mktemp("with_server"), "--kv-servers", "1")


OF_WORKER = {
    "push.w": {"PUSH": ROUNDS},
    "pull.w": {"PULL": ROUNDS + 1},
    "push.w and 1 more": {"PUSH": ROUNDS},
}


@needs_mpi
def test_requests_of_workers_and_work_of_servers_are_in_one_file(
    with_server: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(map(counts_of, shown_in(with_server).values())) == [OF_WORKER] * 2
    assert command.main(["merge", str(with_server)]) == 0
    assert "has 2 ranks" in capsys.readouterr().out
    assert [one.name for one in with_server.parent.glob("t.json*")] == ["t.json"]
    found = shown_in(with_server)
    assert sorted(found) == [0, 1, FIRST_SERVER]
    of_server = counts_of(found[FIRST_SERVER])
    pushes = {"receive key 0": 3 * 2 * ROUNDS, "receive key 1": ROUNDS}
    # the first worker has also made the keys
    for worker in (0, 1):
        received = of_server.pop(f"server 0, from worker {worker}")
        assert {key: received[key] - count for key, count in pushes.items()} in (
            {"receive key 0": 0, "receive key 1": 0},
            {"receive key 0": 3, "receive key 1": 1},
        )
    done = sum((Counter(one) for one in of_server.values()), Counter())
    assert done["update key 0"] == 2 * pushes["receive key 0"] and done["update key 1"] == 2 * ROUNDS
    assert done["answer key 0"] == 3 * 2 * (ROUNDS + 1)
    assert all(track.startswith("server 0, thread ") for track in of_server)


@needs_mpi
def test_the_work_of_a_server_is_between_request_and_answer(with_server: Path) -> None:
    command.main(["merge", str(with_server)])
    found = shown_in(with_server)
    pulls = [(one["ts"], one["ts"] + one["dur"]) for worker in (0, 1) for one in found[worker]["pull.w"]]
    answers = [
        one for events in found[FIRST_SERVER].values() for one in events if one["name"].startswith("answer key 0")
    ]
    slack_us = 1000  # of two readings of the clock on the wall
    for one in answers:
        inside = [begin - slack_us < one["ts"] and one["ts"] + one["dur"] < end + slack_us for begin, end in pulls]
        assert any(inside), (one, pulls)
    for track, events in found[FIRST_SERVER].items():
        events.sort(key=lambda one: one["ts"])
        for before, after in itertools.pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01, (track, before, after)


@needs_mpi
def test_a_report_says_how_it_counts_stores(with_server: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["report", str(with_server)]) == 0
    page = with_server.with_suffix(".html").read_text()
    assert "waits for key-value stores counts as compute" in page


@needs_mpi
def test_servers_in_workers_are_tracks_of_their_ranks(tmp_path: Path) -> None:
    found = shown_in(job(tmp_path))
    assert sorted(found) == [0, 1, 2]
    for rank, tracks in found.items():
        counts = counts_of(tracks)
        assert {track: counts.pop(track) for track in OF_WORKER} == OF_WORKER
        assert all(track.startswith(f"server {rank}, ") for track in counts)
    received = [track for tracks in found.values() for track in tracks if "from worker" in track]
    assert received  # no worker needs the network for what its own server has


def test_a_server_that_cannot_write_its_file_says_so(tmp_path: Path) -> None:
    """A server without a rank, by hand; nobody else of its job matters."""
    program = """
import socket
from ringtrain import _core
listener = socket.create_server(("127.0.0.1", 0))
server = _core.StoreServer(
    number=0, capacity=1, listeners=[listener.detach()], secret=b"x", token="", threads=1, node="", timeout_s=5.0,
    verbose=0,
)
try:
    server.start_timeline("/no/such/folder/t.json", 7, "server 0", 1.0)
except Exception as error:
    print(type(error).__name__, error)
server.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert done.stdout.startswith("RingtrainError cannot write the timeline /no/such/folder/t.json: No such file")
