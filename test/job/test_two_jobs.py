"""Two jobs that were told the same place to meet do not exchange ranks; a rank that two processes have is refused."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.clocks import require_within
from harness.hosts import SimulatedHosts, hosts_or_skip
from harness.ringrun_job import wait_until
from harness.socket_ranks import END_S, free_port, started

from ringtrain.job import launched_by

SUM = """
import sys, numpy as np, ringtrain as hvd
hvd.init()
total = hvd.allreduce(np.full(3, float(sys.argv[-1])), op=hvd.Sum)
print(f"sum {total[0]:g}", flush=True)
"""
TRAIN_UNTIL_TOLD = """
import os
while not hvd.allreduce(np.array(float(os.path.exists(os.environ["END"]))), op=hvd.Sum):
    pass
"""
HOLD_THE_RANK = """
import time, ringtrain as hvd
from ringtrain.job.rendezvous import server
server.connect = lambda *place, **more: (print("claimed", flush=True), time.sleep(1000))
hvd.init()
"""
SAME_RANK = "ValueError: two processes are rank {}: pid {} on .* and pid {} on .*another MASTER_PORT"


class Starter:
    """Starts processes one by one, each a rank by the variables that a user sets."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path):
        self._stack = stack
        self._folder = folder
        self.port = free_port()

    def by_hand(self, rank: int, size: int = 2, *, program: str = SUM, adds: int = 1, **more: Any) -> Any:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "RANK": str(rank), "WORLD_SIZE": str(size)}
        return self.process(program, adds, **{**place, **more})

    def step(self, rank: int, job: int, step: int, adds: int) -> Any:
        """A task of srun; the ports where the tasks of a step meet follow from 16 x job + step."""
        of_step = {"JOB_ID": job, "STEP_ID": step, "PROCID": rank, "LOCALID": rank, "NODEID": 0}
        of_step |= {"STEP_NUM_TASKS": 2, "STEP_NODELIST": "127.0.0.1", "STEP_TASKS_PER_NODE": "2"}
        return self.process(SUM, adds, **{f"SLURM_{name}": str(value) for name, value in of_step.items()})

    def process(self, program: str, adds: int, on: tuple[SimulatedHosts, int] | None = None, **variables: str) -> Any:
        usual = {"RINGTRAIN_RENDEZVOUS": "", "RINGTRAIN_SIZE": "", "RINGTRAIN_RANK": "", "RINGTRAIN_SECRET_FILE": ""}
        usual |= {
            "RINGTRAIN_NETWORK": "sockets",
            "XDG_CONFIG_HOME": str(self._folder),
            "RINGTRAIN_START_TIMEOUT_S": "20",
        }
        program = f"import sys; sys.argv.append({adds})\n{program}"
        hosts = None if on is None else on[0].alone(on[1])
        ranks = self._stack.enter_context(started(program, 1, self._folder, hosts, **{**usual, **variables}))
        return ranks.processes[0]


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    with contextlib.ExitStack() as stack:
        yield Starter(stack, tmp_path)


def end(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=END_S)
    assert process.returncode == code, output
    return output


def wait_for_server(port: int) -> None:
    """Waits until a rank 0 listens there."""

    def listens() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    wait_until(listens)


def require(output: str, pattern: str) -> None:
    assert re.search(pattern, output), output


def test_a_second_rank_0_ends_both_jobs_that_wait(starter: Starter) -> None:
    """Nothing tells which of the ranks that come later are of which job."""
    first = starter.by_hand(0)
    wait_for_server(starter.port + 1)
    second = starter.by_hand(0, adds=100)
    for process in (second, first):
        require(end(process, 1), SAME_RANK.format(0, first.pid, second.pid))


def test_a_rank_that_two_processes_have_is_refused_while_the_job_runs(starter: Starter, tmp_path: Path) -> None:
    program, told = SUM + TRAIN_UNTIL_TOLD, tmp_path / "end"
    ranks = [starter.by_hand(rank, program=program, END=str(told)) for rank in range(2)]
    for process in ranks:
        assert process.stdout.readline() == "sum 2\n"
    for rank, process in enumerate(ranks):
        other = starter.by_hand(rank, adds=100)
        require(end(other, 1), SAME_RANK.format(rank, process.pid, other.pid))
    told.touch()
    for process in ranks:
        end(process)


@pytest.mark.parametrize("claims", ["of one host", "of two hosts"])
def test_all_ranks_that_wait_hear_of_a_rank_that_two_processes_have(starter: Starter, claims: str) -> None:
    """Of another host the kernel of this one does not know: then the server of rank 0 finds it."""
    program = SUM
    if claims == "of two hosts":
        program = "from ringtrain.job.rendezvous import claim; claim.claim = lambda *place: None\n" + SUM
    first = starter.by_hand(0, size=3, program=program)
    wait_for_server(starter.port + 1)
    one, other = (starter.by_hand(1, size=3, program=program) for _ in range(2))
    outputs = [end(process, 1) for process in (first, one, other)]
    either = f"({one.pid}|{other.pid})"
    for output in outputs:
        require(output, SAME_RANK.format(1, either, either))


def test_two_steps_of_srun_with_the_same_ports_are_two_jobs(starter: Starter) -> None:
    job = 70_000 + starter.port % 500  # with 16 x job + step the same as of step 0 of the next job
    port = 20_000 + (job + 1) * 16 * 8 % 10_000
    first = starter.step(0, job, 16, adds=1)
    wait_for_server(port)
    second = starter.step(0, job + 1, 0, adds=100)
    wait_for_server(port + 1)
    later = [starter.step(1, job + 1, 0, adds=100), starter.step(1, job, 16, adds=1)]
    assert [end(one) for one in (first, later[1])] == ["sum 2\n"] * 2
    assert [end(one) for one in (second, later[0])] == ["sum 200\n"] * 2


@pytest.mark.parametrize(
    ("size", "batch_jobs", "text"),
    [
        (3, ("", ""), "rank 1 of 3 .* came to a job of 2 ranks"),
        (2, ("1", "2"), "is of SLURM_JOB_ID=2, and rank 0 of 2 .* of SLURM_JOB_ID=1"),
    ],
)
def test_a_rank_of_another_job_is_refused_and_the_job_goes_on(
    starter: Starter, size: int, batch_jobs: tuple[str, str], text: str
) -> None:
    first = starter.by_hand(0, SLURM_JOB_ID=batch_jobs[0])
    wait_for_server(starter.port + 1)
    require(end(starter.by_hand(1, size, adds=100, SLURM_JOB_ID=batch_jobs[1]), 1), f"ValueError: .*{text}")
    assert end(starter.by_hand(1, SLURM_JOB_ID=batch_jobs[0])) == "sum 2\n"
    output = end(first)
    require(output, f"ringtrain: .*{text}")  # a warning at once
    assert output.endswith("sum 2\n")


@pytest.mark.parametrize("ranks", [(0, 2), (2, 0), (0, 2), (2, 0)])  # by chance either one is heard first
def test_a_rank_that_the_job_does_not_have_is_refused_on_all_ranks(ranks: tuple[int, ...], starter: Starter) -> None:
    for process in [starter.by_hand(rank) for rank in ranks]:
        require(end(process, 1), "ValueError: rank 2 of 2 .*ranks are numbered from 0")


def test_an_init_that_timed_out_may_be_repeated(starter: Starter) -> None:
    twice = """
try:
    hvd.init(start_timeout_s=0.1)
except hvd.StalledError:
    print("again", flush=True)
hvd.init()
"""
    first = starter.by_hand(0, program=SUM.replace("hvd.init()\n", twice))
    assert first.stdout.readline() == "again\n"
    assert end(starter.by_hand(1)) == "sum 2\n"
    assert end(first) == "sum 2\n"


@pytest.mark.parametrize(("rank", "size"), [("x", "2"), ("-1", "2"), ("0", "two"), ("1", "1")])
@pytest.mark.parametrize("prefix", ["RINGTRAIN_", ""])
def test_a_number_of_a_rank_that_is_none_is_refused(prefix: str, rank: str, size: str) -> None:
    """Each process would be a job of its own."""
    names = ("RINGTRAIN_RANK", "RINGTRAIN_SIZE") if prefix else ("RANK", "WORLD_SIZE")
    of_job = dict(zip(names, (rank, size), strict=True))
    with pytest.raises(ValueError, match=r"(is not a number|is not a rank)"):
        launched_by.detect({**of_job, "MASTER_ADDR": "h1", "MASTER_PORT": "29500"})


def test_ranks_of_another_job_that_reach_a_running_one_from_another_host_are_refused(
    starter: Starter, tmp_path: Path
) -> None:
    """The claims of a host know nothing of another one: rank 0 keeps its place while its job runs."""
    told = tmp_path / "end"
    with hosts_or_skip(2) as hosts:
        there = {"MASTER_ADDR": hosts.names[0], "END": str(told)}
        ranks = [starter.by_hand(r, program=SUM + TRAIN_UNTIL_TOLD, on=(hosts, r), **there) for r in range(2)]
        for process in ranks:
            assert process.stdout.readline() == "sum 2\n"
        began_s = time.monotonic()
        for rank, first in enumerate(ranks):
            here, there_too = (f"host{one}" for one in (rank, 1 - rank))
            second = starter.by_hand(rank, on=(hosts, 1 - rank), **there)
            text = f"two processes are rank {rank}: pid {first.pid} on .*{here} and pid {second.pid} on .*{there_too}"
            require(end(second, 1), text)
        require(end(starter.by_hand(2, 3, on=(hosts, 1), **there), 1), "rank 2 of 3 .* to a running job of 2 ranks")
        require_within(15, began_s)
        told.touch()
        for process in ranks:
            end(process)


def test_all_ranks_hear_of_a_rank_of_an_older_job_that_still_lives(starter: Starter) -> None:
    old = starter.by_hand(1, program=HOLD_THE_RANK)
    assert old.stdout.readline() == "claimed\n"
    first = starter.by_hand(0)
    wait_for_server(starter.port + 1)
    second = starter.by_hand(1)
    for process in (second, first):
        require(end(process, 1), SAME_RANK.format(1, old.pid, second.pid))
    old.kill()
