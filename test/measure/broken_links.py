"""Breaks the connections of jobs on simulated hosts at drawn moments, and says whether any job has noticed.

    python -m measure.broken_links --count 20 --seed 1

In each job of 2 to 4 hosts, ranks add arrays of drawn sizes and compare the sums with `==`. Meanwhile ten drawn faults
come: all connections of a host are reset, or the cable of a host is pulled for a time shorter than `peer_timeout_s`.
Fails if a job does not end with 0. With --long the cable stays away: every rank must raise PeerLostError within
`peer_timeout_s` and 2 s. With --links hosts have two networks, of which one loses a cable during allreduces of 64 MB,
and gets it back: no sum is wrong, and the time that this has cost is printed. Needs root.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from harness.hosts import SimulatedHosts, simulated_hosts
from harness.ringrun_job import wait_until

_TIMEOUT_S = 5
_FAULTS = 10
_PROGRAM = """
import os, random, sys, time
import numpy as np
import ringtrain as hvd

hvd.init()
draw = random.Random(int(sys.argv[1]))
ended = np.zeros(1)
steps = 0
try:
    while not hvd.allreduce(ended, op=hvd.Max, name="ended")[0]:
        arrays = [np.arange(draw.choice([1, 1000, 40_000, 300_000, 2_000_000]), dtype="float64") for _ in range(3)]
        handles = [hvd.allreduce_async(a + hvd.rank() + steps, op=hvd.Sum, name=f"a{i}") for i, a in enumerate(arrays)]
        for array, handle in zip(arrays, handles):
            total = array * hvd.size() + hvd.size() * steps + sum(range(hvd.size()))
            assert (hvd.synchronize(handle) == total).all(), f"step {steps}: a wrong sum"
        steps += 1
        ended[0] = os.path.exists(sys.argv[2])
except hvd.PeerLostError as error:
    print(error, flush=True)
    print(f"lost at {time.time()}", flush=True)
    sys.exit(3)
print(f"rank {hvd.rank()}: {steps} steps", flush=True)
"""


_OF_64_MB = """
import os, sys, time
import numpy as np
import ringtrain as hvd

hvd.init()
array = np.arange(16 << 20, dtype="float32") % 1009
ended = np.zeros(1)
step = 0
while not hvd.allreduce(ended, op=hvd.Max, name="ended")[0]:
    begun = time.time()
    total = hvd.allreduce(array + step, op=hvd.Sum, name="x")
    took = time.time() - begun
    assert (total == hvd.size() * (array + step)).all(), f"step {step}: a wrong sum"
    print(f"step at {begun} took {took}", flush=True)
    step = (step + 1) % 100
    ended[0] = os.path.exists(sys.argv[1])
"""


@dataclass(frozen=True)
class Fault:
    """All connections of a host are reset (no duration), or its cable is pulled for so many seconds."""

    host: int
    duration_s: float


def _strike(hosts: SimulatedHosts, fault: Fault) -> None:
    if fault.duration_s == 0:
        reset = ["ss", "-K", "-t", "state", "established"]
        subprocess.run(hosts.command_on(fault.host, reset), stdout=subprocess.DEVNULL, check=True)
        return
    with hosts.unplugged(fault.host):
        time.sleep(fault.duration_s)


def _job(
    hosts: SimulatedHosts, folder: Path, seed: int, local: int, streams: int, encryption: str
) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(_PROGRAM)
    slots = ",".join(f"{name}:{local}" for name in hosts.names)
    size = str(local * len(hosts.names))
    options = [*("--network", "sockets"), *("--peer-timeout-s", str(_TIMEOUT_S)), *("--socket-streams", str(streams))]
    options += ["--socket-encryption"] if encryption == "on" else []
    command = [sys.executable, "-m", "ringtrain.run", "-np", size, "-H", slots, "--no-prefix-output", *options]
    words = [*command, sys.executable, str(folder / "program.py"), str(seed), str(folder / "ended")]
    environment = {**os.environ, **hosts.environment}
    return subprocess.Popen(
        hosts.command_on(0, words), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def short_faults(seed: int) -> str:
    """Carries out one job; returns what it has noticed, or nothing."""
    draw = random.Random(seed)
    count, local, streams = draw.randint(2, 4), draw.randint(1, 2), draw.choice([1, 1, 2])
    encryption = draw.choice(["off", "on"])
    what = f"{count} x {local} ranks, {streams} streams, encryption {encryption}"
    with tempfile.TemporaryDirectory() as name, simulated_hosts(count) as hosts:
        folder = Path(name)
        job = _job(hosts, folder, seed, local, streams, encryption)
        time.sleep(6)
        faults = [
            Fault(draw.randrange(count), 0 if draw.random() < 0.6 else draw.uniform(0.05, 0.8 * _TIMEOUT_S))
            for _ in range(_FAULTS)
        ]
        for fault in faults:
            _strike(hosts, fault)
            # Two times without a cable in a row would be one that is longer.
            time.sleep(draw.choice([0.01, 0.3, 1]) if fault.duration_s == 0 else 2)
        (folder / "ended").touch()
        try:
            output = job.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            job.kill()
            return f"{what} hang after {faults}: {job.communicate()[0][-2000:]}"
    if job.returncode == 0 and output.count("steps") == count * local:
        return ""
    return f"{what}: {faults}: ended with {job.returncode}: {output[-3000:]}"


def long_fault(seed: int) -> str:
    """Carries out one job whose host 1 loses its cable; returns what is wrong, or nothing."""
    with tempfile.TemporaryDirectory() as name, simulated_hosts(2) as hosts:
        job = _job(hosts, Path(name), seed, 1, 1, "off")
        time.sleep(6)
        begun = time.time()
        with hosts.unplugged(1):
            try:
                output = job.communicate(timeout=60)[0]
            except subprocess.TimeoutExpired:
                job.kill()
                return f"hangs: {job.communicate()[0][-2000:]}"
    took = [float(line.split()[-1]) - begun for line in output.splitlines() if line.startswith("lost at")]
    print(f"  lost after {', '.join(f'{one:.1f} s' for one in took)}", flush=True)
    is_right = took and all(one < _TIMEOUT_S + 2 for one in took)
    return "" if is_right else f"lost after {took}: {output[-2000:]}"


def lost_link(seed: int) -> str:
    """Carries out one job of which one of two networks is away for some seconds; returns what is wrong, or nothing."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name, simulated_hosts(2) as hosts:
        hosts.add_second_network()
        folder = Path(name)
        (folder / "program.py").write_text(_OF_64_MB)
        options = ["--network", "sockets", "--socket-interfaces", "eth0,eth1", "--socket-streams", "2"]
        slots = ",".join(hosts.names)
        command = [sys.executable, "-m", "ringtrain.run", "-np", "2", "-H", slots, "--no-prefix-output", *options]
        words = [*command, sys.executable, str(folder / "program.py"), str(folder / "ended")]
        environment = {**os.environ, **hosts.environment}
        with (folder / "output").open("w") as output:
            job = subprocess.Popen(hosts.command_on(0, words), env=environment, stdout=output, stderr=output)
        wait_until(lambda: (folder / "output").read_text().count("took") > 5)
        time.sleep(draw.random())
        begun, sent = time.time(), []
        with hosts.unplugged(draw.randrange(2), 1):
            time.sleep(5)
            sent.append(hosts.bytes_sent(0, "eth1"))
        back = time.time()
        for _ in range(2):
            time.sleep(4)
            sent.append(hosts.bytes_sent(0, "eth1"))
        (folder / "ended").touch()
        try:
            code = job.wait(timeout=60)
        except subprocess.TimeoutExpired:
            job.kill()
            return f"hangs: {(folder / 'output').read_text()[-2000:]}"
        text = (folder / "output").read_text()
    steps = [(float(line.split()[2]), float(line.split()[4])) for line in text.splitlines() if line.startswith("step")]
    usual = statistics.median(took for at, took in steps if at + took < begun)
    worst = max(took for at, took in steps if at + took > begun and at < back)
    print(f"  a step took {usual:.2f} s, with the loss of a link {worst:.2f} s", flush=True)
    is_used_again = sent[2] - sent[1] > 8 << 20
    return "" if code == 0 and is_used_again else f"ended with {code}, eth1 has sent {sent}: {text[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="number of jobs (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first one (default %(default)s)")
    parser.add_argument("--long", action="store_true", help="the cable of a host is pulled for longer than the timeout")
    parser.add_argument("--links", action="store_true", help="one of two networks is lost, and comes back")
    options = parser.parse_args()
    trial = long_fault if options.long else lost_link if options.links else short_faults
    failed = 0
    for seed in range(options.seed, options.seed + options.count):
        if noticed := trial(seed):
            failed += 1
            print(f"seed {seed}: {noticed}", flush=True)
    faults = _FAULTS if trial is short_faults else 1
    print(f"{options.count - failed} of {options.count} jobs with {faults} faults each ended as they should")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
