"""`ringrun status`: which jobs it finds, who may ask, and the forms in which it tells."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.ringrun_job import TIMEOUT_S, needs_mpi, ringrun, wait_until
from harness.status_job import Planted, planted

from ringtrain.job import job_file
from ringtrain.job.rendezvous.protocol import Connection
from ringtrain.runner.status.asking import ask_for_stacks, take_snapshot

pytestmark = [needs_mpi, pytest.mark.alike]

HANGS = """
def load():
    tell()
    time.sleep(1000)

if hvd.rank() == 2:
    load()
tell()
hvd.allreduce(np.ones(4), name="loss")
"""


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    """One job of `HANGS` for all tests that only ask."""
    with planted(tmp_path_factory.mktemp("hanging"), HANGS) as job:
        job.wait_for(0, 1, 2)
        yield job


def the_job(folder: Path) -> job_file.Job:
    (path,) = (folder / "ringtrain").glob("*.job")
    return job_file.read(str(path))


def test_the_file_of_a_job_is_for_its_user_alone_and_goes_with_the_job(tmp_path: Path) -> None:
    with planted(tmp_path, HANGS) as job:
        job.wait_for(0, 1, 2)
        (path,) = (tmp_path / "ringtrain").iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    (short := tmp_path / "short.py").write_text("import ringtrain as hvd; hvd.init()")
    assert ringrun("-np", "2", sys.executable, str(short), XDG_RUNTIME_DIR=str(tmp_path)).returncode == 0
    assert job.status().returncode == 1  # which removes the files of jobs that were killed
    assert list((tmp_path / "ringtrain").iterdir()) == []


def test_a_stranger_is_told_nothing(hanging: Planted) -> None:
    found = the_job(hanging.folder)
    assert found.ranks[0].address.host == "127.0.0.1"
    stranger = found._replace(secret=bytes(32))
    snapshot = take_snapshot(stranger)
    assert snapshot.answers == {} and ask_for_stacks(stranger, [0, 1, 2]) == {}
    for words in (b"GET / HTTP/1.0\r\n\r\n", b"ringtrv\x03" + bytes(16) + bytes(32) + b"\0" * 8):
        with socket.create_connection(found.ranks[0].address) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.sendall(words)
            with contextlib.suppress(OSError):  # the connection may have ended already
                sock.shutdown(socket.SHUT_WR)
            answer = bytearray()
            with contextlib.suppress(ConnectionResetError):
                while part := sock.recv(1 << 16):
                    answer += part
            assert len(answer) in (0, 16 + 32)  # a nonce and its proof
    assert take_snapshot(found).answers.keys() == {0, 1, 2}


def test_a_request_that_is_unknown_changes_nothing(hanging: Planted) -> None:
    found = the_job(hanging.folder)
    with socket.create_connection(found.ranks[0].address) as sock:
        connection, deadline = Connection(sock), time.monotonic() + TIMEOUT_S
        connection.prove_as_rank(found.secret, deadline)
        connection.send("shut down", deadline)
        assert connection.receive(1 << 20, deadline) == {"error": "unknown request"}
    assert take_snapshot(found).answers.keys() == {0, 1, 2}


def test_connections_that_say_nothing_do_not_keep_others_waiting(hanging: Planted) -> None:
    address = the_job(hanging.folder).ranks[0].address
    silent = [socket.create_connection(address) for _ in range(8)]
    assert hanging.told()["ranks"][0]["answers"]
    for sock in silent:
        sock.close()


def test_stacks_that_are_equal_are_printed_once(hanging: Planted) -> None:
    first, second = hanging.status("--stacks").stdout.split("\n\n")
    assert first.startswith("ranks 0-1:\n    main thread\n")
    assert '      File "train.py", line 23 in <module>\n' in first
    assert second.startswith('rank 2:\n    main thread\n      File "train.py", line 18 in load\n')


def test_a_picture_comes_each_second_until_the_job_ends(tmp_path: Path) -> None:
    script = """
tell()
for _ in range(400):
    hvd.allreduce(np.ones(4), name="loss")
    time.sleep(0.01)
os._exit(0)
"""
    with planted(tmp_path, script) as job:
        job.wait_for(0)
        watching = job.status("--watch", "--json")
        assert watching.returncode == 0 and watching.stderr == "ringrun status: the job has ended\n"
        pictures = [json.loads(line) for line in watching.stdout.splitlines()]
        operations = [one["ranks"][0]["totals"]["operations"] for one in pictures if one["ranks"][0]["answers"]]
        assert operations == sorted(operations) and operations[0] > 0


def test_one_of_several_jobs_is_named_by_its_id(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with planted(tmp_path, HANGS) as job, planted(tmp_path / "other", HANGS, runtime=tmp_path) as other:
        job.wait_for(0)
        other.wait_for(0)
        asked = job.status()
        assert asked.returncode == 2 and "there are 2 jobs; name one by the beginning of its id" in asked.stderr
        ids = [line.split()[1].rstrip(":") for line in asked.stderr.splitlines()[1:]]
        assert len(ids) == 2
        for one in ids:
            assert job.status(one).stdout.startswith(f"job {one}: ")
    assert job.status().stderr.startswith("ringrun status: no job of this user runs on ")


def test_a_file_that_was_copied_finds_the_job(hanging: Planted) -> None:
    (path,) = (hanging.folder / "ringtrain").iterdir()
    path.rename(copied := hanging.folder / "copied")
    assert hanging.status().returncode == 1
    assert "Rank 2 is in load() at train.py:18; ranks 0-1 have waited" in hanging.status(str(copied)).stdout
    copied.rename(path)


def test_a_rank_that_was_killed_is_gone(tmp_path: Path) -> None:
    with planted(tmp_path, HANGS) as job:
        job.wait_for(0, 1, 2)
        ranks = the_job(tmp_path).ranks
        for rank in ranks[:2]:  # which would hear of it
            os.kill(rank.pid, signal.SIGSTOP)
        os.kill(ranks[2].pid, signal.SIGKILL)
        kind, sentence = job.verdict()
        assert kind == "gone" and sentence.startswith(f"Rank 2 is gone (pid {ranks[2].pid} on ")


def test_a_job_without_a_launcher_is_found(tmp_path: Path) -> None:
    script = "import sys, time\nimport ringtrain as hvd\nhvd.init()\nprint('ready', flush=True)\ntime.sleep(1000)\n"
    (tmp_path / "train.py").write_text(script)
    tmp_path.chmod(0o700)
    job = Planted(tmp_path, None)
    command = [sys.executable, "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=job.environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            told = job.told()
        finally:
            process.kill()
        assert told["job"]["size"] == 1 and told["ranks"][0]["pid"] == process.pid
        assert told["verdict"]["sentence"].endswith(" ago; rank 0 is at train.py:5.")


def test_ranks_of_mpirun_are_found(tmp_path: Path) -> None:
    with planted(tmp_path, HANGS, network="mpi") as job:
        job.wait_for(2)
        told = job.told()
        assert told["job"]["network"] == "mpi"
        assert told["verdict"]["sentence"].startswith("Rank 2 is in load() at train.py:18; ranks 0-1 have waited")


def test_an_elastic_job_tells_its_generation(tmp_path: Path) -> None:
    script = """
tell()
if hvd.rank() == 0:
    time.sleep(1000)
hvd.shutdown()
open(os.environ["FOLDER"] + "/left", "w").close()
time.sleep(1000)
"""
    with planted(tmp_path, script, size=2, flags=("--min-np", "2")) as job:
        job.wait_for(0, 1)
        wait_until((tmp_path / "left").exists)
        assert job.told()["job"]["generation"] == 1
        assert ", generation 1, for " in job.status().stdout
        kind, sentence = job.verdict()
        assert kind == "left" and sentence.startswith("Rank 1 has left the job or not joined it yet (pid ")


def test_many_files_of_killed_jobs_do_not_stay(tmp_path: Path) -> None:
    with planted(tmp_path, HANGS) as job:
        job.wait_for(0)
        (path,) = (tmp_path / "ringtrain").glob("*.job")
        contents = json.loads(path.read_text())
        with subprocess.Popen(["true"]) as ended:
            ended.wait()
        for number in range(40):
            dead = {**contents, "id": f"dead{number}", "left_by": [socket.gethostname(), ended.pid]}
            path.with_name(f"dead{number}.job").write_text(json.dumps(dead))
    (short := tmp_path / "short.py").write_text("import ringtrain as hvd; hvd.init()")
    assert ringrun("-np", "2", sys.executable, str(short), XDG_RUNTIME_DIR=str(tmp_path)).returncode == 0
    assert not list((tmp_path / "ringtrain").glob("dead*.job"))


def test_ranks_that_are_not_to_listen_leave_no_file(tmp_path: Path) -> None:
    with planted(tmp_path, HANGS, flags=("--no-status",)) as job:
        job.wait_for(0, 1, 2)
        assert not (tmp_path / "ringtrain").exists()
        assert job.status().returncode == 1
