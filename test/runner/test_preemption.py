"""Preemption: all ranks save at the same step, and the job ends with exit code 75."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from harness.hosts import SimulatedHosts
from harness.preempted_job import COMMANDS, GRACE_S, LOADER, Job, Trial, carry_out, drawn, job
from harness.ringrun_job import ROOT, needs_mpi

import ringtrain as hvd
from ringtrain.ops import preemption
from ringtrain.runner.supervise import rank_wrapper

TRIALS = [
    Trial(),
    Trial(ranks=3, target="rank"),
    Trial("ringrun over MPI", target="everything"),
    Trial("ringrun over MPI", signal=signal.SIGUSR1, again_s=0.2),
    Trial("mpirun", signal=signal.SIGUSR1),
    Trial("mpirun", target="ranks", busy_rank=1),
    Trial("elastic", signal=signal.SIGUSR2),
    Trial("elastic", target="rank"),
]


@needs_mpi
@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_all_ranks_save_at_one_step_and_the_job_ends_with_75(trial: Trial) -> None:
    carry_out(trial)


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1006))
def test_a_drawn_signal_at_a_drawn_moment_does_the_same(seed: int) -> None:
    carry_out(drawn(seed))


@pytest.mark.slow
def test_workers_of_a_dataloader_leave_sigusr1_to_their_rank() -> None:
    pytest.importorskip("torch")
    with job(COMMANDS["ringrun"], 2, script=LOADER) as running:
        running.wait_for("began", 2)
        running.signal(signal.SIGUSR1, "launcher")
        code, printed = running.end()
        saved = running.read("saved")
    assert code == 75 and len(saved) == 2 and saved[0] == saved[1], printed


@needs_mpi
@pytest.mark.parametrize("command", ["ringrun", "ringrun over MPI"])
def test_ranks_on_other_hosts_save_too(two_hosts: SimulatedHosts, command: str) -> None:
    words = two_hosts.command_on(0, [*COMMANDS[command], "-H", ",".join(two_hosts.names)])
    with job(words, 2, **two_hosts.environment) as running:
        running.wait_for("began", 2)
        running.signal(signal.SIGUSR1, "rank")  # on the other host, where ringrun is not
        code, printed = running.end()
        saved = running.read("saved")
    assert code == 75 and len(saved) == 2 and saved[0] == saved[1], printed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_workers_of_a_store_save_too_and_are_not_started_again(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "ringtrain.launch", "-s", "1", "--launcher", "local", "--restarts", "2"]
    with job(command, 2) as running:
        running.wait_for("began", 2)
        running.signal(number, "launcher")
        code, printed = running.end()
        saved = running.read("saved")
    assert code == 75 and len(saved) == 2 and saved[0] == saved[1], printed
    assert "ringlaunch: the job was preempted" in printed


def test_ringrun_says_why_the_job_has_ended() -> None:
    with job(COMMANDS["ringrun"], 2) as running:
        running.wait_for("began", 2)
        running.signal(signal.SIGTERM, "rank")
        code, printed = running.end()
    assert code == 75 and "preemption: 20 s are left" in printed
    assert "ringrun: the job was preempted and has ended by exit_preempted(), with exit code 75" in printed
    assert "the first to fail" not in printed


def test_ctrl_c_saves_and_asks_for_no_other_start() -> None:
    with job(COMMANDS["ringrun"], 2) as running:
        running.wait_for("began", 2)
        running.signal(signal.SIGINT, "launcher")
        code, _ = running.end()
        assert code == 130 and len(running.read("saved")) == 2


def test_a_signal_before_the_first_call_ends_the_job_as_without_it() -> None:
    with job(COMMANDS["ringrun"], 2) as running:
        running.signal(signal.SIGTERM, "launcher")
        code, _ = running.end()
        assert code in (143, -signal.SIGTERM) and running.read("saved") == []


@pytest.mark.parametrize("target", ["launcher", "rank"])
def test_after_the_last_step_nobody_asks_and_the_grace_time_ends_the_job(target: str) -> None:
    command = [*COMMANDS["ringrun"][:-1], "1"]
    with job(command, 2, steps=1) as running:
        running.wait_for("done", 2)
        running.signal(signal.SIGTERM, target)
        if target == "rank":  # the script goes on, and a second signal to ringrun ends it
            time.sleep(0.3)
            assert running.process.poll() is None
            running.signal(signal.SIGTERM, "launcher")
        code, _ = running.end()
        assert code == 143 and running.read("saved") == []


def test_a_second_signal_to_ringrun_kills_ranks_that_still_save() -> None:
    with job(COMMANDS["ringrun"], 2, steps=1) as running:
        running.wait_for("done", 2)
        running.signal(signal.SIGTERM, "launcher")
        time.sleep(1.2)  # signals within a second are one
        assert running.process.poll() is None
        running.signal(signal.SIGTERM, "launcher")
        code, _ = running.end()
        assert code == 143


def notices(running: Job, told: Path) -> None:
    running.wait_for("began", 2)
    time.sleep(0.2)
    assert running.read("saved") == []
    told.touch()
    code, _ = running.end()
    assert code == 75 and len(running.read("saved")) == 2


def test_a_file_announces_preemption(tmp_path: Path) -> None:
    told = tmp_path / "notice"
    with job([*COMMANDS["ringrun"], "--preemption-notice", str(told)], 2) as running:
        notices(running, told)
        assert running.read("saved")[0]["left"] <= GRACE_S


def test_a_program_announces_preemption_and_says_how_many_seconds_are_left(tmp_path: Path) -> None:
    told, program = tmp_path / "told", tmp_path / "notice"
    program.write_text(f"#!/bin/sh\necho 120\ntest -e {told}\n")
    program.chmod(0o755)
    with job(COMMANDS["ringrun"], 2, RINGTRAIN_PREEMPTION_NOTICE=str(program)) as running:
        notices(running, told)
        assert 110 < running.read("saved")[0]["left"] <= 120


# --- in one process of the job ----------------------------------------------------------------------------------------


@pytest.mark.ranks(3, isolated=True)
def test_the_seconds_count_from_the_signal_also_where_the_main_thread_computes() -> None:
    hvd.init()
    assert preemption._GRACE_VARIABLE == rank_wrapper.GRACE_VARIABLE
    assert hvd.preempted() is None
    sent_at = time.monotonic()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(20_000_000))  # no handler in Python would run before its end
    most = 30 - (time.monotonic() - sent_at) + 0.1
    found = hvd.preempted()
    assert found is not None and preemption.is_agreed()
    seconds = hvd.allgather(np.array([[found.seconds_left, most]]))
    assert seconds[:, 0].tolist() == [found.seconds_left] * 3
    assert found.seconds_left <= seconds[1, 1]
    if hvd.rank() != 1:
        assert hvd.preempted().seconds_left < found.seconds_left  # type: ignore[union-attr]
    else:
        assert hvd.preempted() is not None


@pytest.mark.ranks(2, isolated=True)
def test_no_rank_ends_before_the_checkpoint_is_written(tmp_path: Path) -> None:
    hvd.init()
    assert hvd.preempted() is None
    if hvd.rank() == 0:
        time.sleep(1)
        (tmp_path / "saved").touch()
    with pytest.raises(SystemExit) as end:
        hvd.exit_preempted()
    assert end.value.code == 75 and (tmp_path / "saved").exists() and not hvd.is_initialized()
    os.kill(os.getpid(), signal.SIGTERM)  # changes nothing: the process is about to end with 75


@pytest.mark.ranks(2, isolated=True)
def test_a_rank_that_has_joined_does_not_hinder_the_others() -> None:
    hvd.init()
    assert hvd.preempted() is None
    if hvd.rank() == 0:
        assert hvd.preempted() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert hvd.preempted() is not None
    hvd.join()


@pytest.mark.ranks(2, isolated=True)
def test_handlers_of_the_script_stay() -> None:
    called = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: called.append(number))
    with open(os.devnull, "w") as file:
        faulthandler.register(signal.SIGUSR2, file)  # of which Python's signal module does not know
        hvd.init()
        assert hvd.preempted() is None
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert called == [signal.SIGUSR1] and hvd.preempted() is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert called == [signal.SIGUSR1, signal.SIGTERM] and hvd.preempted() is not None


@pytest.mark.ranks(1, isolated=True)
def test_children_obey_their_parent_and_leave_signals_of_others_to_it() -> None:
    hvd.init()
    assert hvd.preempted() is None
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    other = os.fork()
    if other == 0:
        os.kill(child, signal.SIGTERM)
        os._exit(0)
    os.waitpid(other, 0)
    time.sleep(0.2)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert hvd.preempted() is None


@pytest.mark.ranks(1, isolated=True)
def test_between_shutdown_and_init_signals_do_what_they_did_before() -> None:
    hvd.init()
    for _ in range(2):
        assert hvd.preempted() is None
        hvd.shutdown()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        hvd.init()
    os.kill(os.getpid(), signal.SIGTERM)  # noted from init() on, since the script has asked before
    assert hvd.preempted() is not None


def test_it_needs_init() -> None:
    with pytest.raises(hvd.NotInitializedError):
        hvd.preempted()


@pytest.mark.ranks(2, isolated=True)
def test_elastic_states_say_it_too_and_then_each_commit_is_written(tmp_path: Path) -> None:
    hvd.init()
    state = hvd.elastic.ObjectState(step=0)
    state.save_to(tmp_path / f"state-{hvd.rank()}")
    assert not state.should_checkpoint
    state.commit()
    assert not list(tmp_path.iterdir())  # a minute has not passed
    hvd.barrier()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    assert state.should_checkpoint
    state.commit()
    assert hvd.rank() != 0 or (tmp_path / "state-0").exists()


# --- the example ------------------------------------------------------------------------------------------------------


def train(checkpoint: Path, is_told: bool) -> int:
    """Runs examples/torch_train.py, and tells it in its second epoch to end. Returns the exit code."""
    command = [*COMMANDS["ringrun"], "-np", "2", "--no-prefix-output", sys.executable, "examples/torch_train.py"]
    with subprocess.Popen(
        [*command, "--epochs", "3", "--batch-size", "2", "--checkpoint", str(checkpoint)],  # an epoch takes a second
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ROOT},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if is_told and line.startswith("epoch  1"):
                process.terminate()
    return process.wait()


@pytest.mark.slow
def test_the_example_goes_on_within_an_epoch_to_equal_results(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    assert train(tmp_path / "whole.pt", is_told=False) == 0
    assert train(tmp_path / "parts.pt", is_told=True) == os.EX_TEMPFAIL
    whole, part = torch.load(tmp_path / "whole.pt"), torch.load(tmp_path / "parts.pt")
    assert len(part["history"]) == 1 and part["images"] > 0
    assert train(tmp_path / "parts.pt", is_told=False) == 0
    parts = torch.load(tmp_path / "parts.pt")
    assert parts["history"] == whole["history"]
    for name, weights in whole["model"].items():
        assert torch.equal(parts["model"][name], weights), name
