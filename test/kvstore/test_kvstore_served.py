"""Stores with servers, in jobs that are started by hand: no launcher, no MPI."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from harness.ringrun_job import wait_until
from kvstore_jobs import END_S, SOON_OVER, Job, Process, job

PROGRAMS = str(Path(__file__).with_name("served_programs.py"))
COMMANDED = {"RINGTRAIN_NO_AUTOSERVE": "1"}


def worker(of_job: Job, number: int, *programs: str, **variables: str) -> Process:
    return of_job.start("worker", [PROGRAMS, *programs], DMLC_TASK_ID=str(number), **variables)


def workers(of_job: Job, *programs: str, count: int = 2) -> list[Process]:
    return [worker(of_job, number, *programs) for number in range(count)]


def servers(of_job: Job, count: int) -> list[Process]:
    return [of_job.server(DMLC_TASK_ID=str(number)) for number in range(count)]


# --- what two workers show one thing after the other ------------------------------------------------------------------


SHOWN = {
    "auto": [
        "asynchronous_values_are_exact",
        "gradients_go_in_fewer_bits,dist_async,2bit,no",
        "gradients_go_in_fewer_bits,dist_sync,fp16,no",
        "some_rows_are_pushed_and_pulled,dist_sync",
        "a_worker_with_less_data_joins",
        "a_pull_waits_for_who_is_too_far_behind",
        "a_call_that_one_worker_makes_alone_is_told_to_all,barrier,auto",
        "a_wait_for_a_worker_that_has_ended_fails",
    ],
    "off": [
        "synchronous_values_are_exact",
        "an_optimizer_on_servers_makes_the_weights_that_it_makes_alone,FOLDER",
        "gradients_go_in_fewer_bits,dist_async,fp16,late",
        "gradients_go_in_fewer_bits,dist_sync,2bit,late",
        "some_rows_are_pushed_and_pulled,dist_async",
        "a_function_updates_on_every_worker",
        "a_store_is_saved,FOLDER",
        "commands_reach_the_servers",
        "a_mistake_is_told_on_its_line_and_changes_nothing",
        "a_dtype_that_servers_cannot_hold_is_told_to_all_workers",
        # then calls that one worker makes alone: what never ends of the store before must not count for them
        "a_key_of_another_shape_or_dtype_is_told_to_all_workers",
        *(
            f"a_call_that_one_worker_makes_alone_is_told_to_all,{call},off"
            for call in ("set_optimizer", "update_optimizer", "barrier", "init")
        ),
        "pushes_pulls_and_servers_are_counted_also_for_prometheus",
    ],
}
HAS_PROMETHEUS = importlib.util.find_spec("prometheus_client") is not None


def is_shown(program: str) -> bool:
    return HAS_PROMETHEUS or not program.endswith("for_prometheus")


class Walk:
    """The end of a job of two workers with two servers that have shown all of this."""

    def __init__(self, folder: Path, memory: str):
        self.folder = folder
        shown = [program.replace("FOLDER", str(folder)) for program in SHOWN[memory] if is_shown(program)]
        variables = {"RINGTRAIN_SHARED_MEMORY": memory}
        if memory == "off":
            variables["RINGTRAIN_METRICS_PORT"] = "29541"
        with job(folder, 2, 2, **variables) as one:
            scheduler = one.scheduler()
            self.servers = [one.start("server", [PROGRAMS, "serves_and_takes_commands"], **COMMANDED) for _ in range(2)]
            self.workers = workers(one, *shown)
            with contextlib.suppress(subprocess.TimeoutExpired):
                for process in (*self.workers, *self.servers, scheduler):
                    process.popen.wait(2 * END_S)
            self.codes = [process.popen.poll() for process in one.processes]
            self.outputs = one.outputs()


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Walk]:
    """Makes each walk when it is asked for."""

    class Made(dict[str, Walk]):
        def __missing__(self, memory: str) -> Walk:
            self[memory] = Walk(tmp_path_factory.mktemp("walk"), memory)
            return self[memory]

    return Made()


@pytest.mark.parametrize(
    ("memory", "program"), [(memory, program) for memory, programs in SHOWN.items() for program in programs]
)
def test_two_workers_and_two_servers_show_that(walks, memory, program):
    if not is_shown(program):
        pytest.skip("prometheus-client is not installed")
    walk = walks[memory]
    for process in walk.workers:
        assert f"{program.replace('FOLDER', str(walk.folder))}: well\n" in process.output(), walk.outputs
    if program == "commands_reach_the_servers":
        assert all("command 20 hello" in server.output() for server in walk.servers)


def test_the_processes_of_such_a_job_end_well(walks):
    assert walks["auto"].codes == walks["off"].codes == [0] * 5


@pytest.mark.parametrize(
    ("memory", "programs"),
    [
        ("auto", ["asynchronous_values_are_exact", "a_worker_waits_for_the_others_at_its_end"]),
        ("off", ["synchronous_values_are_exact"]),
    ],
)
def test_without_servers_each_worker_is_one(tmp_path, memory, programs):
    with job(tmp_path, 2, 0, RINGTRAIN_SHARED_MEMORY=memory) as one:
        scheduler = one.scheduler()
        for process in workers(one, *programs):
            process.end()
        scheduler.end()


def test_a_key_that_worker_0_does_not_have_is_told(tmp_path):
    with job(tmp_path, 2, 0, RINGTRAIN_STALL_SHUTDOWN_TIME_S="1") as one:
        one.scheduler()
        for process in workers(one, "a_key_that_worker_0_does_not_have_is_told"):
            process.end()


def test_a_saved_store_and_a_thread_for_each_server_that_was_asked_for_with_three_servers(walks, tmp_path):
    with job(tmp_path, 2, 3, RINGTRAIN_SHARED_MEMORY="off") as one:
        one.scheduler()
        servers(one, 3)
        loads = f"a_store_that_was_saved_is_loaded_with_other_servers,{walks['off'].folder}"
        both = [
            worker(one, number, "counts_its_threads_on_one_core", loads, RINGTRAIN_KV_THREADS=asked)
            for number, asked in enumerate(["0", "3"])
        ]
        said = [process.end() for process in both]
    on_one_core, of_three = (int(text.split()[1]) for text in said)
    assert on_one_core == of_three - 2
    assert all(f"{loads}: well\n" in text for text in said)


@pytest.mark.parametrize(("kind", "threads"), [("dist_async", 2), ("dist_sync", 4)])
def test_threads_for_some_of_the_servers_each_are_exact_and_tell_which_one_is_lost(tmp_path, kind, threads):
    with job(tmp_path, 2, 4, RINGTRAIN_KV_THREADS=str(threads), RINGTRAIN_SHARED_MEMORY="off", **SOON_OVER) as one:
        one.scheduler()
        four, both = servers(one, 4), workers(one, f"threads_share_the_servers,{kind}")
        for process in both:
            process.wait_for("round", 3)
        four[1].kill()
        for process in both:
            said = process.end(within_s=30)
            assert "exact" in said and "PeerLostError" in said and "server 1" in said


def test_a_trainer_updates_on_servers(tmp_path):
    with job(tmp_path, 2, 2) as one:
        scheduler, serving = one.scheduler(), servers(one, 2)
        both = workers(one, *(f"a_trainer_updates_on_servers,{kind}" for kind in ("dist_async", "dist_sync")))
        for process in (*both, *serving, scheduler):
            process.end(within_s=2 * END_S)


def test_a_server_that_makes_a_store_is_told_what_to_call(tmp_path):
    with job(tmp_path, 1, 1) as one:
        script = "from ringtrain import kvstore; kvstore.create('dist_async')"
        said = one.start("server", ["-c", script], **COMMANDED).end(1)
    assert "ValueError: this process is the server of its job (DMLC_ROLE)" in said and "kvstore.run_server()" in said


# --- workers that die -------------------------------------------------------------------------------------------------


def test_when_a_worker_dies_the_rounds_of_the_others_fail(tmp_path):
    with job(tmp_path, 2, 1, **SOON_OVER) as one:
        scheduler, (server,) = one.scheduler(), servers(one, 1)
        first, second = workers(one, "trains_until_a_loss,dist_sync")
        first.wait_for("round", 3)
        second.kill()
        assert f"PeerLostError worker 1 ({os.uname().nodename}, pid {second.pid}) has died" in first.end(within_s=10)
        server.end()
        scheduler.end()


def test_asynchronous_workers_go_on_when_one_dies(tmp_path):
    with job(tmp_path, 2, 2, **SOON_OVER) as one:
        one.scheduler()
        servers(one, 2)
        first, second = workers(one, "goes_on_when_another_worker_dies")
        second.wait_for("round", 5)
        second.kill()
        first.end(within_s=30)


def test_the_exception_of_a_worker_is_told_to_the_others(tmp_path):
    with job(tmp_path, 2, 1, **SOON_OVER) as one:
        one.scheduler()
        servers(one, 1)
        first, second = workers(one, "worker_1_fails")
        assert "ArithmeticError: too small" in second.end(1)
        first.end()


def test_workers_of_an_elastic_store_come_and_go(tmp_path):
    with job(tmp_path, 2, 1, **SOON_OVER) as one:
        one.scheduler()
        servers(one, 1)
        first, second = workers(one, "comes_and_goes")
        second.wait_for("pushed")
        third = worker(one, 2, "comes_and_goes")
        third.wait_for("worker 2 3 True")
        second.kill()
        for process in (first, third):
            assert "end 2 5.0" in process.end()


@pytest.mark.parametrize(("count", "memory"), [(1, "off"), (2, "auto")])
def test_the_last_push_of_a_killed_worker_is_applied_as_a_whole_or_not_at_all_by_each_server(tmp_path, count, memory):
    chance, kills = np.random.default_rng(), 3
    gos = [tmp_path / f"go-{number}" for number in range(kills)]
    with job(tmp_path, 1 + kills, count, RINGTRAIN_SHARED_MEMORY=memory, **SOON_OVER) as one:
        one.scheduler()
        servers(one, count)
        reader = worker(one, 0, "reads_large_keys")
        writers = [worker(one, 1 + number, f"pushes_large_keys,{go}") for number, go in enumerate(gos)]
        for number, writer in enumerate(writers):
            gos[number].touch()
            writer.wait_for("begins")
            time.sleep(0.1 + chance.random() * 0.3)
            writer.kill()
            reader.wait_for("]\n", count=1 + number, within_s=40)
        assert reader.end().count("dead whole") == kills, reader.output()


@pytest.mark.parametrize("memory", ["auto", "off"])
def test_pushes_to_an_atomic_store_are_seen_as_a_whole_also_those_of_a_killed_worker(tmp_path, memory):
    with job(tmp_path, 4, 2, RINGTRAIN_SHARED_MEMORY=memory, **SOON_OVER) as one:
        one.scheduler()
        servers(one, 2)
        reader = worker(one, 0, "reads_whole_keys")
        writers = [worker(one, number, "writes_whole_keys_and_dies") for number in (1, 2, 3)]
        reader.end(within_s=60)
        for writer in writers:
            writer.end(-signal.SIGKILL)


def test_a_worker_that_is_started_again_goes_on(tmp_path):
    with job(tmp_path, 2, 1) as one:
        scheduler, (server,) = one.scheduler(), servers(one, 1)
        first, second = workers(one, "goes_on_when_started_again")
        second.wait_for("pushed")
        second.kill()
        assert "recovery True 1" in worker(one, 1, "goes_on_when_started_again").end()
        for process in (first, server, scheduler):
            process.end()


def test_a_worker_that_dies_in_set_optimizer_and_comes_back_ends_the_wait_of_the_others(tmp_path):
    with job(tmp_path, 2, 1, RINGTRAIN_KV_REJOIN_S="60") as one:
        one.scheduler()
        servers(one, 1)
        first, second = workers(one, "worker_1_dies_in_set_optimizer")
        second.end(1)
        comes = worker(one, 1, "worker_1_dies_in_set_optimizer", DMLC_NUM_ATTEMPT="1")
        for process in (first, comes):
            assert "has it\n" in process.end()


# --- servers that die -------------------------------------------------------------------------------------------------


def lose_the_server(folder: Path, memory: str, **variables: str) -> str:
    """Returns what the worker said that had it."""
    with job(folder, 1, 1, RINGTRAIN_SHARED_MEMORY=memory, **variables) as one:
        one.scheduler()
        (server,), (process,) = servers(one, 1), workers(one, "trains_until_a_loss,dist_async", count=1)
        process.wait_for("round", 3)
        server.kill()
        return process.end(within_s=20)


def test_when_a_server_dies_its_keys_are_lost(tmp_path):
    """Over TCP, the threads for some of the servers each show it."""
    said = lose_the_server(tmp_path, "auto")
    assert "PeerLostError" in said and "server 0" in said


@pytest.mark.parametrize("memory", ["auto", "off"])
def test_a_server_whose_place_nobody_takes_is_lost_at_the_deadline(tmp_path, memory):
    said = lose_the_server(tmp_path, memory, RINGTRAIN_KV_REJOIN_S="2")
    assert "PeerLostError" in said and "no other server has taken its place within kv_rejoin_s" in said


def test_a_server_that_is_started_again_goes_on_with_the_memory_that_workers_of_its_host_share(tmp_path):
    with job(tmp_path, 2, 2, RINGTRAIN_KV_REJOIN_S="30") as one:
        scheduler, serving = one.scheduler(), servers(one, 2)
        both = [
            worker(one, number, "counts_each_push_once", RINGTRAIN_SHARED_MEMORY=memory)
            for number, memory in enumerate(["auto", "off"])  # the other one reaches the servers by TCP
        ]
        for rounds, number in ((30, 1), (70, 0), (110, 1)):
            both[0].wait_for("round", rounds)
            serving[number].kill()
            serving[number] = one.server(DMLC_TASK_ID=str(number), PS_VERBOSE="1")
            serving[number].wait_for("goes on from the memory that it shared with workers")
        for process in (*both, *serving, scheduler):
            process.end()


def snapshots(folder: Path, every_s: float) -> dict[str, str]:
    return {
        "RINGTRAIN_KV_SNAPSHOT_DIR": str(folder / "snapshots"),
        "RINGTRAIN_KV_SNAPSHOT_S": str(every_s),
        "RINGTRAIN_KV_REJOIN_S": "30",
    }


def rounds_when_it_waits(process):
    """How many rounds a worker has made when it makes no more of them."""
    before, now = -1, process.output().count("round")
    while now > before:
        time.sleep(0.7)
        before, now = now, process.output().count("round")
    return now


@pytest.mark.parametrize("memory", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_a_server_that_is_started_again_goes_on_from_its_snapshot(tmp_path, memory):
    with job(tmp_path, 1, 2, RINGTRAIN_SHARED_MEMORY=memory, **snapshots(tmp_path, 0.3)) as one:
        scheduler, serving = one.scheduler(), servers(one, 2)
        (process,) = workers(one, "survives_the_servers,200", count=1)
        process.wait_for("round", 50)
        serving[1].kill()
        rounds = rounds_when_it_waits(process)
        assert rounds < 200  # the memory of a dead server takes no push that may be lost
        serving[1] = one.server(DMLC_TASK_ID="1", PS_VERBOSE="1", RINGTRAIN_SHARED_MEMORY="off")
        serving[1].wait_for("goes on from a snapshot of")
        whole = process.end()
        (values,) = (line.split()[1:] for line in whole.splitlines() if line.startswith("value"))
        # The pieces of server 0 have all pushes, those of server 1 lack what came after the snapshot.
        assert float(values[1]) == 200
        assert "restored a\n" in whole
        assert 200 - rounds < float(values[0]) <= 200
        for one_of_all in (*serving, scheduler):
            one_of_all.end()


@pytest.mark.slow
def test_a_worker_that_comes_while_a_server_is_gone_finds_the_one_that_takes_its_place(tmp_path):
    with job(tmp_path, 2, 1, **snapshots(tmp_path, 0.1)) as one:
        one.scheduler()
        (server,), both = servers(one, 1), workers(one, "comes_while_a_server_is_gone")
        for process in both:
            process.wait_for("pulled 3.0 3.0")
        wait_until((tmp_path / "snapshots" / "store.0.snapshot").exists)
        server.kill()
        both[1].kill()
        comes = worker(one, 1, "begins", "comes_while_a_server_is_gone", DMLC_NUM_ATTEMPT="1")
        comes.wait_for("begins: well")
        time.sleep(2)  # it looks for the server that is gone
        servers(one, 1)
        comes.wait_for("created True\npulled 3.0 3.0")


def test_without_a_snapshot_no_server_takes_the_place_of_a_lost_one(tmp_path):
    with job(tmp_path, 1, 1) as one:
        one.scheduler()
        (server,), (process,) = servers(one, 1), workers(one, "survives_the_servers,1000", count=1)
        process.wait_for("round", 3)
        server.kill()
        (again,) = servers(one, 1)
        assert "cannot come in the place of a lost one without a snapshot" in again.end(1)


def test_a_server_whose_snapshots_cannot_be_written_says_so_once_and_goes_on(tmp_path):
    with job(tmp_path, 1, 1, RINGTRAIN_SHARED_MEMORY="off", **snapshots(tmp_path, 0.1)) as one:
        one.scheduler()
        server = one.start("server", [PROGRAMS, "serves_with_a_full_disk"], **COMMANDED)
        (process,) = workers(one, "survives_the_servers,100", count=1)
        assert "value 100.0 100.0" in process.end()
        said = server.end()
    assert said.count("store.0.snapshot cannot be written: File too large; this server goes on") == 1
    # At most one from before the keys were made.
    left = list((tmp_path / "snapshots").iterdir())
    assert {file.name for file in left} <= {"store.0.snapshot"} and all(file.stat().st_size < 100_000 for file in left)
