"""The JAX examples do what they say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.examples import example_ranks
from harness.frameworks import need
from test_examples import run

need("jax", "optax", "sklearn", "tqdm", "matplotlib")

pytestmark = pytest.mark.slow

examples = example_ranks("jax")


def epochs_in(printed):
    return [int(epoch) for epoch in re.findall(r"^epoch +(\d+):", printed, re.MULTILINE)]


def accuracy_in(printed):
    return float(re.search(r"^test accuracy ([\d.]+) on", printed, re.MULTILINE)[1])


def test_the_digits_are_learned():
    assert accuracy_in(run(2, "jax_digits.py")) >= 0.96


def test_the_digits_are_learned_in_16_bits_and_in_larger_steps(examples):
    assert accuracy_in(examples.run(2, "jax_digits.py", "--bf16", "--accumulate", 2, "--epochs", 6)) >= 0.93


def test_the_digits_go_on_from_a_checkpoint_on_other_ranks(examples, tmp_path):
    checkpoint, picture = tmp_path / "digits.pickle", tmp_path / "accuracy.png"
    assert epochs_in(examples.run(1, "jax_digits.py", "--epochs", 2, "--checkpoint", checkpoint)) == [1, 2]
    printed = examples.run(2, "jax_digits.py", "--epochs", 3, "--checkpoint", checkpoint)
    assert epochs_in(printed) == [3]
    finished = examples.run(1, "jax_digits.py", "--epochs", 3, "--checkpoint", checkpoint, "--plot", picture)
    assert epochs_in(finished) == []
    assert accuracy_in(finished) == accuracy_in(printed)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model", [1, 2])
def test_a_sharded_transformer_learns_what_it_learns_with_gloo(model):
    words = (2, "jax_sharding.py", "--steps", 20, "--model-parallel", model)
    (loss,), (of_gloo,) = (
        re.findall(r"^step   20: loss (.*), [\d,]+ characters/s$", run(*words, *more), re.MULTILINE)
        for more in ((), ("--gloo",))
    )
    assert loss == of_gloo and float(loss) < 4


def test_a_plate_cools_to_the_same_bits_on_any_number_of_ranks(examples, tmp_path):
    words, picture = ("jax_halo.py", "--points", 64, "--steps", 50), tmp_path / "heat.png"
    printed = [run(1, *words), examples.run(2, *words), examples.run(4, *words, "--plot", picture)]
    bits = {re.search(r"^bits (\w{16}), \d+ us a step on \d ranks$", one, re.MULTILINE)[1] for one in printed}
    assert len(bits) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_benchmark_compares_steps_and_sharding_on_two_ranks(tmp_path):
    result = tmp_path / "jax.json"
    words = ["jax", "-np", "2", "--models", "mlp", "--rounds", "1", "--warmup", "0", "--patience", "60"]
    done = subprocess.run(
        [sys.executable, "-m", "measure", *words, "--json", str(result)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(result.read_text())["rows"]
    small, lone, step, *sharded = rows
    assert [row["key"]["model"] for row in (small, lone, step)] == ["4 bytes", "one rank", "mlp"]
    assert set(lone["summary"]) == {"with an allreduce", "without"}
    assert set(step["summary"]) >= {"ringtrain", "no communication", "jax.distributed, gloo"}
    assert len(sharded) == 6 and sharded[-1]["key"]["model"] == "step of mlp"
    for row in sharded:
        assert set(row["summary"]) == {"ringtrain", "jax.distributed, gloo"}
