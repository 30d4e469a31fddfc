"""The members of a job of workers and servers: an error in time for everybody whom a death concerns, and nothing of
a process that the others take for dead.
"""

from __future__ import annotations

import os
import re
import signal
import time

import numpy as np
import pytest
from kvstore_jobs import Job, Process, job
from store_workers import CAPACITY, require_success, running, store, view, wait_until

from ringtrain import _core
from ringtrain.errors import PeerLostError, ShutDownError
from ringtrain.kvstore.servers.arrival import times_of
from ringtrain.kvstore.servers.membership import Drop, Limits, Membership, Output, Over, Tell
from ringtrain.kvstore.servers.rounds import END, Rounds
from ringtrain.kvstore.servers.scheduler_client import Standing

HEARTBEAT_S, TIMEOUT_S = 0.5, 3.0
ERROR_WITHIN_S = TIMEOUT_S + HEARTBEAT_S + 2.0
VARIABLES = {"RINGTRAIN_KV_HEARTBEAT_S": str(HEARTBEAT_S), "RINGTRAIN_KV_TIMEOUT_S": str(TIMEOUT_S)}

# Pushes and pulls until it fails, and says when and of what.
TRAINS = """
import sys, time
import numpy as np
import ringtrain as hvd
from ringtrain import kvstore
kv = kvstore.create(sys.argv[1])
kv.set_optimizer("test", rescale_grad=1.0)
kv.init("a", np.zeros(100_000, np.float32))
kv.barrier()
print("began", flush=True)
try:
    while True:
        kv.push("a", np.ones(100_000, np.float32))
        kv.wait()
        kv.pull("a")
        print("pushed", flush=True)
        time.sleep(0.02)
except hvd.PeerLostError as error:
    print("failed", f"{time.monotonic():.3f}", error, flush=True)
"""
KINDS = ["dist_sync", "dist_async"]
MEMORIES = ["auto", "off"]


def start(one: Job, kind: str, workers: int, servers: int) -> tuple[Process, list[Process], list[Process]]:
    """The scheduler, the servers, and workers that train."""
    scheduler = one.scheduler()
    of_servers = [one.server(DMLC_TASK_ID=str(number)) for number in range(servers)]
    of_workers = [one.start("worker", ["-c", TRAINS, kind], DMLC_TASK_ID=str(number)) for number in range(workers)]
    for worker in of_workers:
        worker.wait_for("pushed", 3)
    return scheduler, of_servers, of_workers


def failure_of(worker: Process) -> tuple[float, str]:
    """When it failed, and of what."""
    lines = [line for line in worker.end().splitlines() if line.startswith("failed")]
    assert len(lines) == 1, worker.output()
    _, at_s, text = lines[0].split(" ", 2)
    return float(at_s), text


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_was_silent_for_too_long_fails_when_it_goes_on(tmp_path, kind, memory):
    with job(tmp_path, 2, 1, **VARIABLES, RINGTRAIN_SHARED_MEMORY=memory) as one:
        _, _, (other, silent) = start(one, kind, 2, 1)
        os.kill(silent.pid, signal.SIGSTOP)
        time.sleep(TIMEOUT_S + 1)
        before = silent.output().count("pushed")
        continued_s = time.monotonic()
        os.kill(silent.pid, signal.SIGCONT)
        failed_s, text = failure_of(silent)
        # the memory refuses its push before it hears how long it was silent
        assert "worker 1 " in text and "was expelled" in text and "silence" in text and "(kv_timeout_s)" in text
        assert failed_s - continued_s < HEARTBEAT_S + 2
        assert silent.output().count("pushed") <= before + 1  # a push that was done before it was stopped
        if kind == "dist_sync":
            assert "has died: it has said nothing for 3." in failure_of(other)[1]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_the_loss_of_the_scheduler_ends_the_job_for_everybody(tmp_path, kind, memory, number):
    with job(tmp_path, 2, 1, **VARIABLES, RINGTRAIN_SHARED_MEMORY=memory) as one:
        scheduler, (server,), workers = start(one, kind, 2, 1)
        lost_s = time.monotonic()
        os.kill(scheduler.pid, number)
        time.sleep(0.3)
        workers[1].kill()  # nobody may wait for this one, whom nothing tells about
        failed_s, text = failure_of(workers[0])
        assert "the scheduler of this job is gone: " in text and "start all its processes again" in text
        assert failed_s - lost_s < ERROR_WITHIN_S
        assert "PeerLostError: the scheduler of this job is gone" in server.end(1)


def test_the_end_of_a_scheduler_that_was_told_to_end_is_told_to_all(tmp_path):
    with job(tmp_path, 2, 1, **VARIABLES) as one:
        scheduler, (server,), workers = start(one, "dist_sync", 2, 1)
        scheduler.popen.send_signal(signal.SIGTERM)
        for worker in workers:
            said = worker.end(1)
            assert "ShutDownError: the job of this store is over: the scheduler was told to end" in said
        server.end()
        scheduler.end()


def test_a_scheduler_that_was_stopped_itself_expels_nobody(tmp_path):
    with job(tmp_path, 2, 1, **VARIABLES) as one:
        scheduler, _, workers = start(one, "dist_async", 2, 1)
        os.kill(workers[1].pid, signal.SIGSTOP)
        time.sleep(0.5 * TIMEOUT_S)
        os.kill(scheduler.pid, signal.SIGSTOP)
        os.kill(workers[1].pid, signal.SIGCONT)
        time.sleep(0.6 * TIMEOUT_S)
        os.kill(scheduler.pid, signal.SIGCONT)
        time.sleep(1)
        assert not any("failed" in worker.output() for worker in workers), one.outputs()


@pytest.mark.parametrize("role", ["worker", "server"])
def test_a_death_before_the_job_begins_ends_it_for_those_that_wait(tmp_path, role):
    variables = {**VARIABLES, "RINGTRAIN_START_TIMEOUT_S": "60", "PS_VERBOSE": "1"}
    with job(tmp_path, 2, 1, **variables) as one:
        scheduler = one.scheduler()
        dies = one.start(role, ["-c", TRAINS, "dist_sync"], DMLC_TASK_ID="0")
        scheduler.wait_for(f"{role} 0 (")
        dies.kill()
        waits = one.start("worker", ["-c", TRAINS, "dist_sync"], DMLC_TASK_ID="1")
        text = f"the job has not begun: {role} 0 ("
        assert f"PeerLostError: {text}" in waits.end(1, within_s=30)
        assert text in scheduler.end(1)


def test_another_process_may_come_in_the_place_of_one_that_died_before_the_job_began(tmp_path):
    with job(tmp_path, 1, 1, **VARIABLES, PS_VERBOSE="1", RINGTRAIN_KV_REJOIN_S="60") as one:
        scheduler = one.scheduler()
        dies = one.server(DMLC_TASK_ID="0")
        scheduler.wait_for("server 0 (")
        dies.kill()
        one.server(DMLC_TASK_ID="0")
        one.start("worker", ["-c", TRAINS, "dist_async"], DMLC_TASK_ID="0").wait_for("pushed")


# Ends before it has read that it has a place: its kernel resets the connection, as a network does.
DIES = """
import os, time
os.environ["RINGTRAIN_NO_AUTOSERVE"] = "1"
from ringtrain.job.rendezvous.lasting import LastingConnection
from ringtrain.job.rendezvous.server import Place, connect
from ringtrain.kvstore.servers import roles
from ringtrain.kvstore.servers.arrival import secret_of
role = roles.of_environment()
place, secret = Place(role.host, [role.port]), secret_of(role)
talk = LastingConnection(connect(place, place.ports, secret, 10, "nobody is there for"), secret, 1)
about = {"host": "here", "pid": os.getpid(), "attempt": 0, "patience_s": 60, "heartbeat_s": 0.2, "size": None}
talk.send({"kind": "come", "id": 1, "role": "server", "task": 0, "addresses": [["127.0.0.1", 9]], **about})
time.sleep(0.5)
os._exit(1)
"""


def test_a_place_whose_process_has_died_with_unread_words_is_free_soon(tmp_path):
    with job(tmp_path, 1, 1, **VARIABLES, PS_VERBOSE="1") as one:
        scheduler = one.scheduler()
        one.start("server", ["-c", DIES]).end(1)
        scheduler.wait_for("server 0 (")
        one.server(DMLC_TASK_ID="0")
        one.start("worker", ["-c", TRAINS, "dist_async"], DMLC_TASK_ID="0").wait_for("pushed")


def test_a_worker_that_comes_when_another_one_is_gone_does_not_wait_for_that(tmp_path):
    stays = TRAINS.replace("kv.barrier()\n", "") + "time.sleep(120)\n"  # so that the job is not over
    with job(tmp_path, 3, 1, **VARIABLES) as one:
        one.scheduler()
        one.server(DMLC_TASK_ID="0")
        workers = [one.start("worker", ["-c", stays, "dist_sync"], DMLC_TASK_ID=str(number)) for number in range(3)]
        for worker in workers:
            worker.wait_for("pushed", 3)
        workers[1].kill()
        workers[2].kill()
        workers[0].wait_for("failed")
        again = one.start("worker", ["-c", stays, "dist_sync"], DMLC_TASK_ID="1", DMLC_NUM_ATTEMPT="1")
        again.wait_for("failed")
        assert "worker 2 (" in again.output() and "has died: " in again.output()


def test_a_process_whose_place_another_one_has_taken_is_told_so(tmp_path):
    with job(tmp_path, 2, 1, **VARIABLES) as one:
        _, _, workers = start(one, "dist_async", 2, 1)
        program = TRAINS.replace("kv.barrier()\n", "")
        again = one.start("worker", ["-c", program, "dist_async"], DMLC_TASK_ID="1", DMLC_NUM_ATTEMPT="1")
        again.wait_for("pushed", 3)
        # the scheduler names the other process; a server that refuses a push before that knows both reasons only
        assert re.search("was expelled.*another process has taken its place", failure_of(workers[1])[1])
        assert "failed" not in workers[0].output()


def test_a_process_gives_signs_of_life_more_often_than_its_silence_would_end_it():
    assert times_of({"kv_heartbeat_s": "5", "kv_timeout_s": "30"}) == (5.0, 30.0)
    assert times_of({"kv_heartbeat_s": "5", "kv_timeout_s": "6"}) == (2.0, 6.0)


def test_a_silence_that_ends_healthy_processes_is_refused(tmp_path):
    with job(tmp_path, 1, 1, RINGTRAIN_KV_TIMEOUT_S="6") as one:
        one.scheduler()
        worker = one.start(
            "worker", ["-c", TRAINS, "dist_sync"], RINGTRAIN_KV_HEARTBEAT_S="7", RINGTRAIN_KV_TIMEOUT_S="30"
        )
        assert (
            "kv_timeout_s of the scheduler must be more than kv_heartbeat_s of all others, not 6 and 7" in worker.end(1)
        )


# ------------------------------------------------------------------------------------------- the workers as ranks

RANKS = """
import os, sys
import numpy as np
import ringtrain as hvd
hvd.init()
rank, total = hvd.rank(), hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum)
assert (rank, hvd.size()) == (int(os.environ["DMLC_TASK_ID"]), 3) and (total == 6).all()
from ringtrain import kvstore
for kind in ("horovod", "ringtrain", "dist_sync"):
    kv = kvstore.create(kind)
    kv.init("a", np.zeros(3, np.float32))
    value = np.full(3, kv.rank + 1, np.float32)
    kv.pushpull("a", value)
    assert (kv.rank, kv.num_workers, value[0]) == (rank, 3, 6), (kind, kv.rank, kv.num_workers, value)
hvd.shutdown()
hvd.init()
assert hvd.broadcast_object(rank, 2) == 2
print("good")
"""


@pytest.mark.parametrize("servers", [0, 1])
def test_workers_of_a_job_with_servers_are_ranks_of_init(tmp_path, servers):
    with job(tmp_path, 3, servers) as one:
        # a script that knows nothing of stores runs in every role
        serving = [one.start("scheduler", ["-c", RANKS])]
        serving += [one.start("server", ["-c", RANKS]) for _ in range(servers)]
        for worker in [one.start("worker", ["-c", RANKS], DMLC_TASK_ID=str(2 - i)) for i in range(3)]:
            assert worker.end() == "good\n"
        for process in serving:
            assert process.end() == ""


ALONE = """
import sys
import numpy as np
from ringtrain import kvstore
kv = kvstore.create(sys.argv[1])
kv.init(0, np.zeros(3, np.float32))
value = np.ones(3, np.float32)
kv.pushpull(0, value)
print(kv.type, kv.num_workers, value[0])
"""


@pytest.mark.parametrize("kind", ["horovod", "ringtrain"])
def test_stores_that_only_add_up_have_all_workers_of_a_job_with_servers(tmp_path, kind):
    with job(tmp_path, 2, 1) as one:
        one.scheduler()
        one.server()
        for worker in [one.start("worker", ["-c", ALONE, kind]) for _ in range(2)]:
            assert worker.end() == f"{kind} 2 2.0\n"


def test_a_worker_that_comes_later_is_told_that_init_is_over(tmp_path):
    variables = {**VARIABLES, "RINGTRAIN_KV_REJOIN_S": "60"}
    program = "import ringtrain as hvd, time\nhvd.init()\nprint('began', flush=True)\ntime.sleep(60)"
    with job(tmp_path, 2, 1, **variables) as one:
        one.scheduler()
        one.server()
        workers = [one.start("worker", ["-c", program], DMLC_TASK_ID=str(number)) for number in range(2)]
        for worker in workers:
            worker.wait_for("began")
        workers[1].kill()
        again = one.start("worker", ["-c", program], DMLC_TASK_ID="1", DMLC_NUM_ATTEMPT="1")
        assert "worker 1 has taken the place of a lost one, and the init() of the other workers is over" in again.end(1)


# ----------------------------------------------------------------------------------------------------- earlier terms


@pytest.mark.fast
@pytest.mark.alike
@pytest.mark.parametrize("shares", [True, False], ids=["shared", "tcp"])
def test_nothing_of_an_expelled_worker_counts(shares):
    expelled = r"^worker 0 was expelled from its job, after a silence \(kv_timeout_s\) or because another process has"

    def body(worker):
        worker.make([("float32", 40_000)])
        worker.set_rule("test", rescale_grad=1.0)
        worker.push(np.ones(40_000, "float32"))
        worker.tell(0, 1)
        wait_until(lambda: worker._workers.board[CAPACITY + 1] == 1)
        with pytest.raises(_core.PeerLostError, match=expelled):
            worker.push(np.ones(40_000, "float32"))
        with pytest.raises(_core.PeerLostError, match=expelled):
            worker.client.assign(0, [0], [view(np.ones(40_000, "float32"))])

    with store(1) as workers:
        pid = workers.start(0, body, shares)
        with running([pid]):
            wait_until(lambda: workers.board[CAPACITY] == 1)
            for server in workers.servers:
                server.lost(0, 1)
            workers.board[CAPACITY + 1] = 1
            require_success(pid)


# ------------------------------------------------------------------------------------------- the states, without time

LIMITS = Limits(workers=2, servers=1, capacity=8, timeout_s=3.0, rejoin_s=0.0, keeps=False, start_timeout_s=60.0)


def come(membership: Membership, member: int, role: str, task: int, now_s: float, attempt: int = 0) -> list[object]:
    about = {"host": "h", "pid": 100 + member, "attempt": attempt, "patience_s": 60, "heartbeat_s": 0.5}
    return membership.come(member, {"id": 1, "role": role, "task": task, "addresses": [["h", 1]], **about}, now_s)


def began(limits: Limits = LIMITS) -> Membership:
    """Members 0 and 1 are the workers, 2 is the server; it is time 0."""
    membership = Membership(limits)
    for member, (role, task) in enumerate([("worker", 0), ("worker", 1), ("server", 0)]):
        output = come(membership, member, role, task, 0.0)
    assert sum(isinstance(one, Tell) and one.message["kind"] == "world" for one in output) == 3
    return membership


def told(output: list[object], kind: str) -> list[int]:
    return [one.member for one in output if isinstance(one, Tell) and one.message["kind"] == kind]


def beat(membership: Membership, members: list[int], now_s: float) -> None:
    for member in members:
        membership.hear(member, {"kind": "beat"}, now_s)


def test_a_silent_process_is_expelled_after_the_timeout_and_the_others_hear_of_it_at_once():
    membership = began()
    for tenths in range(31):
        beat(membership, [0, 2], tenths / 10)
        assert not told(membership.tick(tenths / 10), "expelled")
    output = membership.tick(3.05)
    assert told(output, "expelled") == [1] and Drop(1) in output
    assert told(output, "lost") == [0, 2] and told(output, "fenced") == [2]


@pytest.mark.parametrize("ends", ["waits for the others", "done", "lost"])
def test_a_worker_that_waits_for_a_key_hears_that_worker_0_has_ended(ends):
    membership = began()
    find = {"kind": "find", "store": 0, "versions": {"key/w": 1}, "patience_s": 600.0, "warning_s": 0}
    assert membership.hear(1, {**find, "id": 5}, 1.0) == []
    if ends == "waits for the others":
        output = membership.hear(0, say(2, END), 2.0)
    else:
        output = membership.done(0, 2.0) if ends == "done" else membership.lose(0, "its process has ended", 2.0)
    (failure,) = [one.message for one in output if isinstance(one, Tell) and one.message["kind"] == "error"]
    assert failure["error"] == "PeerLostError" and failure["id"] == 5
    assert failure["text"].startswith("worker 0 (h, pid 100) has ")
    assert failure["text"].endswith('; no other process gives key "w" a value')
    assert told(membership.hear(1, {**find, "id": 6}, 3.0), "error") == [1]


def test_with_a_time_to_rejoin_only_servers_hear_at_once_that_a_worker_is_lost():
    membership = began(LIMITS._replace(rejoin_s=5.0))
    output = membership.lose(1, "its process has ended", 1.0)
    assert told(output, "fenced") == [2] and told(output, "lost") == []
    beat(membership, [0, 2], 5.9)
    assert told(membership.tick(5.9), "lost") == []
    assert told(membership.tick(6.1), "lost") == [0, 2]


def test_a_server_that_comes_back_does_not_prolong_the_wait_for_workers():
    roster = began(LIMITS._replace(rejoin_s=50.0))
    for worker in (0, 1):
        roster.lose(worker, "its process has ended", 1.0)
    roster.lose(2, "its process has ended", 1.0)
    come(roster, 3, "server", 0, 2.0, attempt=1)
    beat(roster, [3], 3.9)
    assert not any(isinstance(one, Over) for one in roster.tick(3.9))
    assert Over() in roster.tick(4.1)


def test_a_worker_that_comes_back_ends_the_wait_for_workers():
    roster = began(LIMITS._replace(rejoin_s=50.0))
    for worker in (0, 1):
        roster.lose(worker, "its process has ended", 1.0)
    come(roster, 3, "worker", 0, 2.0, attempt=1)
    beat(roster, [2, 3], 4.5)
    assert not any(isinstance(one, Over) for one in roster.tick(4.5))


def test_each_process_in_a_place_has_a_term_of_its_own():
    membership = began(LIMITS._replace(rejoin_s=50.0))
    for term, member in [(1, 3), (2, 4)]:
        membership.lose(1 if term == 1 else 3, "its process has ended", 1.0)
        output = come(membership, member, "worker", 1, 2.0, attempt=term)
        world = next(one.message for one in output if isinstance(one, Tell) and one.message["kind"] == "world")
        assert world["terms"] == {"0": 0, "1": term} and world["gone"] == {}
        backs = [one.message["term"] for one in output if isinstance(one, Tell) and one.message["kind"] == "back"]
        assert backs == [term, term]


def say(number: int, label: str) -> dict[str, object]:
    limits = {"patience_s": 600, "warning_s": 60}
    return {"kind": "say", "id": number, "label": label, "value": 0, "joins_only": False, **limits}


def answered(membership: Membership, member: int, joins_only: bool = False) -> list[int]:
    """Brings this member to a barrier. Returns the members that are answered then."""
    return sorted(told(membership.hear(member, {**say(9, "barrier"), "joins_only": joins_only}, 3.0), "answer"))


def test_a_worker_that_comes_back_holds_a_round_alone_only_if_one_of_its_label_has_ended():
    membership = began(LIMITS._replace(rejoin_s=50.0))
    membership.lose(1, "its process has ended", 1.0)
    come(membership, 3, "worker", 1, 2.0, attempt=1)
    assert answered(membership, 3, joins_only=True) == []
    assert answered(membership, 0) == [0, 3]
    membership.lose(3, "its process has ended", 3.0)
    come(membership, 4, "worker", 1, 3.0, attempt=2)
    assert answered(membership, 4, joins_only=True) == [4]


def test_a_worker_that_comes_back_waits_in_a_round_that_only_the_dead_one_has_held():
    membership = began()
    assert answered(membership, 1) == []
    assert told(membership.lose(1, "its process has ended", 3.0), "lost") == [0, 2]
    come(membership, 3, "worker", 1, 3.0, attempt=1)
    assert answered(membership, 3, joins_only=True) == []
    assert answered(membership, 0) == [0, 3]


def test_a_worker_that_has_given_up_a_round_is_not_said_not_to_have_come():
    rounds = Rounds()

    def errors_at(now_s: float) -> list[str]:
        return [failure["text"] for _, failure in rounds.overdue(now_s, range(3))]

    def say(number: int, now_s: float) -> None:
        message = {"label": "barrier", "value": 0, "id": 1, "joins_only": False, "patience_s": 5.0, "warning_s": 0}
        assert rounds.say(message, number, number, now_s, range(3)) == []

    say(0, 0.0)
    say(2, 1.0)
    assert errors_at(5.5) == ["barrier: worker 1 did not come in 5.5 s"]
    assert errors_at(7.0) == ["barrier: worker 1 did not come in 6.0 s"]
    say(1, 7.0)
    assert errors_at(13.0) == ["barrier: workers 0, 2 gave up and did not come again in 6.0 s"]


def test_a_process_that_comes_is_told_which_workers_are_gone():
    membership = began()
    membership.lose(0, "its process has ended", 1.0)
    membership.lose(1, "its process has ended", 1.0)
    output = come(membership, 3, "worker", 1, 2.0, attempt=1)
    world = next(one.message for one in output if isinstance(one, Tell) and one.message["kind"] == "world")
    assert world["gone"] == {"0": "worker 0 (h, pid 100) has died: its process has ended"}


def test_a_process_that_was_refused_a_place_may_still_give_signs_of_life():
    roster = began()
    assert told(come(roster, 3, "worker", 2, 1.0), "error") == [3]
    assert roster.hear(3, {"kind": "beat"}, 1.5) == []
    assert roster.lose(3, "its process has ended", 2.0) == []


def test_a_vacant_place_ends_a_job_that_has_not_begun_after_the_timeout():
    membership = Membership(LIMITS)
    come(membership, 0, "worker", 0, 0.0)
    come(membership, 1, "worker", 1, 0.0)
    membership.lose(1, "its process has ended", 1.0)
    beat(membership, [0], 3.9)
    assert membership.tick(3.9) == []
    output = membership.tick(4.1)
    assert told(output, "failed") == [0] and any(isinstance(one, Over) and one.failure for one in output)
    other = Membership(LIMITS)
    come(other, 0, "worker", 0, 0.0)
    come(other, 1, "worker", 1, 0.0)
    other.lose(1, "its process has ended", 1.0)
    come(other, 2, "worker", 1, 2.0)
    beat(other, [0, 2], 4.5)
    assert other.tick(4.5) == []


def test_a_job_that_has_not_begun_ends_when_it_had_no_process_for_the_start_timeout():
    membership = Membership(LIMITS)
    assert membership.tick(0.0) == membership.tick(60.0) == []
    come(membership, 0, "worker", 0, 60.0)
    membership.lose(0, "its process has ended", 61.0)
    assert membership.tick(61.0) == membership.tick(121.0) == []  # the time counts from the last process on
    (over,) = [one for one in membership.tick(121.1) if isinstance(one, Over)]
    assert "the scheduler has waited 60 s (start_timeout_s) for workers and servers" in over.failure
    for_ever = Membership(LIMITS._replace(start_timeout_s=0.0))
    assert for_ever.tick(0.0) == for_ever.tick(1e6) == []


def test_a_scheduler_to_which_no_process_comes_ends_with_an_error(tmp_path):
    with job(tmp_path, 2, 1, RINGTRAIN_START_TIMEOUT_S="1") as one:
        assert "StalledError: the job has not begun: the scheduler has waited 1 s" in one.scheduler().end(1)


def test_a_process_has_no_part_in_its_job_after_the_silence_of_its_scheduler():
    standing = Standing(3.0, 0.0)
    for tenths in range(31):
        standing.look(tenths / 10)
        assert standing.end is None
    standing.look(3.1)
    with pytest.raises(PeerLostError, match=r"gone: it has said nothing for 3\.1 s \(kv_timeout_s\)"):
        standing.require()


def test_time_in_which_a_process_was_stopped_itself_is_no_silence_of_its_scheduler():
    standing = Standing(3.0, 0.0)
    standing.look(100.0)
    assert standing.end is None
    standing.hear({"kind": "beat"}, 100.1)
    standing.look(102.0)
    assert standing.end is None


def test_the_first_reason_for_the_end_of_a_part_stays():
    standing = Standing(3.0, 0.0)
    standing.hear({"kind": "expelled", "text": "worker 1 (h, pid 5) was expelled"}, 1.0)
    standing.cut("its process has ended")
    with pytest.raises(PeerLostError, match=r"worker 1 \(h, pid 5\) was expelled"):
        standing.require()
    over = Standing(3.0, 0.0)
    over.hear({"kind": "over", "text": "the scheduler was told to end", "error": "ShutDownError"}, 1.0)
    assert over.is_over
    with pytest.raises(ShutDownError, match="the scheduler was told to end"):
        over.require()


# ------------------------------------------------------------------------------------- workers that wait for each other


def ended(output: list[Output]) -> list[tuple[int, str]]:
    """Returns whose requests end, with the name of the error or ""."""
    told = [one for one in output if isinstance(one, Tell) and one.message["kind"] in ("answer", "error")]
    return [(one.member, one.message.get("error", "")) for one in told]


def ask(membership: Membership, member: int, message: dict[str, object]) -> list[tuple[int, str]]:
    return ended(membership.hear(member, message, 1.0))


def find(number: int, key: str) -> dict[str, object]:
    limits = {"patience_s": 600, "warning_s": 60}
    return {"kind": "find", "id": number, "store": 0, "versions": {f"key/{key}": 1}, **limits}


def stuck(number: int, awaited: list[int], known: dict[str, list[int]]) -> dict[str, object]:
    return {"kind": "stuck", "id": number, "what": 'key "a"', "awaited": awaited, "known": known}


BOTH_FAIL = [(0, "DeadlockError"), (1, "DeadlockError")]


def test_workers_in_different_rounds_fail_and_can_hold_the_next():
    membership = began()
    assert ask(membership, 0, say(1, "barrier")) == []
    assert ended(membership.tick(1.0)) == []
    assert ask(membership, 1, say(1, "set_optimizer")) == []
    assert ended(membership.tick(1.0)) == BOTH_FAIL
    assert ended(membership.tick(1.0)) == []
    assert ask(membership, 0, say(2, "barrier")) == []
    assert ask(membership, 1, say(2, "barrier")) == [(0, ""), (1, "")]


def test_a_worker_that_waits_for_a_key_fails_with_worker_0_that_waits_for_it_in_a_round():
    membership = began()
    assert ask(membership, 1, find(1, "a")) == []
    assert ended(membership.tick(1.0)) == []
    assert ask(membership, 0, say(1, "barrier")) == []
    assert ended(membership.tick(1.0)) == BOTH_FAIL


def test_workers_that_wait_for_some_that_wait_for_each_other_fail_with_these():
    membership = Membership(LIMITS._replace(workers=3))
    for member, (role, task) in enumerate([("worker", 0), ("worker", 1), ("worker", 2), ("server", 0)]):
        come(membership, member, role, task, 0.0)
    assert ask(membership, 1, find(1, "a")) == []
    assert ask(membership, 2, say(1, "barrier")) == []
    assert ended(membership.tick(1.0)) == []
    assert ask(membership, 0, say(1, "barrier")) == []
    assert ended(membership.tick(1.0)) == [*BOTH_FAIL, (2, "DeadlockError")]


def test_a_worker_that_waits_for_a_push_fails_only_if_the_other_waited_when_it_looked():
    membership = began()
    assert ask(membership, 0, say(1, "set_optimizer")) == []
    assert ask(membership, 0, {"kind": "pushed", "id": 1}) == []
    # it may have looked before worker 0 had pushed
    assert ask(membership, 1, stuck(1, [0], {})) == [(1, "")]
    assert ask(membership, 1, stuck(2, [0], {"0": [0, 7]})) == [(1, "")]
    assert ask(membership, 1, stuck(3, [], {"0": [0, 1]})) == [(1, "")]
    assert ask(membership, 1, stuck(4, [0], {"0": [0, 1]})) == BOTH_FAIL


def test_a_worker_whose_pushes_are_under_way_is_not_blamed():
    membership = began()
    assert ask(membership, 0, {"kind": "pushed", "id": 0}) == []  # in a wait before
    assert ask(membership, 0, say(1, "barrier")) == []
    for number in range(3):
        assert ask(membership, 1, stuck(number, [0], {"0": [0, 1]})) == [(1, "")]
    assert ask(membership, 0, {"kind": "pushed", "id": 1}) == []
    assert ask(membership, 1, stuck(3, [0], {"0": [0, 1]})) == BOTH_FAIL


def test_a_request_that_ctrl_c_has_interrupted_is_no_wait():
    membership = began()
    assert ask(membership, 0, say(1, "barrier")) == []
    assert ask(membership, 0, {"kind": "interrupted", "id": 1}) == []
    assert ask(membership, 1, say(1, "set_optimizer")) == []
    assert ended(membership.tick(1.0)) == []
    assert ask(membership, 0, say(2, "set_optimizer")) == [(1, ""), (0, "")]


def test_a_worker_that_comes_back_does_not_wait_in_a_round_of_the_one_before():
    membership = began(LIMITS._replace(rejoin_s=50.0))
    assert ask(membership, 1, say(1, "set_optimizer")) == []
    membership.lose(1, "its process has ended", 1.0)
    assert ask(membership, 0, say(1, "barrier")) == []
    come(membership, 3, "worker", 1, 1.0, attempt=1)
    assert ended(membership.tick(1.0)) == []
    assert ask(membership, 3, say(1, "load")) == []
    assert ended(membership.tick(1.0)) == [(0, "DeadlockError"), (3, "DeadlockError")]


def test_a_long_wait_is_warned_of_once_and_names_those_that_did_not_come():
    membership = began()
    assert membership.hear(0, say(1, "barrier"), 0.0) == []
    beat(membership, [0, 1, 2], 60.0)
    assert told(membership.tick(59.9), "stalled") == []
    (warning,) = [one for one in membership.tick(60.1) if isinstance(one, Tell)]
    assert warning.member == 0 and warning.message["text"] == "in barrier: worker 1 did not come"
    assert told(membership.tick(60.2), "stalled") == []
