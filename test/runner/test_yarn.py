"""ringrun on YARN, of which there is a double: ranks in containers, their output, ends and exit codes, and refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.hosts import HostsUnavailable
from harness.ringrun_job import ROOT, processes_with, ringrun, wait_until
from yarn import CLIENT, JAR, OF_CLUSTER, YarnDouble, site, yarn_double

from ringtrain.runner import command
from ringtrain.runner.hosts import UsageError
from ringtrain.runner.start.yarn import ResourceManager, resource_managers

WHERE = """
import os
import numpy as np
import ringtrain as hvd
hvd.init()
total = hvd.allreduce(np.arange(3.0) + hvd.rank(), op=hvd.Sum)
print("rank", hvd.rank(), hvd.local_rank(), hvd.size(), os.uname().nodename, list(map(int, total)), os.getcwd())
"""
WAITS = """
import signal, sys, time
import ringtrain as hvd
hvd.init()
def save(*_):
    print("saved", hvd.rank(), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""
ROLES = """
import os, sys
import numpy as np
from ringtrain import kvstore
kv = kvstore.create("dist_sync")
kv.init("w", np.zeros(3))
kv.push("w", np.arange(3.0) + kv.rank)
value = kv.pull("w")
print("worker", kv.rank, kv.num_workers, os.uname().nodename, os.environ["DMLC_JOB_CLUSTER"], value.tolist())
kv.barrier()
sys.exit(5 if "fails" in sys.argv and kv.rank == 1 else 0)
"""
FAILS = "import ringtrain as hvd, sys; hvd.init(); sys.exit(7 if hvd.rank() == 1 else 0)"
YARN = ("--launcher", "yarn", "--network", "sockets")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[YarnDouble]:
    try:
        with yarn_double(tmp_path / "cluster", ["n1", "n2"]) as double:
            yield double
            wait_until(lambda: not double.containers and double.files == [], 20)
            assert processes_with(OF_CLUSTER, str(tmp_path / "cluster")) == []
    except HostsUnavailable as reason:
        pytest.skip(str(reason))


def start(cluster: YarnDouble, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ringtrain.run", *YARN, *words],
        env={**os.environ, "PYTHONPATH": ROOT, **cluster.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_until(job: subprocess.Popen[str], text: str, times: int = 1) -> str:
    assert job.stdout is not None
    said = ""
    while said.count(text) < times:
        line = job.stdout.readline()
        assert line, said
        said += line
    return said


def test_importing_what_runs_on_other_hosts_leaves_the_path_of_python_alone() -> None:
    code = (
        "import sys; before = list(sys.path); import ringtrain.runner.start.yarn, ringtrain.runner.start.__main__; "
        "assert sys.path == before, sys.path"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_rank_runs_in_each_container_and_those_of_a_host_are_beside_each_other(cluster: YarnDouble) -> None:
    job = ringrun(*YARN, "-np", "4", "--mpi-args=-container_memory 2048", "python", "-c", WHERE, **cluster.environment)
    assert job.returncode == 0, job.stderr
    # the sum of 0, 1 and 2, each four times, and of the ranks
    told = [f"[{rank}] rank {rank} {rank % 2} 4 {{}} [6, 10, 14] {os.getcwd()}" for rank in range(4)]
    first, second = ("n1", "n2") if "rank 0 0 4 n1" in job.stdout else ("n2", "n1")
    hosts = [first, first, second, second]
    assert sorted(job.stdout.splitlines()) == [line.format(host) for line, host in zip(told, hosts, strict=True)]
    assert cluster.app["finalStatus"] == "SUCCEEDED"
    assert cluster.asked["-container_memory"] == "2048" and cluster.asked["-num_containers"] == "4"
    assert int(cluster.asked["-timeout"]) > 10**9  # the client would end the job after ten minutes


def test_the_secret_of_a_job_lies_where_its_user_alone_can_read_it_and_goes_with_the_job(cluster: YarnDouble) -> None:
    assert ringrun(*YARN, "-np", "1", "python", "-c", "", **cluster.environment).returncode == 0
    name = cluster.asked["-appname"]
    assert cluster.modes == [0o700]
    begin, *_, last = cluster.commands
    assert begin == ["fs", "-mkdir", name] and last == ["fs", "-rm", "-r", "-f", "-skipTrash", name]
    (client,) = [words for words in cluster.commands if words[0] == "jar"]
    assert client[2] == CLIENT and client[1].endswith(JAR)
    assert not os.path.exists(cluster.asked["-shell_script"])
    assert not [word for word in client if len(word) == 64 and set(word) <= set("0123456789abcdef")]


def test_the_exit_code_is_that_of_the_rank_that_failed_first(cluster: YarnDouble) -> None:
    job = ringrun(*YARN, "-np", "2", "python", "-c", FAILS, **cluster.environment)
    assert job.returncode == 7
    assert "ringrun: the first to fail was rank 1 on n" in job.stderr


def test_ranks_have_time_to_end_when_ringrun_is_told_to(cluster: YarnDouble) -> None:
    with start(cluster, "-np", "2", "python", "-c", WAITS) as job:
        read_until(job, "ready", 2)
        job.terminate()
        rest, _ = job.communicate(timeout=30)
    assert job.returncode == 143 and sorted(rest.splitlines()) == ["[0] saved 0", "[1] saved 1"]


def test_a_job_that_waits_for_containers_says_so_and_goes_when_it_is_told_to(cluster: YarnDouble) -> None:
    cluster.room = 1
    with start(cluster, "-np", "2", "python", "-c", WAITS) as job:
        said = read_until(job, "waits for its containers")
        assert said == "ringrun: application_1700000000000_0001 waits for its containers: [no room yet]\n"
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=30)
    assert job.returncode == 130 and cluster.app["state"] == "KILLED"


def test_too_few_containers_are_not_waited_for_longer_than_was_said(cluster: YarnDouble) -> None:
    cluster.room = 1
    job = ringrun(*YARN, "-np", "2", "--start-timeout", "3", "python", "-c", WAITS, **cluster.environment)
    assert job.returncode == 1 and "did not start in 3 s" in job.stderr
    assert cluster.app["state"] == "KILLED"


def test_a_job_that_somebody_ends_in_yarn_is_lost(cluster: YarnDouble) -> None:
    with start(cluster, "-np", "2", "python", "-c", WAITS) as job:
        read_until(job, "ready", 2)
        cluster.kill()
        rest, _ = job.communicate(timeout=30)
    assert job.returncode != 0
    assert "YARN says of application_1700000000000_0001: KILLED: Application killed by user." in rest


def test_the_words_of_a_client_that_submits_nothing_are_shown(cluster: YarnDouble) -> None:
    job = ringrun(*YARN, "-np", "2", "--mpi-args=-queue ml", "python", "-c", "", **cluster.environment)
    assert job.returncode == 1
    assert "Hadoop's DistributedShell ended with exit code 1" in job.stderr
    assert "    ERROR distributedshell.Client: no queue ml" in job.stderr


def launch(cluster: YarnDouble, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ringtrain.launch", "--launcher", "yarn", *words],
        env={**os.environ, "PYTHONPATH": ROOT, **cluster.environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_servers_and_workers_run_in_containers_and_the_scheduler_here(cluster: YarnDouble) -> None:
    job = launch(cluster, "-n", "2", "-s", "2", "--mpi-args=-container_memory 2048", "python", "-c", ROLES)
    assert job.returncode == 0, job.stderr
    told = sorted(job.stdout.splitlines())
    assert [line.replace("n1", "n").replace("n2", "n") for line in told] == [
        f"[worker {worker}] worker {worker} 2 n yarn [1.0, 3.0, 5.0]" for worker in range(2)
    ]
    assert cluster.asked["-num_containers"] == "4" and cluster.asked["-container_memory"] == "2048"
    assert cluster.app["finalStatus"] == "SUCCEEDED"


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_worker_that_failed(cluster: YarnDouble) -> None:
    job = launch(cluster, "-n", "2", "-s", "1", "python", "-c", ROLES, "fails")
    assert job.returncode == 5
    assert "ringlaunch: the first to fail was worker 1 on n" in job.stderr


def test_impossible_jobs_are_refused_before_anything_is_submitted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    refused = {
        ("-H", "h1:2"): "--launcher yarn leaves the hosts to YARN",
        ("-np", "2", "--min-np", "1"): "--launcher yarn has no elastic jobs",
        ("-np", "2", "--network", "mpi"): "--launcher yarn starts ranks without an MPI",
        ("-np", "2", "--binding-args=--bind-to none"): "YARN binds no ranks",
        ("-np", "2", "--check"): "--check asks hosts, which YARN chooses for each job",
        ("-np", "2"): "--launcher yarn needs hadoop",
    }
    for words, sentence in refused.items():
        assert command.main(["--launcher", "yarn", *words, "python", "-c", ""]) == 2
        assert sentence in capsys.readouterr().err, words


def test_the_resource_manager_is_found_where_hadoop_finds_it(tmp_path: Path) -> None:
    def found(settings: dict[str, str]) -> list[str]:
        (tmp_path / "yarn-site.xml").write_text(site(settings))
        return resource_managers({"HADOOP_CONF_DIR": str(tmp_path)})

    prefix = "yarn.resourcemanager"
    assert found({f"{prefix}.hostname": "rm"}) == ["http://rm:8088"]
    own = {f"{prefix}.hostname": "rm", f"{prefix}.webapp.address": "${yarn.resourcemanager.hostname}:9000"}
    assert found(own) == ["http://rm:9000"]
    assert found({f"{prefix}.hostname": "rm", "yarn.http.policy": "HTTPS_ONLY"}) == ["https://rm:8090"]
    two = {f"{prefix}.ha.rm-ids": "a, b", f"{prefix}.hostname.a": "r1", f"{prefix}.hostname.b": "r2"}
    assert found(two) == ["http://r1:8088", "http://r2:8088"]
    assert resource_managers({"RINGTRAIN_YARN_RESOURCE_MANAGER": "http://x:1/,http://y:2"}) == [
        "http://x:1",
        "http://y:2",
    ]
    with pytest.raises(UsageError, match="set RINGTRAIN_YARN_RESOURCE_MANAGER, as in"):
        found({})


def test_the_one_of_two_resource_managers_that_answers_is_asked(cluster: YarnDouble) -> None:
    cluster.app = {"id": "application_1_0001", "state": "FINISHED", "finalStatus": "FAILED", "diagnostics": "codes=[1]"}
    manager = ResourceManager(["http://127.0.0.1:9", cluster.address])
    status = manager.status("application_1_0001")
    assert status is not None and status.has_ended and str(status) == "FINISHED, FAILED: codes=[1]"
    assert manager.status("application_1_0002") is None
    assert manager.kill("application_1_0001") and not ResourceManager(["http://127.0.0.1:9"]).kill("application_1_0001")
