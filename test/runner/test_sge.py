"""A real SGE: jobs of qsub on two hosts, reached by qrsh, their exit codes, their ends, and what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.hosts import HostsUnavailable
from harness.ringrun_job import ROOT, needs_mpi
from sge import PARALLEL_ENVIRONMENT, SgeCluster, sge_cluster

pytestmark = needs_mpi

WHERE = """
import os
import numpy as np
import ringtrain as hvd
hvd.init()
print("rank", hvd.rank(), "of", hvd.size(), "on", os.uname().nodename, hvd.allreduce(np.ones(1), op=hvd.Sum)[0])
"""
LOOP = """
import time
import numpy as np
import ringtrain as hvd
hvd.init()
print("ready", hvd.rank(), flush=True)
while True:
    hvd.allreduce(np.ones(1))
    time.sleep(0.05)
"""
FAILS = "import ringtrain as hvd; hvd.init(); assert hvd.rank() != 3, 'three'"
TELLS = "import os; print(os.environ['DMLC_ROLE'], os.environ['DMLC_TASK_ID'], os.uname().nodename)"


SCRIPTS = {"where.py": WHERE, "loop.py": LOOP, "fails.py": FAILS, "tells.py": TELLS}


@pytest.fixture(scope="module")
def cluster() -> Iterator[SgeCluster]:
    try:
        with sge_cluster(2) as cluster:
            for name, text in SCRIPTS.items():
                (cluster.home / name).write_text(text)
            yield cluster
    except HostsUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: SgeCluster) -> Iterator[None]:
    yield
    wait_until(lambda: not cluster.jobs_on(0) + cluster.jobs_on(1), lambda: cluster.jobs_on(0) + cluster.jobs_on(1))


def wait_until(is_true: Callable[[], bool], what: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, what()
        time.sleep(0.1)


VARIABLES = {
    "RINGTRAIN_NETWORK": "auto",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": ROOT,
}
FOUR = ("-pe", PARALLEL_ENVIRONMENT, "4")


def run(cluster: SgeCluster, *words: str, **more: str) -> tuple[int, str]:
    done = cluster.run(*words, **{**VARIABLES, **more})
    return done.returncode, done.stdout


def batch(cluster: SgeCluster, *words: str, **more: str) -> tuple[int, str]:
    """The exit code of a job that runs `words`, and what it printed."""
    out = cluster.home / f"out-{time.monotonic_ns()}"
    asked = ("qsub", "-sync", "y", "-cwd", "-V", "-j", "y", "-o", str(out), *FOUR, "-b", "y", "-shell", "n")
    code, said = run(cluster, *asked, *words, **more)
    return code, out.read_text() if out.exists() else said


def lines_of_where(cluster: SgeCluster) -> set[tuple[int, str]]:
    """How many ranks are on each host."""
    return {(2, name) for name in cluster.names}


def places_in(output: str) -> set[tuple[int, str]]:
    """The same as `lines_of_where`, if the four ranks have found each other."""
    lines = [line[line.index("rank") :].split() for line in output.splitlines() if " of 4 on " in line]
    assert sorted(words[1] for words in lines) == ["0", "1", "2", "3"], output
    assert {words[6] for words in lines} == {"4.0"}, output
    hosts = [words[5] for words in lines]
    return {(hosts.count(name), name) for name in hosts}


@pytest.mark.parametrize("network", ["mpi", pytest.param("sockets", marks=pytest.mark.slow)])
def test_ringrun_starts_a_rank_in_each_slot_of_a_job(cluster: SgeCluster, network: str) -> None:
    code, output = batch(cluster, "ringrun", "python", str(cluster.home / "where.py"), RINGTRAIN_NETWORK=network)
    assert (code, places_in(output)) == (0, lines_of_where(cluster)), output


@pytest.mark.slow
def test_a_job_is_written_submitted_and_waited_for(cluster: SgeCluster) -> None:
    out = cluster.home / "batch.txt"
    asked = ("--launcher", "sge", "-np", "4", f"--mpi-args=-o {out}")
    code, shown = run(cluster, "ringrun", *asked, "--dry-run", "python", "train.py")
    lines = shown.splitlines()
    directives = ["-S /bin/bash", "-N train.py", "-cwd", "-V", "-j y", f"-pe {PARALLEL_ENVIRONMENT} 4", f"-o {out}"]
    assert code == 0 and lines[1:-1] == [f"#$ {words}" for words in directives] and lines[0] == "#!/bin/bash"
    code, output = run(cluster, "ringrun", *asked, "python", str(cluster.home / "where.py"))
    assert (code, places_in(out.read_text())) == (0, lines_of_where(cluster)), output


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_rank_that_failed_first(cluster: SgeCluster) -> None:
    out = cluster.home / "failed.txt"
    asked = ("--launcher", "sge", "-np", "4", f"--mpi-args=-o {out}")
    code, output = run(cluster, "ringrun", *asked, "python", str(cluster.home / "fails.py"))
    assert code == 1 and "the first to fail was rank 3 on" in out.read_text(), output


@pytest.mark.slow
def test_workers_and_servers_are_started_in_the_slots_of_a_job(cluster: SgeCluster) -> None:
    out = cluster.home / "roles.txt"
    asked = ("-n", "2", "-s", "2", "--launcher", "sge", f"--mpi-args=-o {out}")
    code, output = run(cluster, "ringlaunch", *asked, "python", str(cluster.home / "tells.py"))
    assert code == 0, output + out.read_text()
    told = sorted(line.partition("] ")[2].split() for line in out.read_text().splitlines() if line.startswith("["))
    assert [words[:2] for words in told] == [
        *(["scheduler", "0"], ["server", "0"], ["server", "1"], ["worker", "0"], ["worker", "1"]),
    ]
    assert {words[2] for words in told if words[0] == "worker"} <= set(cluster.names)
    assert {words[2] for words in told} == set(cluster.names)


@pytest.mark.slow
def test_the_hosts_of_a_job_are_checked_without_ssh(cluster: SgeCluster) -> None:
    code, output = batch(cluster, "ringrun", "--check")
    assert code == 0 and "cannot be used" not in output, output
    assert all(name in output for name in cluster.names)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["mpi", "sockets"])
def test_a_job_that_is_deleted_leaves_nothing(cluster: SgeCluster, network: str) -> None:
    out = cluster.home / f"deleted-{network}.txt"
    words = (
        "ringrun",
        "--launcher",
        "sge",
        "-np",
        "4",
        f"--mpi-args=-o {out}",
        "python",
        str(cluster.home / "loop.py"),
    )
    with subprocess.Popen(
        cluster.command(words),
        env={**os.environ, **cluster.environment, **VARIABLES, "RINGTRAIN_NETWORK": network},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as submitted:
        wait_until(
            lambda: out.exists() and out.read_text().count("ready") == 4, lambda: out.exists() and out.read_text()
        )
        cluster.run("qdel", "-u", "trainer")
        printed, _ = submitted.communicate(timeout=60)
    assert submitted.returncode != 0, printed


@pytest.mark.slow
def test_a_job_inside_a_job_is_refused(cluster: SgeCluster) -> None:
    code, output = batch(cluster, "ringrun", "--launcher", "sge", "-np", "2", "python", str(cluster.home / "where.py"))
    assert code == 2 and "--launcher sge submits a batch job, but this is one already" in output
