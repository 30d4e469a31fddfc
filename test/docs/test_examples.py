"""The examples do what they say: each started once as a user starts it, else in ranks that stay."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import gpu_arrays, gpu_double
from harness.compiling import DoubleUnavailable
from harness.examples import example_ranks

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120


def run(ranks, example, *arguments, environment=None):
    """Run an example and return what it printed. `environment` is added to that of the ranks."""
    ringrun = [sys.executable, "-m", "ringtrain.run", "-np", str(ranks), "--no-prefix-output"]
    command = [*ringrun, sys.executable, f"examples/{example}"]
    # More ranks than cores may run here: a pool of threads in each would only be in the way.
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OPENBLAS_NUM_THREADS": "1",
        **(environment or {}),
    }
    done = subprocess.run(
        [*command, *map(str, arguments)], cwd=ROOT, env=variables, timeout=TIMEOUT_S, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


examples = example_ranks("")


@pytest.fixture(scope="module")
def trained(examples, tmp_path_factory):
    """Train the digits on 1, 2 and 4 ranks; return what each run printed and the files that it saved, by ranks."""
    pytest.importorskip("sklearn")
    pytest.importorskip("tqdm")
    folder = tmp_path_factory.mktemp("digits")
    results = {}
    for ranks, start in ((1, examples.run), (2, run), (4, examples.run)):
        file = folder / f"{ranks}.npz"
        results[ranks] = start(ranks, "numpy_digits.py", "--save", file), file
    return results


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_digits_are_learned(trained, ranks):
    printed, _ = trained[ranks]
    last_line = printed.strip().splitlines()[-1]
    found = re.fullmatch(rf"test accuracy (0\.\d+|1\.0+) on {ranks} ranks", last_line)
    assert found, printed
    assert float(found[1]) >= 0.95
    assert len(re.findall(r"^epoch", printed, re.MULTILINE)) == 20


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_number_of_ranks_does_not_change_the_network(trained, ranks):
    alone, together = np.load(trained[1][1]), np.load(trained[ranks][1])
    for name in alone.files:
        np.testing.assert_allclose(together[name], alone[name], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def gpus():
    """The environment of ranks that have GPUs and CuPy: both are doubles."""
    try:
        gpu_double.prepare(gpu_arrays.GPU)
    except DoubleUnavailable as reason:
        pytest.skip(str(reason))
    return gpu_arrays.GPU


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_digits_are_learned_on_gpus_as_on_the_host(trained, gpus, tmp_path, ranks):
    printed = run(ranks, "cupy_digits.py", "--save", tmp_path / "params.npz", environment=gpus)
    on_host = trained[ranks][0]
    assert printed.strip().splitlines()[-1] == on_host.strip().splitlines()[-1]
    alone, on_gpus = np.load(trained[1][1]), np.load(tmp_path / "params.npz")
    for name in alone.files:
        np.testing.assert_allclose(on_gpus[name], alone[name], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_digits_take_uneven_batches_and_draw_the_loss(examples, tmp_path):
    for module in ("sklearn", "tqdm", "matplotlib"):
        pytest.importorskip(module)
    picture = tmp_path / "loss.png"
    files = [tmp_path / "1.npz", tmp_path / "4.npz"]
    options = ["--epochs", 2, "--batch-size", 50]
    examples.run(1, "numpy_digits.py", *options, "--save", files[0])
    examples.run(4, "numpy_digits.py", *options, "--save", files[1], "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    alone, together = map(np.load, files)
    for name in alone.files:
        np.testing.assert_allclose(together[name], alone[name], rtol=0, atol=1e-5)


def last_loss(printed):
    return float(re.findall(r"test loss ([\d.]+)", printed)[-1])


@pytest.mark.slow
def test_the_digits_have_the_same_loss_through_stores_of_any_kind_and_any_number_of_workers(examples):
    for module in ("sklearn", "tqdm"):
        pytest.importorskip(module)
    alone = last_loss(examples.run(1, "kvstore_digits.py", "--kv-store", "local"))
    for ranks, kind, updates in ((2, "dist_sync", 1), (2, "dist_sync", 0), (4, "dist_sync", 1), (2, "ringtrain", 0)):
        options = ["--kv-store", kind, "--update-on-kvstore", updates]
        printed = examples.run(ranks, "kvstore_digits.py", *options)
        assert last_loss(printed) == alone
        where = "the store" if updates else "each worker"
        assert re.search(rf"^test accuracy 0\.9\d+ with {ranks} workers, updated by {where}$", printed, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["2bit", "bf16"])
def test_the_digits_are_learned_from_compressed_gradients(kind):
    for module in ("sklearn", "tqdm"):
        pytest.importorskip(module)
    printed = run(2, "kvstore_digits.py", "--gc-type", kind)
    assert float(re.search(r"^test accuracy ([\d.]+) with 2 workers", printed, re.MULTILINE)[1]) >= 0.93


def launch(*words):
    """Run an example under ringlaunch and return what it printed, and what ringlaunch said."""
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "ringtrain.launch", "--launcher", "local", *words]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, timeout=TIMEOUT_S, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def unprefixed(printed):
    """Without the worker that has printed a line."""
    return re.sub(r"^\[worker \d+\] ", "", printed, flags=re.MULTILINE)


@pytest.mark.slow
def test_a_slow_worker_keeps_the_others_only_where_they_go_in_step(tmp_path):
    pytest.importorskip("matplotlib")
    words = ["-n", "2", "-s", "1", "python", "examples/kvstore_async_straggler.py", "--seconds", "3"]
    printed, _ = launch(*words, "--plot", str(tmp_path / "plot.png"))
    steps = {kind: int(count) for kind, count in re.findall(r"(dist_\w+): (\d+) steps of worker 0", printed)}
    # its worker sleeps 50 ms before each step
    assert steps["dist_sync"] <= 3 / 0.05 + 1 < steps["dist_async"]
    assert float(re.search(r"dist_async.*accuracy ([\d.]+), [\d,]+ images/s", printed)[1]) > 0.8
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_words_come_together_although_a_step_touches_a_few_rows():
    printed, _ = launch("-n", "2", "-s", "1", "python", "examples/kvstore_embedding.py")
    share, right = (
        float(re.search(pattern, printed)[1]) for pattern in (r"each of ([\d.]+)%", r"(\d+)% of the nearest")
    )
    assert share < 3 and right > 80, printed
    assert len(re.findall(r"^second \d+: loss [\d.]+, [\d,]+ pairs/s$", unprefixed(printed), re.MULTILINE)) >= 1


@pytest.mark.slow
def test_a_trainer_that_dies_comes_back_to_what_the_others_have_learned():
    words = ["-n", "2", "-s", "1", "--restarts", "1", "--min-workers", "1", "python", "examples/kvstore_online.py"]
    printed, said = launch(*words, "--kill", "1", "--seconds", "6")
    assert "worker 1 on localhost was ended by SIGKILL; it is started again, 1 of 1 times" in said
    found = re.search(r"trainer 1 came back: right (\d+)% of the time", printed)
    assert found and int(found[1]) > 70, printed
    assert re.search(r"trainer 0: right \d+% of the time, loss [\d.]+, [\d,]+ images/s$", printed, re.MULTILINE)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_process_sets_reduce_apart(ranks):
    printed = run(ranks, "process_sets.py").splitlines()
    assert len(printed) == ranks
    assert printed[-1].startswith(f"rank {ranks - 1}, in a set of")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_two_jobs_and_the_programs_own_messages_live_side_by_side(ranks):
    printed = run(ranks, "mpi4py_interop.py")
    assert printed.count("average") == 2
    assert f"of all ranks {(ranks - 1) / 2:g}" in printed
