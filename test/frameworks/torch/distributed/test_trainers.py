"""Lightning, Accelerate and the Trainer of transformers on the backend "ringtrain": the losses that gloo has.

`make test-trainers` has these packages; elsewhere their tests are skipped.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from harness.frameworks import is_installed, need
from harness.socket_ranks import free_port

need("torch")

SCRIPT = Path(__file__).resolve().parent / "trainers.py"
LIMIT_S = 240


def losses_of(which, folder, kind, **variables):
    """Returns what the script prints of its losses, where its groups are of this package."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if which != "lightning" else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **place, **variables}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *torchrun, str(SCRIPT), which, str(folder)],
        env=environment,
        cwd=folder,
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
    )
    found = re.search(rf"^groups of {kind}, 2 ranks, losses (.+)$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and found, f"{done.stdout}\n{done.stderr}"
    return found[1]


@pytest.mark.parametrize(
    ("which", "package", "variables"),
    [
        ("lightning", "lightning", {"BACKEND": "ringtrain"}),
        ("accelerate", "accelerate", {"RINGTRAIN_AS_GLOO": "1"}),
        ("trainer", "transformers", {"RINGTRAIN_AS_GLOO": "1"}),
        ("tensor_parallel", "transformers", {"RINGTRAIN_AS_GLOO": "1"}),
    ],
)
def test_a_training_has_the_losses_that_it_has_with_gloo(which, package, variables, tmp_path):
    if not is_installed(package):
        pytest.skip(f"{package} is not installed; see `make test-trainers`")
    with_gloo = losses_of(which, tmp_path, "torch")
    assert losses_of(which, tmp_path, "ringtrain", **variables) == with_gloo


def run_until(which, folder, is_told_to_end):
    """Starts the script with two ranks by ringrun, and ends it after some steps. Returns its exit code, and these."""
    ringrun = [sys.executable, "-W", "ignore", "-m", "ringtrain.run", "--no-prefix-output", "-np", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RINGTRAIN_AS_GLOO": "1"}
    steps = []
    with subprocess.Popen(
        [*ringrun, sys.executable, "-W", "ignore", str(SCRIPT), which, str(folder)],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        timer = threading.Timer(LIMIT_S, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                steps += map(int, re.findall(r"^step (\d+)$", line))
                if is_told_to_end and len(steps) == 10:
                    process.send_signal(signal.SIGUSR1)
        finally:
            timer.cancel()
    return process.returncode, steps


@pytest.mark.parametrize("package", ["lightning", "accelerate"])
def test_a_preempted_training_saves_on_all_ranks_and_goes_on_from_there(package, tmp_path):
    if not is_installed(package):
        pytest.skip(f"{package} is not installed; see `make test-trainers`")
    code, steps = run_until(f"{package}_preempted", tmp_path, is_told_to_end=True)
    last = max(steps)
    assert code == 75 and sorted(steps) == [step for step in range(last + 1) for _ in range(2)]
    code, steps = run_until(f"{package}_preempted", tmp_path, is_told_to_end=False)
    assert (code, sorted(steps)) == (0, [last + 1 + step for step in range(3) for _ in range(2)])
