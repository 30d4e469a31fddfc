"""The error of the other ranks when one rank ends, in each of ten ways, and the exit code: one rule for all launchers.

The table is in docs/launching.md.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from harness.ringrun_job import ROOT, TIMEOUT_S, needs_mpi

from ringtrain.runner.supervise.end_rule import AFTER_FAILURE_S

pytestmark = needs_mpi


class End(NamedTuple):
    """How rank 1 ends, the error of the others, and the exit code of the job."""

    code: str
    error: str
    exit_code: int


ENDS = {
    "returns": End("sys.exit(0)", "ShutDownError", 1),
    "raises": End("raise RuntimeError('no data')", "RemoteError", 1),
    "exits": End("sys.exit(3)", "ShutDownError", 3),
    "exits with words": End("sys.exit('no data')", "ShutDownError", 1),
    "exits at once": End("os._exit(5)", "PeerLostError", 5),
    "is killed": End("os.kill(os.getpid(), signal.SIGKILL)", "PeerLostError", 137),
    "is told to end": End("os.kill(os.getpid(), signal.SIGTERM)", "PeerLostError", 143),
    "crashes": End("os.kill(os.getpid(), signal.SIGSEGV)", "PeerLostError", 139),
    "is interrupted": End("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", "RemoteError", 130),
    "aborts": End("os.abort()", "PeerLostError", 134),
}

# The others write a checkpoint that takes a second, and go on with their error.
SCRIPT = """
import os, pathlib, resource, signal, sys, time
import numpy as np
import ringtrain as hvd

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
hvd.init()
folder = pathlib.Path(sys.argv[1])
x = np.ones(1000, np.float32)
hvd.allreduce(x, name="before")
if hvd.rank() == 1:
    {end}
try:
    while True:
        hvd.allreduce(x, name="after")
except hvd.RingtrainError as error:
    time.sleep(1)
    (folder / f"rank.{{hvd.rank()}}").write_text(f"{{type(error).__name__}}: {{error}}")
    raise
"""

MPIRUN = [str(Path(sys.executable).with_name("mpirun")), "--oversubscribe", "--allow-run-as-root"]
LAUNCHERS = {
    "ringrun": ["-m", "ringtrain.run", "-np", "3", "--network", "sockets"],
    "ringrun over MPI": ["-m", "ringtrain.run", "-np", "3", "--network", "mpi"],
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_others_are_told_who_ended_and_save_and_the_exit_code_is_that_of_the_rank(
    launcher: str, end: End, tmp_path: Path
) -> None:
    words = [sys.executable, *LAUNCHERS[launcher], sys.executable, "-c", SCRIPT.format(end=end.code), str(tmp_path)]
    ended = run(words)
    assert {path.name for path in tmp_path.iterdir()} == {"rank.0", "rank.2"}, ended.stderr
    for path in tmp_path.iterdir():
        assert re.match(rf"{end.error}: .*rank 1\b", path.read_text(), re.DOTALL), path.read_text()
    assert ended.returncode == end.exit_code, ended.stderr


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": ROOT}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("end", [ENDS[how] for how in ("exits at once", "is killed")], ids=str)
def test_mpirun_alone_returns_the_exit_code_of_the_rank(end: End, tmp_path: Path) -> None:
    ended = run([*MPIRUN, "-np", "3", sys.executable, "-c", SCRIPT.format(end=end.code), str(tmp_path)])
    assert ended.returncode == end.exit_code, ended.stderr


# --- others that wait for nothing -------------------------------------------------------------------------------------

# Rank 0 learns of the end of rank 1 from nobody but the launcher.
BUSY = """
import os, pathlib, signal, sys, time
import ringtrain as hvd

hvd.init()
if hvd.rank() == 1:
    sys.exit(3)
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
began = time.monotonic()
while not told and time.monotonic() < began + 50:
    time.sleep(0.02)
waited = time.monotonic() - began
time.sleep(4)  # a checkpoint
pathlib.Path(sys.argv[1], "waited").write_text(str(waited))
"""


def test_a_rank_that_exits_does_not_wait_in_mpi_finalize(tmp_path: Path) -> None:
    ended = run([*MPIRUN, "-np", "2", sys.executable, "-c", BUSY.replace("+ 50", "+ 600"), str(tmp_path)])
    assert ended.returncode == 3, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_that_learn_nothing_get_sigterm_ten_seconds_after_a_failure(launcher: str, tmp_path: Path) -> None:
    words = [sys.executable, *LAUNCHERS[launcher], sys.executable, "-c", BUSY, str(tmp_path)]
    ended = run(words)
    assert ended.returncode == 3, ended.stderr
    assert AFTER_FAILURE_S - 3 < float((tmp_path / "waited").read_text()) < 49


# --- workers of a store -----------------------------------------------------------------------------------------------

STORE = """
import os, pathlib, resource, signal, sys, time
import numpy as np
from ringtrain import kvstore
from ringtrain.errors import RingtrainError

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
kv = kvstore.create("dist_sync")
kv.init("w", np.zeros(100, np.float32))
try:
    for step in range(100):
        if step == 2 and kv.rank == 1:
            {end}
        kv.push("w", np.ones(100, np.float32))
        kv.pull("w")
except RingtrainError as error:
    time.sleep(1)
    pathlib.Path(sys.argv[1], f"rank.{{kv.rank}}").write_text(f"{{type(error).__name__}}: {{error}}")
    raise
"""


@pytest.mark.parametrize("servers", ["0", "1"])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_workers_are_told_who_ended_and_save(end: End, servers: str, tmp_path: Path) -> None:
    words = ["-m", "ringtrain.launch", "-n", "2", "-s", servers, "--launcher", "local"]
    ended = run([sys.executable, *words, sys.executable, "-c", STORE.format(end=end.code), str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["rank.0"], ended.stderr
    assert re.match(r"PeerLostError: .*worker 1\b", (tmp_path / "rank.0").read_text(), re.DOTALL)
    assert ended.returncode == end.exit_code, ended.stderr


# --- other ways to start ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_ranks_of_a_function_are_told_who_ended_and_save(how: str, tmp_path: Path) -> None:
    script = SCRIPT.format(end=ENDS[how].code).replace("sys.argv[1]", repr(str(tmp_path)))
    program = f"import ringtrain; ringtrain.run(exec, ({script!r}, {{}}), num_proc=3)"
    ended = run([sys.executable, "-c", program])
    assert {path.name for path in tmp_path.iterdir()} == {"rank.0", "rank.2"}, ended.stderr
    what = "RuntimeError: no data" if how == "raises" else "the first to fail was rank 1 on .*, ended by SIGKILL"
    assert re.search(what, ended.stderr), ended.stderr


# Process 0 is awaited by nobody when the others have failed too often.
GIVEN_UP = """
import os, pathlib, sys, time
import numpy as np
import ringtrain as hvd

state = hvd.elastic.ObjectState(step=0)

@hvd.elastic.run
def train(state):
    if hvd.rank() == 1:
        os._exit(5)
    while True:
        hvd.allreduce(np.ones(10, np.float32), name="x")
        state.commit()

hvd.init()
try:
    train(state)
except BaseException as error:
    time.sleep(1)
    pathlib.Path(sys.argv[1], "saved").write_text(f"{type(error).__name__}: {error}")
    raise
"""


def test_a_process_that_waits_for_others_is_told_that_the_job_is_given_up_and_saves(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ringtrain.run", "-np", "2", "--min-np", "2"]
    ended = run([*words, sys.executable, "-c", GIVEN_UP, str(tmp_path)])
    assert ended.returncode == 1, ended.stderr
    assert "fewer than 2 ranks (--min-np) are left" in (tmp_path / "saved").read_text()


@pytest.mark.slow
def test_torchrun_and_ranks_started_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end="os._exit(5)"))
    (folder := tmp_path / "torchrun").mkdir()
    ended = run([str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node=3", str(script), str(folder)])
    assert ended.returncode == 1, ended.stderr

    (folder := tmp_path / "by-hand").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (secret := tmp_path / "secret").write_bytes(os.urandom(32))
    secret.chmod(0o600)
    place = {"RINGTRAIN_SIZE": "3", "RINGTRAIN_RENDEZVOUS": f"127.0.0.1:{port}", "RINGTRAIN_SECRET_FILE": str(secret)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env={**os.environ, "PYTHONPATH": ROOT, **place, "RINGTRAIN_RANK": str(rank)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(3)
    ]
    assert [rank.wait(TIMEOUT_S) for rank in ranks] == [1, 5, 1]
    assert {path.name for path in folder.iterdir()} == {"rank.0", "rank.2"}
