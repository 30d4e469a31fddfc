"""Processes that a rank starts: they inherit what makes a process a rank, and are not ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness.ringrun_job import needs_mpi, on_each_network, ringrun

from ringtrain.job import launched_by

pytestmark = needs_mpi
METHODS = ["spawn", "forkserver"]
OF_TWO = {"RINGTRAIN_RANK": "0", "RINGTRAIN_SIZE": "2", "RINGTRAIN_RENDEZVOUS": "localhost:5000"}


@pytest.fixture(autouse=True)
def _no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched_by, "_owner_pid", None)


def written(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return str(folder / "train.py")


IMPORTED_AGAIN = """
import multiprocessing
import numpy as np
import ringtrain as hvd

hvd.init()

def work():
    pass

if __name__ == "__main__":
    child = multiprocessing.get_context({method!r}).Process(target=work)
    child.start()
    child.join(50)
    total = hvd.allreduce(np.ones(1), op=hvd.Sum, name="x")
    print("sum", total[0], "exit code", child.exitcode, flush=True)
"""


@on_each_network
@pytest.mark.parametrize("method", METHODS)
def test_a_spawned_child_that_imports_init_fails_on_that_line(tmp_path: Path, method: str) -> None:
    done = ringrun("-np", "2", "python", written(tmp_path, IMPORTED_AGAIN.format(method=method)))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] sum 2.0 exit code 1" for rank in range(2)]
    for rank in range(2):
        assert f"multiprocessing for rank {rank} and is not a rank" in done.stderr
    assert done.stderr.count('put init() and the training behind `if __name__ == "__main__":`') == 2
    assert done.stderr.count("\n[0]     hvd.init()\n") == 1


def test_a_spawned_child_fails_without_a_launcher_as_well(tmp_path: Path) -> None:
    script = written(tmp_path, IMPORTED_AGAIN.format(method="spawn"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "sum 1.0 exit code 1\n" and "for rank 0 and is not a rank" in done.stderr


GUARDED = """
import multiprocessing
import numpy as np
import ringtrain as hvd

def work(queue):
    try:
        queue.put((hvd.is_initialized(), hvd.rank()))
    except hvd.NotInitializedError:
        queue.put("not initialized")

if __name__ == "__main__":
    hvd.init()
    context = multiprocessing.get_context({method!r})
    queue = context.Queue()
    children = [context.Process(target=work, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    told = [queue.get(timeout=50) for _ in children]
    for child in children:
        child.join(50)
    total = hvd.allreduce(np.ones(1), op=hvd.Sum, name="x")
    print(told, [child.exitcode for child in children], total[0], flush=True)
"""


@on_each_network
@pytest.mark.parametrize("method", METHODS)
def test_spawned_children_that_do_not_call_init_work(tmp_path: Path, method: str) -> None:
    done = ringrun("-np", "2", "python", written(tmp_path, GUARDED.format(method=method)))
    line = "['not initialized', 'not initialized'] [0, 0] 2.0"
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {line}" for rank in range(2)], done.stderr


STARTS_ITSELF = """
import subprocess, sys
import ringtrain as hvd

hvd.init()
if len(sys.argv) == 1:
    done = subprocess.run([sys.executable, __file__, "child"], capture_output=True, text=True, timeout=50)
    print(done.returncode, done.stderr.splitlines()[-1], flush=True)
"""


@on_each_network
def test_init_in_a_program_that_a_rank_starts_fails(tmp_path: Path) -> None:
    done = ringrun("-np", "2", "python", written(tmp_path, STARTS_ITSELF))
    assert done.returncode == 0, done.stderr
    for rank, line in enumerate(sorted(done.stdout.splitlines())):
        assert line.startswith(f"[{rank}] 1 RuntimeError: process ")
        assert f"was started by rank {rank} (process " in line and "start a job of its own with ringrun" in line


def test_init_in_a_program_that_a_process_of_an_elastic_job_starts_fails(tmp_path: Path) -> None:
    script = written(tmp_path, STARTS_ITSELF)
    done = ringrun("-np", "2", "--min-np", "1", "-H", "localhost:2", "python", script)
    assert done.stdout.count("1 RuntimeError: process ") == 2, done.stdout + done.stderr
    assert done.stdout.count("was started by a rank of an elastic job") == 2


REPLACES_ITSELF = """
import os, sys
import ringtrain as hvd

if len(sys.argv) == 1:
    hvd.init()
    hvd.shutdown()
    os.execv(sys.executable, [sys.executable, __file__, "again"])
hvd.init()
print("rank", hvd.rank(), "of", hvd.size(), flush=True)
"""


def test_a_rank_that_replaces_itself_stays_a_rank(tmp_path: Path) -> None:
    done = ringrun("-np", "1", "--network", "sockets", "python", written(tmp_path, REPLACES_ITSELF))
    assert done.stdout == "rank 0 of 1\n", done.stderr


JOB_OF_ITS_OWN = """
import subprocess, sys
import ringtrain as hvd

hvd.init()
job = [sys.executable, "-m", "ringtrain.run", "-np", "2", "--network", sys.argv[1], "python", "-c"]
code = "import ringtrain as hvd; hvd.init(); print('rank', hvd.rank(), 'of', hvd.size())"
done = subprocess.run([*job, code], capture_output=True, text=True, timeout=50)
print(sorted(done.stdout.splitlines()), done.stderr, flush=True)
assert hvd.size() == 1
"""


@pytest.mark.parametrize("network", ["sockets", "mpi"])
def test_a_rank_of_a_job_of_one_may_start_a_job_of_its_own(tmp_path: Path, network: str) -> None:
    script = written(tmp_path, JOB_OF_ITS_OWN)
    done = ringrun("-np", "1", "--network", "sockets", "python", script, network)
    assert done.stdout == "['[0] rank 0 of 2', '[1] rank 1 of 2'] \n", done.stdout + done.stderr


RANKS_BY_HAND = """
import multiprocessing, os
import numpy as np

def rank(number, results):
    os.environ["RINGTRAIN_RANK"] = str(number)
    import ringtrain as hvd
    hvd.init()
    results.put(float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0]))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=rank, args=(number, results)) for number in range(2)]
    for one in ranks:
        one.start()
    print([results.get(timeout=50) for _ in ranks], flush=True)
    for one in ranks:
        one.join(50)
"""


def test_spawned_processes_of_a_process_that_is_not_a_rank_may_be_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringtrain.job.rendezvous.listener import bound
    from ringtrain.job.rendezvous.server import Server

    secret = b"of this test".ljust(32)
    server = Server(bound("127.0.0.1", 0), secret)
    (tmp_path / "secret").write_bytes(secret)
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.setenv("RINGTRAIN_SIZE", "2")
    monkeypatch.setenv("RINGTRAIN_RENDEZVOUS", f"127.0.0.1:{server.port}")
    monkeypatch.setenv("RINGTRAIN_SECRET_FILE", str(tmp_path / "secret"))
    script = written(tmp_path, RANKS_BY_HAND)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[2.0, 2.0]\n", done.stderr


def environment_of_child(environ: dict[str, str]) -> dict[str, str]:
    """Returns the variables that a child of the process with the place of `environ` inherits."""
    child = dict(environ)
    child[launched_by.OWNER_VARIABLE] = child[launched_by.OWNER_VARIABLE].replace(" ", "1 ", 1)
    return child


@pytest.mark.parametrize(
    "environ",
    [
        OF_TWO,
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-7@1"},
        {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "PMI_FD": "9"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
        {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "5000"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "5000"},
        {"RINGTRAIN_ELASTIC": "1", "RINGTRAIN_MEMBER": "localhost/0", "RINGTRAIN_RENDEZVOUS": "localhost:5000"},
        {"DMLC_PS_ROOT_URI": "localhost", "DMLC_PS_ROOT_PORT": "5000", "DMLC_ROLE": "worker", "DMLC_TASK_ID": "0"},
    ],
    ids=["ringrun", "Open MPI", "Hydra", "Slurm", "torchrun", "MASTER_ADDR", "elastic", "DMLC"],
)
def test_a_child_has_no_place_under_any_launcher(environ: dict[str, str]) -> None:
    environ = dict(environ)
    launched_by.own_place("init()", environ)
    launched_by.own_place("init()", environ)  # the same process
    with pytest.raises(RuntimeError, match=r"was started by .* and is not a (rank|worker): call init\(\) in process"):
        launched_by.own_place("init()", environment_of_child(environ))


@pytest.mark.parametrize(
    "changed",
    [{"RINGTRAIN_RANK": "1"}, {"RINGTRAIN_SIZE": "3"}, {"RINGTRAIN_RENDEZVOUS": "localhost:5001"}],
    ids=["rank", "size", "job"],
)
def test_a_child_that_is_given_another_place_may_take_it(changed: dict[str, str]) -> None:
    environ = dict(OF_TWO)
    launched_by.own_place("init()", environ)
    launched_by.own_place("init()", {**environment_of_child(environ), **changed})


def test_a_child_of_a_process_without_a_launcher_may_have_a_job_of_its_own() -> None:
    environ: dict[str, str] = {}
    launched_by.own_place("init()", environ)
    assert environ == {}


WORKER_OF_A_STORE = """
import subprocess, sys
from ringtrain import kvstore

store = kvstore.create("dist_sync")
if len(sys.argv) == 1:
    done = subprocess.run([sys.executable, __file__, "child"], capture_output=True, text=True, timeout=50)
    print(done.returncode, done.stderr.splitlines()[-1], flush=True)
"""


RINGLAUNCH = "import sys; from ringtrain.runner.launch_command import main; sys.exit(main())"


def test_a_program_that_a_worker_of_a_store_starts_is_not_a_worker(tmp_path: Path) -> None:
    script = written(tmp_path, WORKER_OF_A_STORE)
    done = subprocess.run(
        [sys.executable, "-c", RINGLAUNCH, "--launcher", "local", "-n", "1", "-s", "1", sys.executable, script],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "1 RuntimeError: process " in done.stdout, done.stdout + done.stderr
    assert (
        "was started by worker 0 (process " in done.stdout
        and "is not a worker: call kvstore.create() in process" in done.stdout
    )
