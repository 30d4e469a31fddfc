"""Ranks that die or stop, by real signals: the others get a typed error in bounded time."""

import os
import re
import subprocess
import sys

import pytest
from hosts import HostsUnavailable, simulated_hosts

from ringtrain.run.mpi_library import probe

VICTIM = """
import os, signal, sys, threading, time
import numpy as np
import ringtrain as hvd

hvd.init({options})
victims, phase, what = {victims}, sys.argv[1], getattr(signal, sys.argv[2])
hvd.allreduce(np.ones(8), name="warm")
begin = time.monotonic()

def strike_after(seconds):
    threading.Timer(seconds, lambda: os.kill(os.getpid(), what)).start()

try:
    if phase == "idle":
        if hvd.rank() in victims:
            strike_after(0.2)
            time.sleep(30)
        time.sleep(1)
        begin = time.monotonic()
        hvd.allreduce(np.ones(8), name="next")
    elif phase == "negotiating":
        if hvd.rank() in victims:
            strike_after(0.3)
            time.sleep(30)
        hvd.allreduce(np.ones(8), name="next")
    elif phase == "reducing":
        if hvd.rank() in victims:
            strike_after(0.3)
        big = np.zeros(30_000_000, "{dtype}")
        while True:
            hvd.allreduce_(big, name="big")
    elif phase == "reducing in shared memory":
        big = hvd.empty(30_000_000)
        big[...] = 1
        if hvd.rank() in victims:
            strike_after(0.3)
        while True:
            hvd.allreduce_(big, name="big")
    elif phase == "small operations":
        if hvd.rank() in victims:
            strike_after(0.3)
        while True:
            hvd.allreduce_(np.ones(8), name="small")
except hvd.RingtrainError as error:
    seconds = time.monotonic() - begin
    print(f"rank {{hvd.rank()}} got {{type(error).__name__}} after {{seconds:.1f}} s: {{error}}", flush=True)
    try:
        hvd.allreduce(np.ones(8), name="later")
    except type(error):
        print(f"rank {{hvd.rank()}} got it again", flush=True)
finally:
    sys.stdout.flush()
    time.sleep(1)  # the launcher ends all when one of them fails
    os._exit(3)
"""


def launch_with_survivors(count):
    """mpirun that leaves the other ranks alone when one dies, so that they can say what they see."""
    mpirun = os.path.join(sys.prefix, "bin", "mpirun")
    if probe()["library"] == "Open MPI":
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [
            mpirun,
            *root,
            "--with-ft",
            "ulfm",
            "--map-by",
            ":OVERSUBSCRIBE",
            "--bind-to",
            "none",
            "-np",
            str(count),
        ]
    return [os.path.join(sys.prefix, "bin", "mpiexec.hydra"), "-disable-auto-cleanup", "-np", str(count)]


def run_victim(phase, signal, options="", count=3, timeout=60, hosts=None, victims=(1,), dtype="float32"):
    program = VICTIM.format(options=options, victims=victims, dtype=dtype)
    command = [sys.executable, "-c", program, phase, signal]
    launcher = launch_with_survivors(count)
    environment = dict(os.environ)
    if hosts is not None:
        slots = ",".join(f"{name}:{count // len(hosts.names)}" for name in hosts.names)
        launcher = hosts.command_on(0, [*launcher, "-H", slots])
        environment.update(hosts.environment)
    result = subprocess.run([*launcher, *command], capture_output=True, text=True, timeout=timeout, env=environment)
    assert result.returncode != 0
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("ringtrain")]
    return result.stdout + result.stderr


@pytest.mark.parametrize("phase", ["idle", "negotiating", "reducing", "reducing in shared memory", "small operations"])
def test_a_killed_rank_is_named_by_all_others(phase):
    output = run_victim(phase, "SIGKILL")
    for survivor in (0, 2):
        assert f"rank {survivor} got PeerLostError after" in output, output
        assert f"rank {survivor} got it again" in output, output
    assert "rank 1 (host" in output and "is gone" in output


@pytest.mark.parametrize("phase", ["idle", "negotiating", "reducing"])
def test_a_killed_rank_is_named_on_all_hosts(phase):
    if probe()["library"] != "Open MPI":
        pytest.skip("only Open MPI is started here so that the other ranks live on")
    try:
        with simulated_hosts(2) as hosts:
            output = run_victim(phase, "SIGKILL", count=4, hosts=hosts)
    except HostsUnavailable as reason:
        pytest.skip(str(reason))
    for survivor in (0, 2, 3):
        assert f"rank {survivor} got PeerLostError after" in output, output
        assert f"rank {survivor} got it again" in output, output
    assert "rank 1 (host" in output and "is gone" in output


@pytest.mark.parametrize(("hosts", "victims"), [(2, (1, 3)), (4, (1, 2))], ids=["a lane", "half of a ring"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_several_ranks_are_killed_in_the_middle_of_a_stream(dtype, hosts, victims):
    if probe()["library"] != "Open MPI":
        pytest.skip("only Open MPI is started here so that the other ranks live on")
    try:
        with simulated_hosts(hosts, rate="1gbit") as simulated:
            output = run_victim("reducing", "SIGKILL", count=4, hosts=simulated, victims=victims, dtype=dtype)
    except HostsUnavailable as reason:
        pytest.skip(str(reason))
    for survivor in {0, 1, 2, 3} - set(victims):
        assert f"rank {survivor} got PeerLostError after" in output, output
        assert f"rank {survivor} got it again" in output, output


@pytest.mark.parametrize("phase", ["negotiating", "small operations"])
def test_a_stopped_rank_ends_the_wait_with_a_stalled_error(phase):
    output = run_victim(phase, "SIGSTOP", options="stall_warning_time_s=0.5, stall_shutdown_time_s=2", timeout=90)
    assert "ringtrain warning: waiting for other ranks" in output
    for survivor in (0, 2):
        assert f"rank {survivor} got StalledError after" in output, output
    assert all(float(seconds) < 6 for seconds in re.findall(r"got StalledError after ([0-9.]+) s", output)), output


INTERRUPTED = """
import os, signal, threading, time
import numpy as np
import ringtrain as hvd

hvd.init()
pids = hvd.allgather(np.array([os.getpid()]))
what, when = [(signal.SIGINT, 1.0), (signal.SIGSTOP, 0.3)][hvd.rank()]
threading.Timer(when, os.kill, (os.getpid(), what)).start()
begin = time.monotonic()
try:
    while True:
        hvd.allreduce_(np.ones(4), name="small")
except KeyboardInterrupt:
    print(f"interrupted after {time.monotonic() - begin:.1f} s", flush=True)
os.kill(int(pids[1]), signal.SIGKILL)
time.sleep(1)
os._exit(3)
"""


def test_ctrl_c_ends_the_wait_for_a_rank_that_was_stopped_at_any_moment():
    command = [*launch_with_survivors(2), sys.executable, "-c", INTERRUPTED]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    seconds = re.search(r"interrupted after ([0-9.]+) s", result.stdout)
    assert seconds and float(seconds[1]) < 4, result.stdout + result.stderr
