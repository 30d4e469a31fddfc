"""The scheduler of a job of workers and servers: places, rounds, the directory, and who is lost."""

from __future__ import annotations

import os
import signal
import time

import pytest
from harness.hosts import hosts_or_skip
from kvstore_jobs import SOON_OVER, job

from ringtrain.job.host import addresses_of
from ringtrain.kvstore.servers import roles
from ringtrain.kvstore.servers.keys import KeyPlacement

# A worker or server that has a place and nothing else.
CLIENT = """
import os, sys, time
os.environ["RINGTRAIN_NO_AUTOSERVE"] = "1"
from ringtrain.kvstore.servers import roles
from ringtrain.kvstore.servers.arrival import arrive, secret_of
from ringtrain.options import table

role = roles.of_environment()
try:
    arrival = arrive(role, secret_of(role), table.resolve({}))
    world = arrival.world()
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
scheduler = arrival.scheduler_client
notices = []
scheduler.listen_with(notices.append)
print("here", arrival.name, arrival.number, flush=True)

def wait_for(kind):
    while not any(one["kind"] == kind for one in notices):
        time.sleep(0.01)
    return next(one for one in notices if one["kind"] == kind)

"""
SERVER = CLIENT + "wait_for('over'); scheduler.leave(0)"
FAST = {"RINGTRAIN_KV_HEARTBEAT_S": "0.2", "RINGTRAIN_KV_TIMEOUT_S": "1.5"}


def test_keys_are_spread_by_their_bytes_and_large_ones_are_cut():
    placement = KeyPlacement(2, bound=1000)
    small, large, other = placement.place([(10, 4), (1000, 4), (200, 4)])
    assert large == [(0, 0, 512), (1, 512, 488)]
    assert other == [(1, 0, 200)]
    assert small == [(0, 0, 10)]
    assert (
        KeyPlacement(3, 32).place([(33, 4)]) == [[(0, 0, 33)]]
        or sum(piece.elements for piece in KeyPlacement(3, 32).place([(33, 4)])[0]) == 33
    )


def test_keys_of_one_piece_are_spread_by_their_bytes_whatever_the_bound():
    assert KeyPlacement(2, bound=1).place([(1, 4), (3, 4)]) == [[(1, 0, 1)], [(0, 0, 3)]]


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 1000, 65536, 1_000_003])
def test_the_pieces_of_a_key_are_all_of_it(servers, count):
    (pieces,) = KeyPlacement(servers, 1).place([(count, 4)])
    assert [piece.begin for piece in pieces] == [sum(one.elements for one in pieces[:i]) for i in range(len(pieces))]
    assert sum(piece.elements for piece in pieces) == count
    assert all(piece.begin % 32 == 0 and piece.elements > 0 for piece in pieces)


def test_a_role_is_what_mxnets_variables_say():
    environ = {
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": "10.0.0.1",
        "DMLC_PS_ROOT_PORT": "9091",
        "DMLC_NUM_WORKER": "4",
        "DMLC_NUM_SERVER": "2",
    }
    assert roles.of_environment(environ) == ("worker", "10.0.0.1", 9091, 4, 2, None, 0, "")
    more = {"DMLC_TASK_ID": "3", "DMLC_NUM_ATTEMPT": "1", "DMLC_NODE_HOST": "10.0.0.7"}
    assert roles.of_environment({**environ, **more})[5:] == (3, 1, "10.0.0.7")
    in_brackets = {"DMLC_PS_ROOT_URI": "[::1]", "DMLC_NODE_HOST": "[fe80::1]"}
    assert roles.of_environment({**environ, **in_brackets})[1::6] == ("::1", "fe80::1")
    assert roles.of_environment({}) is None
    for wrong, message in [
        ({"DMLC_ROLE": "boss"}, "DMLC_ROLE is one of worker, server, scheduler, not 'boss'"),
        ({"DMLC_NUM_WORKER": ""}, "DMLC_NUM_WORKER is to be a number from 1 on, but is ''"),
        ({"DMLC_NUM_SERVER": "x"}, "DMLC_NUM_SERVER is to be a number from 0 on, but is 'x'"),
    ]:
        with pytest.raises(ValueError, match=message):
            roles.of_environment({**environ, **wrong})
    with pytest.raises(ValueError, match="has to know where the scheduler is: set DMLC_PS_ROOT_URI"):
        roles.of_environment({"DMLC_ROLE": "worker"})


def test_all_meet_and_say_things_and_end(tmp_path):
    program = CLIENT + (
        "print(world.number, world.workers, len(world.servers), sorted(world.names), world.is_recovery)\n"
        "print(scheduler.say('round', world.number * 10, 5))\n"
        "print(scheduler.say('round', world.number * 100, 5))\n"
        "scheduler.publish(0, {'a': {'version': 1, 'x': 5}}) if world.number == 0 else None\n"
        "print(scheduler.find(0, {'a': 1, 'no': 0}, 5))\n"
        "print('dead', scheduler.count_dead(6, 60))\n"
        "scheduler.leave(5)"
    )
    with job(tmp_path, 2, 2) as of_two:
        scheduler = of_two.scheduler()
        servers = [of_two.start("server", ["-c", SERVER]) for _ in range(2)]
        workers = [of_two.worker(program, DMLC_TASK_ID=str(1 - i)) for i in range(2)]
        for number, worker in zip((1, 0), workers, strict=True):
            said = worker.end().splitlines()
            assert said == [
                f"here worker {number}",
                f"{number} 2 2 [0, 1] False",
                "{0: 0, 1: 10}",
                "{0: 0, 1: 100}",
                "{'a': {'version': 1, 'x': 5}, 'no': None}",
                "dead 0",
            ]
        assert {server.end().strip() for server in servers} == {"here server 0", "here server 1"}
        assert scheduler.end() == ""


def test_the_scheduler_gives_roles_to_who_has_none(tmp_path):
    with job(tmp_path, 1, 2) as of_three:
        of_three.scheduler()
        program = CLIENT + "wait_for('over') if arrival.name == 'server' else None\nscheduler.leave(5)"
        said = sorted(one.end().strip() for one in [of_three.start("", ["-c", program]) for _ in range(3)])
        assert said == ["here server 0", "here server 1", "here worker 0"]


def test_missing_processes_are_named(tmp_path):
    with job(tmp_path, 2, 1, RINGTRAIN_START_TIMEOUT_S="1") as of_three:
        scheduler = of_three.scheduler()
        said = of_three.worker(CLIENT, DMLC_TASK_ID="0").end(1)
        assert "StalledError" in said
        assert "(start_timeout_s): worker 1, server 0 did not come" in said
        assert "worker 1, server 0 did not come" in scheduler.end(1)


def test_without_a_scheduler_nobody_waits_for_ever(tmp_path):
    with job(tmp_path, 1, 1, RINGTRAIN_START_TIMEOUT_S="0.5") as of_two:
        said = of_two.worker(CLIENT).end(1)
        assert "the scheduler of this job was not at 127.0.0.1" in said


def test_a_place_to_listen_that_is_not_here_is_named_by_its_variable(tmp_path):
    with job(tmp_path, 1, 0) as of_one:
        of_one.scheduler()
        said = of_one.worker(CLIENT, DMLC_INTERFACE="eth77").end(1)
        assert "kv_interface (DMLC_INTERFACE)=eth77: this host has no such interface or address, but lo 127" in said
        said = of_one.worker(CLIENT, DMLC_NODE_HOST="no..name").end(1)
        assert "ValueError: DMLC_NODE_HOST=no..name has no address (" in said


def test_a_server_whose_address_only_others_know_listens_at_all_addresses_of_its_host(tmp_path):
    program = CLIENT + (
        "import socket\n"
        "((host, port),) = world.servers[0]\n"
        "socket.create_connection(('127.0.0.1', port), timeout=5)\n"
        "print(host)\n"
        "scheduler.leave(5)"
    )
    with job(tmp_path, 1, 0, DMLC_NODE_HOST="192.0.2.7") as of_one:
        of_one.scheduler()
        assert of_one.worker(program).end().splitlines()[1:] == ["192.0.2.7"]


def test_an_address_of_this_host_is_a_place_to_listen():
    assert addresses_of("127.0.0.1") == addresses_of("127.0.0.0/8") == ["127.0.0.1"]
    with pytest.raises(ValueError, match=r"socket_interfaces=10\.1\.0\.0/99: this host has no such interface"):
        addresses_of("10.1.0.0/99")


def test_two_processes_cannot_be_one_worker(tmp_path):
    with job(tmp_path, 1, 0) as of_one:
        of_one.scheduler()
        first = of_one.worker(CLIENT + "time.sleep(60)", DMLC_TASK_ID="0")
        first.wait_for("here")
        said = of_one.worker(CLIENT, DMLC_TASK_ID="0").end(1)
        assert "ValueError: two processes are worker 0 (DMLC_TASK_ID)" in said
        assert f"pid {first.pid}" in said
        assert "has come to a job that has all its 1 workers" in of_one.worker(CLIENT).end(1)


def test_a_stranger_is_not_let_in(tmp_path):
    with job(tmp_path, 1, 0) as of_one:
        of_one.scheduler()
        of_one.worker(CLIENT + "time.sleep(60)").wait_for("here")
        (tmp_path / "other").write_bytes(os.urandom(32))
        (tmp_path / "other").chmod(0o600)
        other = {"RINGTRAIN_SECRET_FILE": str(tmp_path / "other"), "RINGTRAIN_START_TIMEOUT_S": "1"}
        assert "does not know this job's secret" in of_one.worker(CLIENT, **other).end(1)


WAITS = CLIENT + (
    "try:\n"
    "    print('said', scheduler.say('barrier', None, 30))\n"
    "except Exception as error:\n"
    "    print(type(error).__name__, error)\n"
    "print('dead', scheduler.count_dead(4, 60))\n"
    "while not notices: time.sleep(0.01)\n"
    "print([(one['kind'], one['role'], one['number']) for one in notices])\n"
    "scheduler.leave(5)"
)


def test_a_worker_that_dies_ends_the_rounds_of_the_others(tmp_path):
    with job(tmp_path, 2, 1, **SOON_OVER) as of_three:
        scheduler = of_three.scheduler()
        server = of_three.start("server", ["-c", SERVER])
        waits = of_three.worker(WAITS, DMLC_TASK_ID="0")
        dies = of_three.worker(CLIENT + "time.sleep(60)", DMLC_TASK_ID="1")
        dies.wait_for("here")
        waits.wait_for("here")
        dies.kill()
        said = waits.end()
        assert "PeerLostError barrier: worker 1 (" in said
        assert f"pid {dies.pid}) has died: its process has ended" in said
        assert "dead 1" in said
        assert "[('lost', 'worker', 1)]" in said
        server.end()
        scheduler.end()


def test_a_worker_that_is_stopped_is_dead_after_a_while(tmp_path):
    with job(tmp_path, 2, 0, **FAST) as of_two:
        of_two.scheduler()
        waits = of_two.worker(WAITS, DMLC_TASK_ID="0")
        stops = of_two.worker(CLIENT + "print(scheduler.say('barrier', None, 30))", DMLC_TASK_ID="1")
        stops.wait_for("here")
        os.kill(stops.pid, signal.SIGSTOP)
        said = waits.end(within_s=10)
        os.kill(stops.pid, signal.SIGCONT)
        if "said" not in said:  # it was stopped before it came
            assert "it has said nothing for" in said
            assert "the others take this process for dead" in stops.end(1)


def test_a_worker_that_does_not_come_is_named(tmp_path):
    with job(tmp_path, 2, 0) as of_two:
        of_two.scheduler()
        waits = of_two.worker(WAITS.replace("None, 30", "None, 0.5"), DMLC_TASK_ID="0")
        of_two.worker(CLIENT + "time.sleep(60)", DMLC_TASK_ID="1")
        waits.wait_for("StalledError barrier: worker 1 did not come in 0.")


def test_another_process_takes_the_place_of_a_dead_worker(tmp_path):
    with job(tmp_path, 2, 1, RINGTRAIN_KV_REJOIN_S="30") as of_three:
        scheduler = of_three.scheduler()
        of_three.start("server", ["-c", SERVER])
        waits = of_three.worker(WAITS, DMLC_TASK_ID="0")
        dies = of_three.worker(CLIENT + "time.sleep(60)", DMLC_TASK_ID="1")
        dies.wait_for("here")
        waits.wait_for("here")
        dies.kill()
        again = of_three.worker(
            CLIENT + "print('again', world.is_recovery)\nscheduler.say('barrier', 7, 5)\nscheduler.leave(5)",
            DMLC_TASK_ID="1",
        )
        assert "again True" in again.end()
        said = waits.end()
        assert "said {0: None, 1: 7}" in said
        assert "dead 0" in said
        assert "[('back', 'worker', 1)" in said
        scheduler.end()


def test_a_worker_that_has_failed_is_lost_with_its_error(tmp_path):
    with job(tmp_path, 2, 0) as of_two:
        of_two.scheduler()
        waits = of_two.worker(WAITS, DMLC_TASK_ID="0")
        of_two.worker(CLIENT + "scheduler.fail('ValueError: no')", DMLC_TASK_ID="1")
        assert "has died: ValueError: no" in waits.end()


def test_without_the_scheduler_rounds_are_errors_and_all_are_told(tmp_path):
    with job(tmp_path, 1, 1) as of_two:
        scheduler = of_two.scheduler()
        server = of_two.start("server", ["-c", CLIENT + "wait_for('gone'); print('alone')"])
        worker = of_two.worker(
            CLIENT + "wait_for('gone')\ntry:\n  scheduler.say('x')\nexcept Exception as e: print(type(e), e)"
        )
        worker.wait_for("here")
        scheduler.kill()
        assert "PeerLostError'> the scheduler of this job is gone" in worker.end()
        assert "alone" in server.end()


# In each step the scheduler holds a round, and the servers sum what the workers push.
TRAINING = """
import numpy, time
from ringtrain import kvstore
kv = kvstore.create("dist_sync")
kv.init("w", numpy.zeros(1000))
value = numpy.empty(1000)
for step in range(400):
    kv.push("w", numpy.full(1000, float(step + kv.rank)))
    kv.pull("w", out=value)
    assert (value == 2 * step + 1).all()
    kv.barrier()
    time.sleep(0.005)
    if step == 20:
        print("trains", flush=True)
print("well", flush=True)
"""


@pytest.mark.parametrize("fault", ["resets", "outage"])
def test_connections_to_the_scheduler_that_break_cost_no_process(tmp_path, fault):
    with hosts_or_skip(2) as hosts, job(tmp_path, 2, 2, hosts) as of_five:
        scheduler = of_five.scheduler(RINGTRAIN_KV_VERBOSE="1")
        servers = [of_five.server(), of_five.server()]
        workers = [of_five.worker(TRAINING), of_five.worker(TRAINING)]
        workers[0].wait_for("trains")
        if fault == "outage":
            with hosts.unplugged(1):
                time.sleep(5)  # of 10 s in which a process may be silent
        for number in range(10 if fault == "resets" else 0):
            hosts.reset_connections(number % 2, of_five.port)
            time.sleep(0.1)
        for worker in workers:
            assert "well" in worker.end()
        for process in (*servers, scheduler):
            assert "died" not in process.end()


def test_when_no_worker_is_left_the_servers_end(tmp_path):
    with job(tmp_path, 1, 1, **FAST) as of_two:
        scheduler = of_two.scheduler()
        server = of_two.start("server", ["-c", SERVER])
        worker = of_two.worker(CLIENT + "time.sleep(60)")
        worker.wait_for("here")
        began_s = time.monotonic()
        worker.kill()
        server.end()
        scheduler.end()
        assert time.monotonic() - began_s < 10


def test_a_server_does_not_wait_for_a_scheduler_that_is_stopped(tmp_path):
    with job(tmp_path, 1, 1, **FAST) as of_two:
        scheduler = of_two.scheduler()
        server = of_two.server()
        create = "import time\nfrom ringtrain import kvstore\nkv = kvstore.create('dist_async')\nprint('here')\n"
        worker = of_two.worker(create + "time.sleep(60)")
        worker.wait_for("here")
        scheduler.popen.send_signal(signal.SIGSTOP)
        worker.kill()
        assert "PeerLostError: the scheduler of this job is gone: it has said nothing for" in server.end(1, within_s=30)


def test_a_process_that_comes_to_a_stopping_scheduler_gets_an_error(tmp_path):
    with job(tmp_path, 2, 0, **FAST, RINGTRAIN_START_TIMEOUT_S="3") as of_two:
        scheduler = of_two.scheduler()
        comes = of_two.worker(CLIENT.replace("    world = ", "    print('came', flush=True)\n    world = "))
        comes.wait_for("came")
        scheduler.popen.send_signal(signal.SIGSTOP)
        assert "PeerLostError: the scheduler of this job is gone: it has said nothing for" in comes.end(1, within_s=30)


# --------------------------------------------------------------------------------- two jobs at one place of a scheduler


def test_a_second_scheduler_ends_a_job_that_waits(tmp_path):
    """Nothing tells which of the processes that come later are of which job."""
    with job(tmp_path, 2, 1) as one:
        first, server = one.scheduler(RINGTRAIN_KV_VERBOSE="1"), one.server()
        first.wait_for("has come")
        second = one.scheduler()
        for process in (second, first, server):
            assert f"pid {second.pid} is a second scheduler" in process.end(1)
        assert "ValueError" in server.output() and "another DMLC_PS_ROOT_PORT" in server.output()


def test_a_second_scheduler_is_refused_while_a_job_runs(tmp_path):
    program = (
        CLIENT + "import pathlib\nwhile not pathlib.Path('end').exists():\n    time.sleep(0.01)\nscheduler.leave(0)"
    )
    with job(tmp_path, 1, 0) as one:
        first = one.scheduler()
        worker = one.worker(f"import os; os.chdir({str(tmp_path)!r})\n" + program)
        worker.wait_for("here worker 0")
        assert "is a second scheduler" in one.scheduler().end(1)
        (tmp_path / "end").touch()
        worker.end()
        first.end()


def test_a_worker_of_a_job_of_another_size_is_refused(tmp_path):
    with job(tmp_path, 1, 0) as one:
        scheduler = one.scheduler()
        text = one.worker(CLIENT, DMLC_NUM_WORKER="3").end(1)
        assert "is of a job of 3 workers and 0 servers, but the scheduler of one of 1 and 0" in text
        one.worker(CLIENT + "scheduler.leave(0)").end()
        scheduler.end()
