"""Processes of an elastic job at its rendezvous: shutdown() and init() again, by hand."""

import os
import re
import signal
import socket
import time

import pytest
from elastic_ranks import Done, Failed, Left, Stuck, elastic_job
from harness.clocks import require_within

from ringtrain.job.rendezvous import generations
from ringtrain.job.rendezvous.generations import Formed, Waiting

LOOP = """
import os, time, numpy as np, ringtrain as hvd
from ringtrain.job import elastic_client, session
hvd.init()
step = 0
while True:
    print(f"generation {elastic_client.seat().generation}: rank {hvd.rank()} of {hvd.size()}", flush=True)
    try:
        step = int(hvd.broadcast(np.array([step]), 0, name="step")[0])
        while step < STEPS:
            time.sleep(0.005)
            total = hvd.allreduce(np.array([1, elastic_client.has_news()]), op=hvd.Sum)
            assert total[0] == hvd.size()
            step += 1
            elastic_client.set_commits(step)
            if total[1]: break
        else:
            break
    except hvd.HorovodInternalError as error:
        print(f"failed: {error}", flush=True)
    session.begin_again()
print("well", step, hvd.size(), flush=True)
"""
LONG = LOOP.replace("STEPS", "100000")
OPTIONS = pytest.mark.parametrize("memory", ["auto", "off"], ids=["shm", "sockets"])


@OPTIONS
def test_the_others_go_on_when_one_is_killed_and_a_newcomer_gets_in(tmp_path, memory):
    with elastic_job(LOOP.replace("STEPS", "400"), tmp_path, 3, RINGTRAIN_SHARED_MEMORY=memory) as job:
        processes = list(job.processes)
        assert job.formed(1).members == [process.member for process in processes]
        processes[0].wait_for("generation 1")
        processes[1].kill()
        assert job.formed(2).members == [processes[0].member, processes[2].member]
        (newcomer,) = job.start()
        assert job.formed(3).members[-1] == newcomer.member
        for process in (processes[0], processes[2], newcomer):
            assert process.ends().endswith("well 400 3\n")
        job.wait_for(lambda one: isinstance(one, Done))
        assert [one.member for one in job.of(Left)] == [processes[1].member]
        assert job.server.summary().generations == 3


@pytest.mark.parametrize("victims", [[0], [2], [0, 1], [0, 1, 2]], ids=str)
def test_any_may_be_killed(tmp_path, victims):
    with elastic_job(LOOP.replace("STEPS", "200"), tmp_path, 4) as job:
        for process in job.processes:
            process.wait_for("generation 1")
        for victim in victims:
            os.kill(job.processes[victim].popen.pid, signal.SIGKILL)
        for number, process in enumerate(job.processes):
            if number not in victims:
                assert process.ends().endswith(f"well 200 {4 - len(victims)}\n")


def test_a_stopped_process_is_named_and_then_left_behind(tmp_path):
    with elastic_job(LONG, tmp_path, 3, RINGTRAIN_STALL_SHUTDOWN_TIME_S="1") as job:
        job.processes[0].wait_for("generation 1")
        os.kill(job.processes[1].popen.pid, signal.SIGSTOP)
        stuck = job.wait_for(lambda one: isinstance(one, Stuck))
        assert stuck.member == job.processes[1].member
        job.processes[1].kill()
        assert job.formed(2).size == 2


def test_a_process_that_is_stopped_in_init_is_named_and_then_left_behind(tmp_path, monkeypatch):
    for name, seconds in (("SILENCE_IN_INIT_S", 2.0), ("_REPORTED_AFTER_S", 1.0), ("_QUIET_S", 0.5), ("_PING_S", 0.2)):
        monkeypatch.setattr(generations, name, seconds)
    waits = "while os.environ['RINGTRAIN_MEMBER'] == 'here/2' and not os.path.exists('FILE'): time.sleep(0.01)\n"
    program = LONG.replace("hvd.init()", waits.replace("FILE", str(tmp_path / "now")) + "hvd.init()", 1)
    with elastic_job(program, tmp_path, 3) as job:
        stopped = job.processes[1]
        stopped.wait_for_connection()
        time.sleep(0.5)
        os.kill(stopped.popen.pid, signal.SIGSTOP)
        (tmp_path / "now").touch()
        report = job.wait_for(lambda one: isinstance(one, Waiting))
        assert (report.generation, report.what, report.silent) == (1, "init", (stopped.member,))
        assert job.wait_for(lambda one: isinstance(one, Stuck)).member == stopped.member
        stopped.kill()
        assert job.formed(2).members == [job.processes[0].member, job.processes[2].member]
        job.processes[0].wait_for("generation 2: rank 0 of 2")


def test_a_spare_waits_for_its_turn(tmp_path):
    with elastic_job(LONG, tmp_path, 2, most=2) as job:
        job.formed(1)
        (spare,) = job.start()
        spare.wait_for_connection()
        time.sleep(0.5)
        assert spare.output() == ""
        job.processes[0].kill()
        assert job.formed(2).members == [job.processes[1].member, spare.member]


def test_a_process_that_comes_when_others_are_done_ends_well(tmp_path):
    with elastic_job(LOOP.replace("STEPS", "3"), tmp_path, 2) as job:
        job.wait_for(lambda one: isinstance(one, Done))
        (late,) = job.start()
        assert "the job has come to its end" in late.ends()


def test_too_few_processes_fail_with_a_sentence(tmp_path):
    with elastic_job(LONG, tmp_path, 2, least=2, timeout_s=4.0) as job:
        job.processes[0].wait_for("generation 1")
        job.processes[1].kill()
        job.wait_for(lambda one: isinstance(one, Failed))
        assert "RingtrainError: 1 process of at least 2 have come in 4 s" in job.processes[0].ends(1)


def test_an_exception_of_a_script_is_told_to_the_others_and_to_the_launcher(tmp_path):
    dies = "if os.path.exists('FILE') and os.environ['RINGTRAIN_MEMBER'] == 'here/1': 1 / 0"
    program = LONG.replace("step += 1", f"step += 1\n            {dies}")
    with elastic_job(program.replace("FILE", str(tmp_path / "now")), tmp_path, 3) as job:
        job.processes[1].wait_for("generation 1")
        (tmp_path / "now").touch()
        text = job.processes[1].ends(1)
        assert "ZeroDivisionError" in text
        left = job.wait_for(lambda one: isinstance(one, Left))
        assert left.text == "ZeroDivisionError: division by zero"
        assert job.formed(2).size == 2
        assert re.search("failed: rank 1 .* raised ZeroDivisionError", job.processes[0].output())


def test_a_newcomer_with_other_options_is_refused_and_the_others_go_on(tmp_path):
    with elastic_job(LONG, tmp_path, 2) as job:
        job.processes[0].wait_for("generation 1")
        (other,) = job.start(RINGTRAIN_CACHE_CAPACITY="77")
        assert "cache_capacity must be the same on all ranks: rank 0 has" in other.ends(1)
        job.wait_for(lambda one: isinstance(one, Formed) and one.generation > 2 and one.size == 2)


def test_a_forked_child_does_not_keep_its_parent_in_the_job(tmp_path):
    forks = "import os, time\nif os.fork() == 0: time.sleep(30); os._exit(0)\nstep = 0"
    with elastic_job(LONG.replace("step = 0", forks, 1), tmp_path, 2) as job:
        job.processes[1].wait_for("generation 1")
        job.processes[1].kill()
        assert job.formed(2).size == 1


def test_strangers_change_nothing(tmp_path):
    with elastic_job(LONG, tmp_path, 2) as job:
        job.formed(1)
        for data in (b"", b"GET / HTTP/1.0\r\n\r\n", b"ringtrv\x01" + bytes(16 + 32), bytes(100)):
            with socket.create_connection(("127.0.0.1", job.server.port)) as sock:
                sock.sendall(data)
        (newcomer,) = job.start()
        assert job.formed(2).members[-1] == newcomer.member


def test_arguments_that_an_elastic_job_cannot_take_are_refused(tmp_path):
    with elastic_job("import ringtrain as hvd; hvd.init()", tmp_path, 1, RINGTRAIN_NETWORK="mpi") as job:
        assert "ValueError: network=mpi: elastic jobs talk over sockets" in job.processes[0].ends(1)
    (tmp_path / "secret").unlink()
    with elastic_job("import ringtrain as hvd; hvd.init(comm=[0])", tmp_path, 1) as job:
        assert "ValueError: init(comm=...): an elastic job" in job.processes[0].ends(1)
    (tmp_path / "secret").unlink()
    with elastic_job("import ringtrain as hvd; hvd.init()", tmp_path, 1, RINGTRAIN_RENDEZVOUS="") as job:
        assert "RINGTRAIN_ELASTIC is set, but not RINGTRAIN_RENDEZVOUS" in job.processes[0].ends(1)


def test_init_makes_the_process_sets_that_fit_the_generation(tmp_path):
    program = LONG.replace(
        "hvd.init()", "sets = hvd.ProcessSet([0, 1]), hvd.ProcessSet([0, 3])\nhvd.init(process_sets=sets)"
    )
    program = program.replace("    try:", "    print(*[one.process_set_id for one in sets], flush=True)\n    try:", 1)
    with elastic_job(program, tmp_path, 4) as job:
        job.processes[0].wait_for("1 2")
        job.processes[1].kill()
        job.processes[0].wait_for("1 None")


def test_a_loss_reported_by_the_launcher_fails_every_wait(tmp_path):
    """A stopped process stands for a host that is silent: nobody else notices."""
    with elastic_job(LONG, tmp_path, 3) as job:
        job.processes[0].wait_for("generation 1")
        os.kill(job.processes[1].popen.pid, signal.SIGSTOP)
        struck = time.monotonic()
        job.server.gone("here/1", "its host is lost")
        assert job.formed(2).members == ["here/0", "here/2"]
        require_within(5, struck)
        assert "failed: rank 1 (here/1) is gone: its host is lost" in job.processes[0].output()
