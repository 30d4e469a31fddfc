"""Trainings that go on when ranks are lost and when others come."""

import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from elastic_ranks import Failed, Formed, Left, elastic_job
from elastic_storm import FAULTS, STEPS_OF_STORM, require_same_weights, storm, training, undisturbed
from harness.clocks import require_within
from harness.hosts import hosts_or_skip

import ringtrain as hvd
from ringtrain.job.rendezvous import generations
from ringtrain.job.rendezvous.generations import StateLost, Waiting
from ringtrain.job.sockets import hosts_to_leave_out

OPTIONS = pytest.mark.parametrize("memory", ["auto", "off"], ids=["shm", "sockets"])


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """The weights after so many steps that nobody disturbed, by steps."""
    found = {}

    def weights_after(steps):
        if steps not in found:
            found[steps] = undisturbed(tmp_path_factory.mktemp("clean"), steps)
        return found[steps]

    return weights_after


@pytest.mark.parametrize(
    ("victims", "memory"),
    [([0], "auto"), ([3], "off"), ([1, 2], "auto"), ([0, 3], "off"), ([0, 1, 2], "auto")],
    ids=str,
)
def test_no_committed_step_is_lost_whoever_is_killed(tmp_path, clean, victims, memory):
    with elastic_job(training(tmp_path), tmp_path, 4, RINGTRAIN_SHARED_MEMORY=memory) as job:
        for process in job.processes:
            process.wait_for("step 20")
        for victim in victims:
            job.processes[victim].popen.kill()
        survivors = [process for number, process in enumerate(job.processes) if number not in victims]
        for process in survivors:
            assert "well 60" in process.ends()
        assert len(job.of(Left)) == len(victims)
    require_same_weights(tmp_path, clean(60))


@OPTIONS
def test_newcomers_go_on_where_the_others_are(tmp_path, clean, memory):
    with elastic_job(training(tmp_path), tmp_path, 2, RINGTRAIN_SHARED_MEMORY=memory, RANKS_WANTED="3") as job:
        job.processes[0].wait_for("step 20")
        job.processes[1].kill()
        job.start(2)
        for process in (job.processes[0], *job.processes[2:]):
            assert "well 60" in process.ends()
        assert job.formed(2)
        assert "step 60 3" in job.processes[2].output()
    require_same_weights(tmp_path, clean(60))


def test_ranks_that_wait_for_a_newcomer_to_train_are_told_of_and_counted(tmp_path, clean, monkeypatch):
    monkeypatch.setattr(generations, "_REPORTED_AFTER_S", 1.0)
    with elastic_job(training(tmp_path), tmp_path, 2, RANKS_WANTED="3") as job:
        job.processes[0].wait_for("step 20")
        (newcomer,) = job.start(LOADING_S="4")
        report = job.wait_for(lambda one: isinstance(one, Waiting) and one.what == "train")
        assert report.late == (newcomer.member,) and report.silent == ()
        outputs = [process.ends() for process in job.processes]
        assert "which is between init() and the training: do what takes long before init()" in newcomer.output()
        assert all(3.5 < float(output.split("seconds lost: ")[1]) < 30 for output in outputs)
        assert job.server.summary().seconds_lost > 3.5
    require_same_weights(tmp_path, clean(60))


def test_a_training_that_begins_anew_is_told_of(tmp_path, clean):
    with elastic_job(training(tmp_path), tmp_path, 2) as job:
        job.processes[0].wait_for("step 20")
        for process in job.processes:
            process.popen.kill()
        others = job.start(2)
        assert job.wait_for(lambda one: isinstance(one, StateLost)) == StateLost(2, 0)
        for process in others:
            process.ends()
        assert sum("no rank had the state: training begins at step 0" in one.output() for one in others) == 1
    require_same_weights(tmp_path, clean(60))


def test_a_job_that_must_keep_its_state_ends_without_it(tmp_path):
    with elastic_job(training(tmp_path), tmp_path, 2, RINGTRAIN_ON_STATE_LOST="fail") as job:
        job.processes[0].wait_for("step 20")
        for process in job.processes:
            process.popen.kill()
        for process in job.start(2):
            assert "training must not begin anew (on_state_lost=fail)" in process.ends(1)
        assert [len(job.of(kind)) for kind in (Failed, StateLost, Formed)] == [1, 0, 2]


def test_a_job_whose_ranks_are_all_lost_goes_on_from_its_file(tmp_path, clean):
    file = str(tmp_path / "checkpoint")
    with elastic_job(training(tmp_path), tmp_path, 2, CHECKPOINT=file) as job:
        job.processes[0].wait_for("step 20")
        for process in job.processes:
            process.popen.kill()
        for process in job.start(2):
            text = process.ends()
            assert int(text.split("synced ")[1].split()[0]) >= 19 and "well 60" in text
        (lost,) = job.of(StateLost)
        assert lost.generation == 2 and lost.commits >= 19
    require_same_weights(tmp_path, clean(60))
    assert [path for path in tmp_path.iterdir() if "unfinished" in path.name] == []


MANY_GENERATIONS = """
import os, numpy as np, ringtrain as hvd
from ringtrain.elastic import generation
hvd.init()
seen = []

def resources():
    resident = int(open("/proc/self/statm").read().split()[1]) * 4096
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident

@hvd.elastic.run
def train(state):
    seen.append(resources())
    assert hvd.metrics()["generation"] == generation() == len(seen)
    if generation() < 60:
        hvd.allreduce_(hvd.empty(1000), name="in the Arena")
        state.on_hosts_updated(0.0, None)
    state.commit()

train(hvd.elastic.ArrayState(weights=np.ones(1000)))
early, late = seen[10], seen[-1]
print(early, late)
assert abs(early[0] - late[0]) < 3  # two ranks may have dialled each other
assert early[1] == late[1] and late[2] - early[2] < 4 << 20
"""


@OPTIONS
def test_sixty_generations_leave_nothing_behind(tmp_path, memory):
    before = set(Path("/dev/shm").iterdir())
    with elastic_job(MANY_GENERATIONS, tmp_path, 2, RINGTRAIN_SHARED_MEMORY=memory) as job:
        for process in job.processes:
            process.ends()
        assert job.server.summary().generations == 60
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if path.name.startswith("ringtrain")]


TUNED = """
import os, signal, numpy as np, ringtrain as hvd, ringtrain._core as core
from ringtrain.job import session
session.at_init(lambda settings: print("autotune is", settings["autotune"], flush=True))
hvd.init(autotune=True)
gradient = np.ones(200_000, np.float32)

@hvd.elastic.run
def train(state):
    while not state.is_tuned:
        hvd.allreduce(gradient, name="gradient", op=hvd.Sum)
        state.is_tuned = bool(hvd.allreduce(np.int32(core.autotune_findings() != ""), name="found", op=hvd.Max))
    state.commit()
    if hvd.size() == 3:
        if hvd.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.barrier()
    print("well", hvd.elastic.generation(), flush=True)

train(hvd.elastic.ObjectState(is_tuned=False))
"""


def test_the_result_of_autotune_is_used_in_the_next_generation(tmp_path):
    with elastic_job(TUNED, tmp_path, 3) as job:
        job.processes[0].wait_for("well 2")
        said = [process.ends() for process in job.processes if process.popen.poll() != -signal.SIGKILL]
    assert len(said) == 2
    for text in said:
        assert text.index("autotune is on") < text.index("autotune is off") < text.index("well 2")


BROADCASTING = """
import os, signal, numpy as np, ringtrain as hvd
hvd.init()

@hvd.elastic.run
def train(state):
    root = hvd.size() - 1
    for step in range(4):
        array = np.full(3, hvd.rank() + step)
        hvd.broadcast_(array, root, name=f"from {root}")
        assert array.tolist() == [root + step] * 3
        parameters = {"a": np.full(2, hvd.rank() + step), "b": np.full(5, hvd.rank() - 1.5)}
        hvd.broadcast_parameters(parameters, root)
        assert parameters["a"].tolist() == [root + step] * 2 and parameters["b"].tolist() == [root - 1.5] * 5
    if hvd.size() == 3:
        if hvd.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.barrier()
    try:
        hvd.broadcast_(array, 2, name="from 2")
    except ValueError as error:
        print("refused:", error)

train(hvd.elastic.ArrayState(weights=np.ones(2)))
"""


def test_a_root_that_is_lost_is_refused_under_a_repeated_name(tmp_path):
    with elastic_job(BROADCASTING, tmp_path, 3) as job:
        said = [process.ends() for process in job.processes if process.popen.wait(60) != -signal.SIGKILL]
    assert len(said) == 2
    assert all('refused: broadcast "from 2": root_rank 2 is not one of the ranks 0-1' in text for text in said)


def test_each_generation_has_a_timeline_and_a_folder_of_flight_records(tmp_path):
    files = {"RINGTRAIN_TIMELINE_FILENAME": str(tmp_path / "t.json"), "RINGTRAIN_FLIGHT_DIR": str(tmp_path / "flights")}
    with elastic_job(training(tmp_path), tmp_path, 3, **files) as job:
        job.processes[1].wait_for("step 20 ")
        job.processes[1].popen.send_signal(signal.SIGSTOP)
        time.sleep(0.5)  # now the others wait for it, and do not hear of its end in the middle of a step of their own
        job.processes[1].kill()
        job.processes[0].ends()
        job.processes[2].ends()
    text = (tmp_path / "t.generation-2.json").read_text()
    assert "generation 2: 2 ranks" in text and json.loads(text)
    assert (tmp_path / "t.json").exists()
    assert {path.name for path in (tmp_path / "flights").iterdir()} == {"generation-1"}
    assert list((tmp_path / "flights" / "generation-1").iterdir())  # of each rank that was waiting then


def test_a_failure_leaves_no_flight_records_that_nobody_asked_for(tmp_path):
    with elastic_job(training(tmp_path), tmp_path, 2, TMPDIR=str(tmp_path)) as job:
        job.processes[1].wait_for("step 20 ")
        job.processes[1].kill()
        assert "well" in job.processes[0].ends()
    assert not list(tmp_path.glob("ringtrain-flight*"))


IMPORTANT_MOMENTS = {
    "in init": "ringtrain.job.world.introduce",
    "in sync": "ringtrain.elastic.states.share_arrays",
    "between saving and agreeing": "ringtrain.elastic.states.State.check_host_updates",
    "in the reset": "ringtrain.elastic.states.State.on_reset",
}
DIES = """
import os, pathlib, pkgutil, runpy, signal, sys
where, count, victims = os.environ["DIE_IN"], int(os.environ["DIE_AT"]), os.environ["VICTIMS"].split()
path, name = where.rsplit(".", 1)
owner = pkgutil.resolve_name(path)
original = getattr(owner, name)

def dying(*args, **keywords):
    global count
    count -= 1
    if count == 0 and os.environ["RINGTRAIN_MEMBER"].split("/")[1] in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **keywords)

setattr(owner, name, dying)
for module in ("sockets", "elastic_client"):
    if name == "introduce":
        setattr(pkgutil.resolve_name(f"ringtrain.job.{module}"), name, dying)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# Every two of a moment, its victims and the memory come together somewhere.
@pytest.mark.parametrize(
    ("moment", "victims", "memory"),
    [
        *(("in init", "0", "auto"), ("in init", "2", "off"), ("in init", "1 3", "off")),
        *(("in sync", "0", "off"), ("in sync", "2", "auto"), ("in sync", "1 3", "off")),
        *(("in the reset", "0", "auto"), ("in the reset", "2", "off"), ("in the reset", "1 3", "auto")),
        ("between saving and agreeing", "0", "off"),
        ("between saving and agreeing", "2", "off"),
        ("between saving and agreeing", "1 3", "auto"),
    ],
)
def test_a_rank_may_die_at_any_moment(tmp_path, clean, moment, victims, memory):
    """The second time that it comes there: another rank is killed to have it come there again."""
    variables = {"DIE_IN": IMPORTANT_MOMENTS[moment], "DIE_AT": "2", "VICTIMS": victims}
    if moment == "in the reset":
        variables["DIE_AT"] = "1"
    program = ["-c", DIES, *training(tmp_path)]
    with elastic_job(program, tmp_path, 5, RINGTRAIN_SHARED_MEMORY=memory, **variables) as job:
        survivors = [process for number, process in enumerate(job.processes) if str(number) not in victims.split()]
        if moment != "between saving and agreeing":
            survivors[0].wait_for("step 20 ")
            survivors.pop(1).kill()
        for process in survivors:
            assert "well 60" in process.ends()
        assert len(job.of(Left)) == 5 - len(survivors)
    require_same_weights(tmp_path, clean(60))


# Seconds from the first to the last of all that happens to a job.
STORM_S = 6.0


def test_a_storm_of_kills_and_starts_loses_no_step_and_hangs_nowhere(tmp_path, clean):
    assert storm(tmp_path, 1, "auto", STORM_S)["kill"] > 1
    require_same_weights(tmp_path, clean(STEPS_OF_STORM))


def test_a_storm_of_all_faults_loses_no_step_and_hangs_nowhere(tmp_path, clean, monkeypatch):
    for name in ("SILENCE_S", "SILENCE_IN_INIT_S"):
        monkeypatch.setattr(generations, name, 2.0)
    assert sum(storm(tmp_path, 4, "off", STORM_S, FAULTS).values()) > 3
    require_same_weights(tmp_path, clean(STEPS_OF_STORM))


# ----------------------------------------------------------------------------------------------------- several hosts


def test_a_host_may_be_lost_with_all_its_ranks_and_another_may_come(tmp_path, clean):
    program = training(tmp_path)
    with hosts_or_skip(2) as hosts, elastic_job(program, tmp_path, 4, hosts=hosts, RANKS_WANTED="4") as job:
        job.processes[0].wait_for("step 20 ")
        for process in job.processes[1::2]:
            process.popen.kill()
        job.formed(2)
        job.start(2)
        for process in (*job.processes[:4:2], *job.processes[4:]):
            assert "well 60" in process.ends()
        assert "step 60 4" in process.output()
    require_same_weights(tmp_path, clean(60))


def test_a_host_whose_link_is_silent_is_left_behind(tmp_path, clean):
    program = training(tmp_path, 200)
    with (
        hosts_or_skip(2) as hosts,
        elastic_job(program, tmp_path, 4, hosts=hosts, RINGTRAIN_PEER_TIMEOUT_S="60") as job,
    ):
        job.processes[0].wait_for("step 20 ")
        struck = time.monotonic()
        hosts.run_on(1, "ip", "link", "set", "eth0", "down")
        assert job.formed(2).size == 2
        require_within(6, struck)  # and not after peer_timeout_s, however busy the machine is
        assert all("its host has not answered for 1 s" in one.text for one in job.of(Left)), job.events
        for process in job.processes[::2]:
            assert "well 200" in process.ends()
    require_same_weights(tmp_path, clean(200))


def test_of_two_hosts_that_do_not_reach_each_other_one_goes(tmp_path):
    program = training(tmp_path, 4000)
    with hosts_or_skip(3) as hosts, elastic_job(program, tmp_path, 3, hosts=hosts, RINGTRAIN_PEER_TIMEOUT_S="2") as job:
        job.processes[0].wait_for("step 20 ")
        for host, other in ((1, "10.99.0.3"), (2, "10.99.0.2")):
            of_nobody = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
            hosts.run_on(host, "ip", "neigh", "replace", other, *of_nobody, "dev", "eth0")
        assert job.formed(2).size == 3 and job.formed(3).members == ["here/0", "here/1"]
        one, other = hosts.names[1:]
        assert f"UnreachableError: {one} and {other} do not reach each other" in job.processes[2].ends(1)
        job.processes[0].wait_for(" 2 3\n", 5)  # steps of two ranks in generation 3


@pytest.mark.parametrize(
    ("nodes", "cuts", "left_out"),
    [
        ([0, 1, 2], [(1, 2)], {2}),
        ([0, 1, 2, 2], [(1, 2)], {1}),
        ([0, 0, 1, 1, 2, 3], [(0, 2), (1, 2), (2, 3)], {2}),
        ([0, 1, 2, 3], [(0, 1), (2, 3)], {1, 3}),
        ([0, 0, 1], [(0, 1)], {1}),
    ],
)
def test_as_few_hosts_as_possible_are_left_out(nodes, cuts, left_out):
    assert hosts_to_leave_out(nodes, {frozenset(pair) for pair in cuts}) == left_out


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("every_s", "expected"), [(None, [60, 120]), (25.0, [30, 60, 90, 120]), (0.0, [*range(0, 121, 10)])]
)
def test_commits_are_written_at_the_interval_that_save_to_was_given(tmp_path, every_s, expected):
    path, now = tmp_path / "state", SimpleNamespace(s=1000.0)
    clock = SimpleNamespace(monotonic=lambda: now.s)
    with mock.patch("ringtrain.elastic.states.time", clock):
        state = hvd.elastic.ObjectState(committed_s=-1)
        state.save_to(path, **({} if every_s is None else {"every_s": every_s}))
        written = []
        for at_s in range(0, 121, 10):
            now.s = 1000.0 + at_s
            state.committed_s = at_s
            state.commit()
            if path.exists():
                found = hvd.elastic.ObjectState(committed_s=-1)
                found.save_to(path)
                written.append(found.committed_s)
    assert sorted(set(written)) == expected
