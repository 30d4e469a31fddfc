"""The examples of MXNet do what they say, and so does its page."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

mx = pytest.importorskip("mxnet", reason="MXNet is not installed in this environment: see `make test-mxnet`")

ROOT = Path(__file__).resolve().parents[3]


def run(*words):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


# The threshold is about as large as a large gradient, and steps are smaller.
OF_2BIT = ["dist_sync", "--gc-type", "2bit", "--lr", "0.02", "--epochs", "30"]


def ringrun(*words):
    return run("-m", "ringtrain.run", "-np", "2", "--no-prefix-output", sys.executable, *words)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--fp16-allreduce"], ["--mode", "module"]], ids=["gluon", "module"])
def test_the_digits_are_learned(arguments):
    printed = ringrun("examples/mxnet_mnist.py", *arguments)
    assert "on 2 ranks" in printed
    epoch = r"^epoch +\d+: loss [\d.]+(?: of rank 0)?, test accuracy [\d.]+, [\d,]+ images/s$"
    assert len(re.findall(epoch, printed, re.MULTILINE)) == 15


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["dist_sync"], ["ringtrain"], OF_2BIT], ids=["dist_sync", "ringtrain", "2bit"])
def test_the_digits_are_learned_through_a_store(arguments):
    printed = ringrun("examples/mxnet_kvstore.py", "--kv-store", *arguments)
    assert "with 2 workers" in printed
    epoch = r"^epoch +\d+: loss [\d.]+ of worker 0, test accuracy [\d.]+, [\d,]+ images/s$"
    assert len(re.findall(epoch, printed, re.MULTILINE)) == (30 if "2bit" in arguments else 20)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["None", "dist_sync"])
def test_a_resnet_counts_its_images(store):
    small = ["--num-layers", "18", "--image-shape", "3,32,32", "--batch-size", "2", "--batches", "2"]
    said = ringrun("examples/mxnet_imagenet_resnet50.py", "--benchmark", "1", *small, "--kv-store", store, "--scaling")
    epoch = r"^epoch +\d+: loss [\d.]+ of the last batch, [\d.]+ samples/sec per rank, [\d.]+ samples/sec in total$"
    assert len(re.findall(epoch, said, re.MULTILINE)) == 3
    assert re.search(r"scaling: [\d.]+% of 2 times", said)


def test_the_code_of_the_first_page_runs(tmp_path):
    text = (ROOT / "docs" / "index.md").read_text()
    (code,) = re.findall(r"^ *```python\n( *import mxnet as mx\n.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(f"{textwrap.dedent(code)}print('weights', net.weight.data().asnumpy().sum())\n")
    first, second = re.findall(r"weights (.*)", ringrun(str(tmp_path / "train.py")))
    assert first == second
