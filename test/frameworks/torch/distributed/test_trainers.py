"""Lightning, Accelerate and the Trainer of transformers on the backend "ringtrain": the losses that gloo has.

`make test-trainers` has these packages; elsewhere their tests are skipped.
"""

import os
import re
import subprocess
import sys
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
