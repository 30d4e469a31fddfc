"""Links between processes of an elastic job and its rendezvous that break, for a moment or for ever; nobody dies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from elastic_ranks import Formed, Job, Left, elastic_job
from elastic_storm import require_same_weights, training, undisturbed
from harness.clocks import require_within
from harness.hosts import SimulatedHosts, hosts_or_skip

# No rank is on the host of the rendezvous.
ELSEWHERE = {"ON_HOSTS": "1 2"}
STEPS, LONG = 200, 100_000


def clean(folder: Path) -> Any:
    (folder / "clean").mkdir()
    return undisturbed(folder / "clean", STEPS)


def impatient(folder: Path, steps: int, patience_s: float) -> list[str]:
    """A training whose processes wait so long for their rendezvous."""
    file, *arguments = training(folder, steps)
    (program := folder / "impatient.py").write_text(
        "import runpy\nfrom ringtrain.job import elastic_client\n"
        f"elastic_client._PATIENCE_S = {patience_s}\nrunpy.run_path({file!r}, run_name='__main__')\n"
    )
    return [str(program), *arguments]


def cut_off(hosts: SimulatedHosts, host: int) -> None:
    """From now on all packets of the host to the first one are lost."""
    of_nobody = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
    hosts.run_on(host, "ip", "neigh", "replace", hosts.address(0), *of_nobody, "dev", "eth0")


def wait_for_all(job: Job, text: str) -> None:
    for process in job.processes:
        process.wait_for(text)


def test_connections_to_the_rendezvous_that_are_reset_cost_no_generation(tmp_path):
    with hosts_or_skip(2) as hosts, elastic_job(training(tmp_path, STEPS), tmp_path, 4, hosts=hosts) as job:
        job.processes[0].wait_for("step 20 ")
        for number in range(6):
            hosts.reset_connections(number % 2, job.server.port)
            time.sleep(0.2)
        for process in job.processes:
            assert f"well {STEPS}" in process.ends()
        assert len(job.of(Formed)) == 1 and not job.of(Left)
    require_same_weights(tmp_path, clean(tmp_path))


def test_a_process_that_is_killed_right_after_a_reset_is_left_behind(tmp_path):
    with hosts_or_skip(2) as hosts, elastic_job(training(tmp_path, STEPS), tmp_path, 4, hosts=hosts) as job:
        job.processes[0].wait_for("step 20 ")
        hosts.reset_connections(1, job.server.port)
        job.processes[3].kill()
        assert job.formed(2).size == 3
        for process in job.processes[:3]:
            assert f"well {STEPS}" in process.ends()
    require_same_weights(tmp_path, clean(tmp_path))


@pytest.mark.parametrize("seconds", [1, 5])
def test_processes_of_a_host_that_was_cut_off_come_back_with_their_state(tmp_path, seconds):
    program = training(tmp_path, STEPS)
    with (
        hosts_or_skip(3) as hosts,
        elastic_job(program, tmp_path, 4, hosts=hosts, RANKS_WANTED="4", **ELSEWHERE) as job,
    ):
        job.processes[0].wait_for("step 20 ")
        with hosts.unplugged(1):
            time.sleep(seconds)
        for process in job.processes:  # the same ones
            assert f"well {STEPS}" in process.ends()
    require_same_weights(tmp_path, clean(tmp_path))


def test_an_outage_of_the_link_to_the_rendezvous_costs_at_most_a_few_generations(tmp_path):
    """All processes are given up at once, and come back: training does not begin anew."""
    with (
        hosts_or_skip(3) as hosts,
        elastic_job(training(tmp_path, STEPS), tmp_path, 2, hosts=hosts, RANKS_WANTED="2", **ELSEWHERE) as job,
    ):
        job.processes[0].wait_for("step 20 ")
        with hosts.unplugged(0):
            time.sleep(3)
        for process in job.processes:
            assert f"well {STEPS}" in process.ends()
    require_same_weights(tmp_path, clean(tmp_path))


def test_ranks_train_to_the_end_without_the_host_of_the_launcher(tmp_path):
    with (
        hosts_or_skip(3) as hosts,
        elastic_job(training(tmp_path, STEPS), tmp_path, 2, hosts=hosts, **ELSEWHERE) as job,
    ):
        job.processes[0].wait_for("step 20 ")
        with hosts.unplugged(0):
            for process in job.processes:
                assert f"well {STEPS}" in process.ends()
    require_same_weights(tmp_path, clean(tmp_path))


@pytest.mark.parametrize("loss", ["host", "process"])
def test_without_the_launcher_the_next_change_of_ranks_ends_them_with_the_reason(tmp_path, loss):
    patience_s = 3
    program = impatient(tmp_path, LONG, patience_s)
    with hosts_or_skip(3) as hosts, elastic_job(program, tmp_path, 3, hosts=hosts, **ELSEWHERE) as job:
        wait_for_all(job, "step 20 ")
        if loss == "host":
            for host in (1, 2):
                cut_off(hosts, host)
        else:
            job.server.close()
        time.sleep(patience_s + 1)
        steps = job.processes[0].output().count("step ")
        job.processes[0].wait_for("step ", steps + 20)  # they go on meanwhile
        job.processes[2].kill()
        killed_s = time.monotonic()
        why = f"it has not answered for {patience_s} s" if loss == "host" else "it has ended"
        where = f"the launcher of this job, whose rendezvous is at {hosts.names[0]}:{job.server.port}, is gone"
        for process in job.processes[:2]:
            assert f"ringtrain.PeerLostError: {where}: {why}" in process.ends(1)
        require_within(8, killed_s)
