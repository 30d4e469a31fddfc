"""More ranks than one connects to at once: they connect to those they need, and all hear of a death."""

import os
import re
import signal
from pathlib import Path

import pytest
from harness.hosts import HostsUnavailable, simulated_hosts
from harness.socket_ranks import started

VICTIM = 70

STEPS = """
import os, pathlib, signal, sys, time, numpy as np, ringtrain as hvd
victim, steps, elements = map(int, sys.argv[1:])
hvd.init(start_timeout_s=300, peer_timeout_s=60)
for step in range(steps):
    mine = np.arange(elements, dtype=np.int64) * (hvd.rank() + 1) + step
    total = hvd.allreduce(mine, op=hvd.Sum, name="x")
    assert (total == np.arange(elements) * (hvd.size() * (hvd.size() + 1) // 2) + hvd.size() * step).all()
half = hvd.allreduce(np.ones(elements, np.float16), op=hvd.Sum, name="half")
assert (half == hvd.size()).all()
sockets = sum("socket:" in os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
most = int(hvd.allreduce(np.array([sockets]), op=hvd.Max, name="sockets")[0])
if hvd.rank() == 0:
    print("connections", most, flush=True)
folder = pathlib.Path(os.environ["RINGTRAIN_FLIGHT_DIR"])
(folder / f"ready-{hvd.rank()}").touch()
if hvd.rank() == victim:  # dies when nobody is in an operation that it was in
    end = time.monotonic() + 100
    while len(list(folder.glob("ready-*"))) < hvd.size() and time.monotonic() < end: time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    hvd.allreduce(np.ones(1), name="y")
except hvd.PeerLostError as error:
    print(f"rank {victim}" in str(error), flush=True)
"""


def require_sums_and_a_death(folder, size, victim, *words, hosts=None, **variables):
    """Runs STEPS on so many ranks. Returns how many connections the busiest rank had."""
    usual = {"RINGTRAIN_NETWORK": "sockets", "OPENBLAS_NUM_THREADS": "1", "RINGTRAIN_FLIGHT_DIR": str(folder)}
    before = set(os.listdir("/dev/shm"))
    arguments = [str(word) for word in (victim, *words)]
    with started(STEPS, size, folder, hosts, arguments=arguments, **usual, **variables) as ranks:
        texts = ranks.outputs([-signal.SIGKILL if rank == victim else 0 for rank in range(size)], within_s=400)
    assert [rank for rank, text in enumerate(texts) if rank != victim and not text.endswith("True\n")] == []
    assert {name for name in os.listdir("/dev/shm") if "ringtrain" in name} <= before
    return int(re.search(r"^connections (\d+)$", texts[0], re.MULTILINE)[1])


def test_many_ranks_reduce_over_sockets_and_all_hear_of_a_death(tmp_path):
    connections = require_sums_and_a_death(tmp_path, 96, VICTIM, 3, 1 << 17, RINGTRAIN_SHARED_MEMORY="off")
    assert connections < 32  # and not 95


@pytest.mark.slow
def test_sixty_four_ranks_on_sixteen_hosts_reduce_and_all_hear_of_a_death(tmp_path: Path):
    try:
        with simulated_hosts(16) as hosts:
            connections = require_sums_and_a_death(tmp_path, 64, 37, 20, 1 << 14, hosts=hosts)
    except HostsUnavailable as reason:
        pytest.skip(str(reason))
    assert connections < 32


def test_two_hundred_and_fifty_six_ranks_of_one_host_reduce_and_all_hear_of_a_death(tmp_path):
    require_sums_and_a_death(tmp_path, 256, 201, 20, 1 << 12)
