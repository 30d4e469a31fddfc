"""Jobs whose ranks talk over sockets and are started without any MPI."""

import contextlib
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from harness.exact import require_equal
from harness.hosts import hosts_or_skip
from harness.ringrun_job import wait_until
from harness.socket_ranks import free_port, started
from measure.process import measure_asleep

import ringtrain as hvd
from ringtrain.job.rendezvous import listener as rendezvous_listener, secret
from ringtrain.job.rendezvous.listener import Hub, Listener, bound
from ringtrain.job.rendezvous.protocol import Connection, VersionError
from ringtrain.job.rendezvous.server import Server
from ringtrain.job.sockets import choose_streams

SOCKETS = {"RINGTRAIN_NETWORK": "sockets", "RINGTRAIN_SHARED_MEMORY": "off"}

SUM = """
import numpy as np, ringtrain as hvd
hvd.init()
total = hvd.allreduce(np.full(3, hvd.rank() + 1), op=hvd.Sum)
place = f"rank {hvd.rank()} of {hvd.size()}, {hvd.local_rank()} of {hvd.local_size()}"
print(f"{place}: {total[0]}, MPI {hvd.mpi_enabled()}")
"""
LOOP = """
import sys, time, numpy as np, ringtrain as hvd
hvd.init()
hvd.allreduce(np.ones(1))
print("ready", flush=True)
try:
    while True:
        hvd.allreduce(np.ones(1000), name="loop")
except hvd.PeerLostError as error:
    print(f"lost: {error}")
"""


def ready(ranks):
    """All have printed that they are in their loop."""
    for process in ranks.processes:  # and what comes behind it is left to communicate()
        assert b"".join(os.read(process.stdout.fileno(), 1) for _ in "ready\n") == b"ready\n"


# ------------------------------------------------------------------------------------------------------ how they start


AGAIN = """
import random, sys, time, numpy as np, ringtrain as hvd
for turn in range(10):
    hvd.init()
    draw = random.Random(f"{sys.argv[1]} {turn} {hvd.rank()}")
    assert hvd.allreduce(np.full(3, turn + hvd.rank()), op=hvd.Sum)[0] == 3 * turn + 3
    time.sleep(draw.choice([0, 0.02, 0.3]))
    hvd.shutdown()
    time.sleep(draw.choice([0, 0.02, 0.3]))
print("well")
"""


@pytest.mark.parametrize("seed", ["1", "4", "7"])
def test_ranks_begin_and_end_jobs_one_after_the_other_at_their_own_pace(tmp_path, seed):
    with started(AGAIN, 3, tmp_path, arguments=[seed], **SOCKETS) as ranks:
        assert ranks.outputs() == ["well\n"] * 3


@pytest.mark.fast
def test_ranks_that_somebody_starts_by_hand(tmp_path):
    with started(SUM, 3, tmp_path) as ranks:
        outputs = ranks.outputs()
    assert outputs == [f"rank {rank} of 3, {rank} of 3: 6, MPI False\n" for rank in range(3)]


def test_the_variables_of_torch_distributed_do_as_well(tmp_path):
    """The secret is one of the user's own then."""
    names = {"RINGTRAIN_RENDEZVOUS": "", "RINGTRAIN_SIZE": "", "RINGTRAIN_SECRET_FILE": "", "RINGTRAIN_RANK": ""}
    port, home = free_port(), {"XDG_CONFIG_HOME": str(tmp_path)}
    of_torch = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    with (
        started(SUM, 1, tmp_path, **names, **home, **of_torch, RANK="0") as first,
        started(SUM, 1, tmp_path, **names, **home, **of_torch, RANK="1") as second,
    ):
        assert "rank 0 of 2" in first.outputs()[0] and "rank 1 of 2" in second.outputs()[0]
    file = tmp_path / "ringtrain" / "secret"
    assert file.stat().st_mode & 0o777 == 0o600 and list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("address", ["::1", "127.0.0.1/8", "lo"])
def test_the_interface_may_be_chosen(tmp_path, address):
    place = {"RINGTRAIN_RENDEZVOUS": f"[::1]:{free_port()}"} if ":" in address else {}
    interface = "::1/128" if ":" in address else address
    with started(SUM, 2, tmp_path, RINGTRAIN_SOCKET_INTERFACES=interface, **SOCKETS, **place) as ranks:
        assert "rank 1 of 2" in ranks.outputs()[1]


def test_two_interfaces_of_each_host_are_used_together(tmp_path):
    program = """
import numpy as np, ringtrain as hvd
hvd.init()
mine = np.arange(4 << 20, dtype=np.int64) + hvd.rank()
assert (hvd.allreduce(mine, op=hvd.Sum, name="x") == 2 * np.arange(4 << 20) + 1).all()
"""
    both = {"RINGTRAIN_SOCKET_INTERFACES": "eth0,eth1", "RINGTRAIN_SOCKET_STREAMS": "2"}
    with hosts_or_skip(2) as hosts:
        hosts.add_second_network()
        with started(program, 2, tmp_path, hosts, **SOCKETS, **both) as ranks:
            ranks.outputs()
        # of the 32 MiB that each has sent
        assert all(hosts.bytes_sent(host, f"eth{number}") > 8 << 20 for host in range(2) for number in range(2))


@pytest.mark.parametrize(
    ("delay_s", "variables", "text"),
    [
        (0, {}, None),
        (
            0.004,
            {},
            r"connections: [14] between two ranks, link_hop_us=\d+, ring_chunk_kb=1024; a round trip takes \d+\.\d ms",
        ),
        (
            0.015,
            {},
            r"connections: 4 between two ranks, link_hop_us=\d+, ring_chunk_kb=1024; a round trip takes \d+\.\d ms",
        ),
        (
            0.015,
            {"RINGTRAIN_RING_CHUNK_KB": "240"},
            r"connections: 4 between two ranks, link_hop_us=\d+; a round trip takes",
        ),
        (
            0.015,
            {"RINGTRAIN_SOCKET_STREAMS": "2"},
            r"connections: 2 between two ranks, link_hop_us=\d+, ring_chunk_kb=1024; a round trip takes",
        ),
    ],
)
def test_the_round_trip_between_hosts_decides_about_connections(tmp_path, delay_s, variables, text):
    program = """
import numpy as np, ringtrain as hvd
hvd.init()
values = np.arange(3 << 20, dtype="f4") % 64
total = hvd.allreduce(values * (hvd.rank() + 1), op=hvd.Sum)
print("right" if (total == 3 * values).all() else "wrong")
"""
    with hosts_or_skip(2) as hosts:
        # The program that is the cable adds to the round trip when it has to wait for a CPU.
        cable = hosts.bad_cable(delay_s) if delay_s else contextlib.nullcontext()
        with cable, started(program, 2, tmp_path, hosts, **variables) as ranks:
            outputs = ranks.outputs()
    assert all("right" in output for output in outputs), outputs
    if text is None:
        assert not any("connections:" in output for output in outputs), outputs
    else:
        assert re.search(text, outputs[0]) and "connections:" not in outputs[1], outputs


def test_ranks_that_compute_between_operations_meet_in_one_round_for_each_on_a_long_link(tmp_path):
    program = """
import time, numpy as np, ringtrain as hvd
hvd.init()
for step in range(40):
    if step == 10:
        before = hvd.metrics()["rounds"]
    time.sleep(0.026 if hvd.rank() == step % 2 else 0)
    assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="x") == [2.0]
print("rounds", hvd.metrics()["rounds"] - before)
"""
    with hosts_or_skip(2) as hosts, hosts.bad_cable(0.02), started(program, 2, tmp_path, hosts) as ranks:
        outputs = ranks.outputs()
    rounds = [int(re.search(r"rounds (\d+)", output)[1]) for output in outputs]
    assert max(rounds) < 40, rounds  # of 30 operations


def test_the_doctor_prints_the_connections_of_a_long_link(tmp_path):
    program = "import sys; from ringtrain import doctor; sys.exit(doctor.main([]))"
    with hosts_or_skip(2) as hosts, hosts.bad_cable(0.015), started(program, 2, tmp_path, hosts) as ranks:
        outputs = [process.communicate(timeout=60)[0] for process in ranks.processes]
    assert re.search(
        r"connections +4 between two ranks, link_hop_us=\d+, ring_chunk_kb=1024; a round trip takes", outputs[0]
    ), outputs


@pytest.mark.parametrize(
    ("streams", "chunk_kb", "round_trip_s", "expected"),
    [
        ("auto", "60.0", 0.0, (1, {})),
        ("auto", "60.0", 0.0049, (1, {})),
        ("auto", "60.0", 0.005, (1, {"link_hop_us": "2048", "ring_chunk_kb": "1024"})),
        ("auto", "60.0", 0.0199, (1, {"link_hop_us": "8192", "ring_chunk_kb": "1024"})),
        ("auto", "60.0", 0.02, (4, {"link_hop_us": "8192", "ring_chunk_kb": "1024"})),
        ("auto", "240", 0.3, (4, {"link_hop_us": "131072"})),
        ("1", "60.0", 0.3, (1, {"link_hop_us": "131072", "ring_chunk_kb": "1024"})),
        ("4", "60.0", 0.0049, (4, {})),
        ("16", "60.0", 0.0, (16, {})),
    ],
)
def test_connections_and_messages_for_a_round_trip(streams, chunk_kb, round_trip_s, expected):
    settings = {"socket_streams": streams, "ring_chunk_kb": chunk_kb, "link_hop_us": "50.0"}
    assert choose_streams(settings, round_trip_s) == expected


def require_error(outputs, *texts):
    for output in outputs:
        for text in texts:
            assert re.search(text, output), output


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RINGTRAIN_SOCKET_INTERFACES": "wlan7"}, "ValueError: socket_interfaces=wlan7: this host has no such"),
        ({"RINGTRAIN_ALLREDUCE_ALGORITHM": "mpi", "RINGTRAIN_SHARED_MEMORY": "off"}, "ValueError: .*need MPI"),
        ({"RINGTRAIN_RENDEZVOUS": "nonsense"}, "ValueError: RINGTRAIN_RENDEZVOUS=nonsense is not host:port"),
        ({"RINGTRAIN_RANK": "0"}, "ValueError: two processes are rank 0: pid"),
        ({"RINGTRAIN_RENDEZVOUS": "", "OMPI_COMM_WORLD_RANK": ""}, "does not say where the ranks meet"),
    ],
)
def test_a_job_that_cannot_start_says_why(tmp_path, variables, text):
    with started(SUM, 2, tmp_path, **variables, RINGTRAIN_START_TIMEOUT_S="2") as ranks:
        outputs = [process.communicate(timeout=30)[0] for process in ranks.processes]
    assert any(re.search(text, output) for output in outputs), outputs


def test_settings_that_differ_are_named(tmp_path):
    program = "import os; os.environ['RINGTRAIN_CACHE_CAPACITY'] = str(10 + int(os.environ['RINGTRAIN_RANK']))" + SUM
    with started(program, 2, tmp_path) as ranks:
        require_error(
            ranks.outputs([1, 1]), "cache_capacity must be the same on all ranks: rank 0 has 10, rank 1 has 11"
        )


def test_a_rank_that_does_not_come_is_named(tmp_path):
    with started(SUM, 2, tmp_path, RINGTRAIN_SIZE="3", RINGTRAIN_START_TIMEOUT_S="2") as ranks:
        require_error(ranks.outputs([1, 1]), r"StalledError: init\(\) has waited 2 s .*: rank 2 did not come")


def test_a_warning_names_the_ranks_that_have_not_called_init_for_a_while(tmp_path):
    """Long before the time to start is over, and once."""
    soon = "import ringtrain.job.rendezvous.server as server; server.WARNS_AFTER_S = 0.5\n"
    with started(soon + SUM, 1, tmp_path, RINGTRAIN_SIZE="3", RINGTRAIN_START_TIMEOUT_S="3") as ranks:
        outputs = ranks.outputs([1])
    text = "has waited 0.5 s for ranks 1-2, which have not called init() yet; after 3 s (start_timeout_s) it fails"
    assert outputs[0].count(text) == 1, outputs
    require_error(outputs, "for all ranks: ranks 1-2 did not come")


def test_rank_0_ends_after_the_others_have_got_the_reason(tmp_path):
    """The answer to rank 1 takes long."""
    slow = """
import time, ringtrain.job.rendezvous.server as server
answer = server.Server._answer
def answer_slowly(self, line, failed):
    if self.ranks_of_lines[line] == 1:
        time.sleep(0.4)
    answer(self, line, failed)
enter = server.Server._enter
def enter_and_note(self, line, hello):
    self.ranks_of_lines = {**getattr(self, "ranks_of_lines", {}), line: hello.rank}
    enter(self, line, hello)
server.Server._enter, server.Server._answer = enter_and_note, answer_slowly
"""
    with started(slow + SUM, 2, tmp_path, RINGTRAIN_SIZE="3", RINGTRAIN_START_TIMEOUT_S="1") as ranks:
        require_error(ranks.outputs([1, 1]), r"StalledError: init\(\) has waited 1 s .*: rank 2 did not come")


def test_a_rank_that_dies_at_the_rendezvous_is_named(tmp_path):
    dies = "import os, signal, ringtrain.job.world as world\n"
    dies += "world.gpus.choose = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n" + SUM
    port = free_port()
    with (
        started(SUM, 1, tmp_path, RINGTRAIN_SIZE="2", RINGTRAIN_RENDEZVOUS=f"127.0.0.1:{port}") as lives,
        started(dies, 1, tmp_path, RINGTRAIN_SIZE="2", RINGTRAIN_RENDEZVOUS=f"127.0.0.1:{port}", RINGTRAIN_RANK="1"),
    ):
        require_error(lives.outputs([1]), r"PeerLostError: rank 1 \(host .*\) died while the others were in init")


def test_a_secret_that_others_may_read_is_refused(tmp_path):
    secret.write(tmp_path / "secret")
    (tmp_path / "secret").chmod(0o644)
    with started(SUM, 1, tmp_path, RINGTRAIN_SIZE="2") as ranks:
        require_error(ranks.outputs([1]), "PermissionError: .*chmod 600")


def test_ranks_with_another_secret_stay_outside(tmp_path):
    (tmp_path / "other").mkdir()
    place = {
        "RINGTRAIN_RENDEZVOUS": f"127.0.0.1:{free_port()}",
        "RINGTRAIN_SIZE": "2",
        "RINGTRAIN_START_TIMEOUT_S": "3",
    }
    with (
        started(SUM, 1, tmp_path, **place) as ranks,
        started(SUM, 1, tmp_path / "other", **place, RINGTRAIN_RANK="1") as others,
    ):
        require_error(ranks.outputs([1]), "rank 1 did not come")
        require_error(others.outputs([1]), "does not know this job's secret")


# ------------------------------------------------------------------------------------------------- what they can do


@pytest.mark.ranks(3, env={**SOCKETS, "RINGTRAIN_SOCKET_STREAMS": "3"})
def test_messages_over_several_connections_keep_their_order():
    rng = np.random.default_rng(7)
    for step in range(200):
        count = int(rng.integers(1, 200_000))
        mine = np.arange(count, dtype=np.int64) * (hvd.rank() + 1) + step
        require_equal(hvd.allreduce(mine, op=hvd.Sum, name=f"a{step % 5}"), np.arange(count) * 6 + 3 * step)


@pytest.mark.ranks(2, hosts=(1, 1), env={"RINGTRAIN_NETWORK": "sockets"})
def test_an_idle_rank_sleeps_until_something_comes():
    hvd.allreduce(np.ones(3))
    time.sleep(0.2)
    asleep = measure_asleep(2)
    assert asleep.wakeups < 25 and asleep.cpu_s < 0.1


@pytest.mark.ranks(2, isolated=True, env=SOCKETS)
def test_a_job_may_begin_again():
    for step in range(5):
        hvd.init()
        require_equal(hvd.allreduce(np.full(1000, float(step)), op=hvd.Sum), np.full(1000, 2.0 * step))
        hvd.shutdown()


# ---------------------------------------------------------------------------------------------------- when it fails


@pytest.mark.fast
def test_a_killed_rank_is_named(tmp_path):
    with started(LOOP, 3, tmp_path, **SOCKETS) as ranks:
        ready(ranks)
        struck = time.monotonic()
        ranks.processes[1].kill()
        outputs = ranks.outputs([0, -9, 0])
        assert time.monotonic() - struck < 10
    for rank in (0, 2):
        assert re.search(r"lost: rank 1 \(host .*\) is gone", outputs[rank]), outputs[rank]


def test_a_forked_child_keeps_no_connection_of_a_killed_rank(tmp_path):
    lives_on = "import os\nif os.fork() == 0: os.close(1); os.close(2); time.sleep(20); os._exit(0)\nprint("
    with started(LOOP.replace("print(", lives_on, 1), 2, tmp_path, **SOCKETS) as ranks:
        ready(ranks)
        struck = time.monotonic()
        ranks.processes[1].kill()
        require_error(ranks.outputs([0, -9])[:1], "lost: rank 1 .*is gone")
        assert time.monotonic() - struck < 10


def test_a_dying_rank_tells_the_reason_before_it_goes(tmp_path):
    program = LOOP.replace("while True:", "while True:\n        if hvd.rank() == 2: raise KeyError('the reason')")
    program = program.replace("PeerLostError", "RemoteError")
    with started(program, 3, tmp_path, **SOCKETS) as ranks:
        ready(ranks)
        outputs = ranks.outputs([0, 0, 1])
    for rank in (0, 1):
        assert re.search("lost: rank 2 .*raised[^$]*the reason", outputs[rank]), outputs[rank]


def test_a_host_whose_link_is_silent_is_lost(tmp_path):
    with hosts_or_skip(2) as hosts, started(LOOP, 2, tmp_path, hosts, RINGTRAIN_PEER_TIMEOUT_S="2") as ranks:
        ready(ranks)
        struck = time.monotonic()
        hosts.run_on(1, "ip", "link", "set", "eth0", "down")
        outputs = ranks.outputs()
        assert time.monotonic() - struck < 15
    assert "lost: rank 1" in outputs[0] and "lost: rank 0" in outputs[1]


@pytest.mark.parametrize("trouble", [{"loss": 0.01}, {"delay_s": 0.025}], ids=["loss", "delay"])
def test_a_bad_link_changes_no_result(tmp_path, trouble):
    program = """
import numpy as np, ringtrain as hvd
hvd.init()
for step in range(10):
    mine = np.arange(100_000, dtype=np.int64) * (hvd.rank() + 1) + step
    assert (hvd.allreduce(mine, op=hvd.Sum, name="x") == np.arange(100_000) * 3 + 2 * step).all()
"""
    with hosts_or_skip(2) as hosts, hosts.bad_cable(**trouble), started(program, 2, tmp_path, hosts) as ranks:
        ranks.outputs()


STRANGERS = """
import os, random, socket, threading, numpy as np, ringtrain as hvd
from ringtrain.job import session
hvd.init()
addresses = session._joined().network.addresses
is_over = False

def disturb(seed):
    words = random.Random(seed)
    magic = b"ringtrn\\x04"
    for attempt in range(5000):
        with socket.create_connection(addresses[attempt % 2][0]) as sock:
            data = words.randbytes(words.choice([0, 1, 39, 40, 41, 200, 5000]))
            if attempt % 3 == 0:  # a hello that may be one, and a proof that is none
                data = magic + (1).to_bytes(4, "little") + bytes(12) + words.randbytes(16 + 32)
            try:
                sock.sendall(data)
                if attempt % 5 == 0:
                    sock.settimeout(0.01)
                    sock.recv(100)
            except OSError:
                pass

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

threads = [threading.Thread(target=disturb, args=(seed,)) for seed in range(2)] if hvd.rank() == 0 else []
for number in range(100): hvd.allreduce(np.ones(1000), name="x")
before = resident(), len(os.listdir("/proc/self/fd"))
for thread in threads: thread.start()
step = 0
while not is_over:
    assert hvd.allreduce(np.full(1000, step), op=hvd.Sum, name="x")[-1] == 2 * step
    step += 1
    is_at_work = np.array([any(thread.is_alive() for thread in threads)])
    is_over = not hvd.allreduce(is_at_work, op=hvd.Sum, name="y")[0]
for thread in threads: thread.join()
after = resident(), len(os.listdir("/proc/self/fd"))
assert after[0] - before[0] < 16 << 20, (before, after)
assert after[1] - before[1] < 300, (before, after)  # strangers that have not been sent away yet
print("steps", step)
"""


def test_strangers_change_nothing(tmp_path):
    with started(STRANGERS, 2, tmp_path, **SOCKETS) as ranks:
        outputs = ranks.outputs()
    assert len(set(outputs)) == 1 and outputs[0].startswith("steps ")


ROGUE = """
import hashlib, hmac, os, random, socket, struct, sys, numpy as np, ringtrain as hvd
from ringtrain.job import launched_by, sockets
from ringtrain.options import table

def hello_to_rank_0(world):
    network = world.network
    sock = socket.create_connection(network.addresses[0][0], timeout=10)
    said = b"ringtrn\\x04" + struct.pack("<iiii", 1, 0, 0, 0) + os.urandom(16)
    sock.sendall(said)
    challenge = b""
    while len(challenge) < 48: challenge += sock.recv(48 - len(challenge))
    said += challenge[:16]
    sock.sendall(hmac.digest(network.secret, b"dials" + network.token.encode() + said, "sha256"))
    assert sock.recv(1) == b"w"
    return sock

def frames(words):
    # the first message of each tag never comes, so that nobody reads the others: there, ranks trust each other
    numbers = dict.fromkeys([0, 1, 8, 15, 16, 17, 1000], 1)
    for _ in range(50):
        tag = words.choice(list(numbers))
        data = words.randbytes(words.choice([0, 1, 7, 8, 40, 3000]))
        claimed, number = len(data), numbers[tag]
        numbers[tag] += 1
        if words.random() < 0.1:
            claimed = words.choice([len(data), words.randrange(1 << 16), 1 << 39, words.randrange(1 << 64)])
            number = words.choice([number, 1, words.randrange(1, 1 << 32), 0 if claimed > 1 << 30 else 2])
            tag = words.choice([tag, words.randrange(1 << 32), (1 << 32) - 1])
        yield struct.pack("<IIQ", tag, number, claimed) + data

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

sizes = []
for seed in range(80):
    if launched_by.detect().rank == 1:
        words = random.Random(seed)
        world, _ = sockets.connect(launched_by.detect(), table.resolve({}), lambda: {})
        try:
            with hello_to_rank_0(world) as sock:
                sock.sendall(words.randbytes(10_000) if seed % 10 == 0 else b"".join(frames(words)))
        except OSError:
            pass  # rank 0 has ended the connection before
        for listener in world.network.listeners: os.close(listener)
    else:
        try:
            hvd.init()
            hvd.allreduce(np.ones(10), name="x")
            sys.exit(f"no error, seed {seed}")
        except hvd.RingtrainError:
            hvd.shutdown()
        sizes.append(resident())
if sizes: assert sizes[-1] - sizes[20] < 16 << 20, sizes
print("well")
"""


def test_broken_frames_of_a_rank_end_the_job_with_an_error(tmp_path):
    with started(ROGUE, 2, tmp_path, **SOCKETS, RINGTRAIN_FLIGHT_DIR=str(tmp_path)) as ranks:
        assert all(text.endswith("well\n") for text in ranks.outputs())


FULL = """
import os, resource, socket, numpy as np, ringtrain as hvd
from ringtrain.job import session
hvd.init()
hvd.allreduce(np.ones(1), name="x")
addresses = session._joined().network.addresses
if hvd.rank() == 1:
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken = []
    try:
        while True: taken.append(os.dup(0))
    except OSError:
        pass
hvd.allreduce(np.ones(1), name="x")
if hvd.rank() == 0:
    strangers = [socket.create_connection(addresses[1][0]) for _ in range(20)]
for number in range(100):
    assert hvd.allreduce(np.full(10, number), op=hvd.Sum, name="y")[0] == 2 * number
if hvd.rank() == 0:
    for stranger in strangers:
        stranger.settimeout(10)
        assert stranger.recv(1) == b""
hvd.barrier()  # a process that ends resets the connections that it has not accepted
print("well")
"""


def test_a_rank_without_free_descriptors_sends_strangers_away(tmp_path):
    with started(FULL, 2, tmp_path, **SOCKETS, RINGTRAIN_FLIGHT_DIR=str(tmp_path)) as ranks:
        assert ranks.outputs() == ["well\n"] * 2


def test_strangers_at_the_rendezvous_keep_nobody_out(tmp_path):
    secret.write(tmp_path / "secret")
    server = Server(bound("127.0.0.1", 0), secret.read(tmp_path / "secret"))
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        for _ in range(600):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        wait_until(lambda: threading.active_count() - threads >= 256)
        time.sleep(0.5)
        assert threading.active_count() - threads <= 300  # 256 at a time, and those that are ending
        place = {"RINGTRAIN_RENDEZVOUS": f"127.0.0.1:{server.port}"}
        with started(SUM, 2, tmp_path, **place) as ranks:
            assert "rank 0 of 2" in ranks.outputs()[0]


CROWDED = """
import os, resource, socket, sys, time
from ringtrain.job.rendezvous.listener import Listener, bound
listener = bound("127.0.0.1", 0)
door = Listener(listener, b"secret", lambda connection: print("in", flush=True))
print(listener.getsockname()[1], flush=True)
limit = max(map(int, os.listdir("/proc/self/fd"))) + 10
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
taken = []
try:
    while True: taken.append(os.dup(0))
except OSError:
    print("full", flush=True)
sys.stdin.readline()
for number in taken: os.close(number)
sys.stdin.readline()
"""


def test_a_door_opens_again_after_descriptors_have_run_out():
    with subprocess.Popen(
        [sys.executable, "-c", CROWDED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            port = int(process.stdout.readline())
            assert process.stdout.readline() == "full\n"
            with socket.create_connection(("127.0.0.1", port)):
                time.sleep(0.5)  # the door cannot take it
                process.stdin.write("\n")
                process.stdin.flush()
                with socket.create_connection(("127.0.0.1", port)) as own:
                    Connection(own).prove_as_rank(b"secret", time.monotonic() + 20)
                    assert process.stdout.readline() == "in\n"
        finally:
            process.kill()


NARROW = """
import resource, sys
from ringtrain.job.rendezvous.listener import bound
from ringtrain.job.rendezvous.server import Server
resource.setrlimit(resource.RLIMIT_NOFILE, (96, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(Server(bound("127.0.0.1", 0), b"secret").port, flush=True)
sys.stdin.readline()
"""


def test_more_ranks_than_the_soft_limit_of_descriptors_are_let_in():
    with (
        subprocess.Popen([sys.executable, "-c", NARROW], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        port = int(process.stdout.readline())
        for _ in range(150):
            own = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            Connection(own).prove_as_rank(b"secret", time.monotonic() + 20)


def test_another_version_of_ringtrain_is_told_so_and_reported(caplog):
    door = Listener(listener := bound("127.0.0.1", 0), b"secret", lambda connection: None)
    try:
        for _ in range(2):
            with socket.create_connection(listener.getsockname()) as old:
                old.sendall(b"ringtrv\x01" + bytes(16))
                old.settimeout(20)
                assert old.recv(48).startswith(b"ringtrv")
    finally:
        door.close()
    assert caplog.text.count("another version of ringtrain has come to this job from 127.0.0.1") == 1


def test_a_rank_is_told_that_the_server_is_another_version():
    with bound("127.0.0.1", 0) as other, socket.create_connection(other.getsockname()) as own:
        server_side, _ = other.accept()
        with server_side:
            server_side.sendall(b"ringtrv\x01".ljust(48))
            with pytest.raises(VersionError):
                Connection(own).prove_as_rank(b"secret", time.monotonic() + 20)


def test_a_door_opens_again_when_no_thread_could_start(monkeypatch):
    came, start = threading.Event(), threading.Thread.start
    door = Listener(listener := bound("127.0.0.1", 0), b"secret", lambda connection: came.set())
    failures = [RuntimeError("can't start new thread")] * 257  # one more than it lets in at a time
    monkeypatch.setattr(rendezvous_listener, "_FULL_S", 0)

    def start_or_fail(thread):
        if failures:
            raise failures.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    try:
        address = listener.getsockname()
        for _ in range(len(failures)):
            with socket.create_connection(address) as one:
                one.settimeout(20)
                assert one.recv(1) == b""
        with socket.create_connection(address) as own:
            Connection(own).prove_as_rank(b"secret", time.monotonic() + 20)
            assert came.wait(20)
    finally:
        door.close()


class Heard:
    """Records what a hub tells its listener."""

    def __init__(self):
        self.messages, self.lost = queue.SimpleQueue(), queue.SimpleQueue()

    def hear(self, line, message):
        self.messages.put(message.get("text"))

    def lose(self, line, text):
        self.lost.put(text)

    def tick(self):
        pass


@pytest.mark.parametrize("said", [b"[" * 100_000, b"[1]", b"nonsense", b"null"], ids=["deep", "list", "text", "null"])
def test_a_hub_listens_on_after_a_message_that_is_none(said):
    heard = Heard()
    hub = Hub(bound("127.0.0.1", 0), b"secret", heard, silent_s=10, tick_s=0.1)
    hub.start()
    try:
        for data in (said, b'{"text": "well"}'):
            with socket.create_connection(("127.0.0.1", hub.port)) as own:
                Connection(own).prove_as_rank(b"secret", time.monotonic() + 20)
                own.sendall(len(data).to_bytes(8, "big") + data)
                assert heard.messages.get(timeout=20) == "well" if data is not said else heard.lost.get(timeout=20)
    finally:
        hub.close()
