"""The PyTorch examples do what they say: each started once as a user starts it, else in ranks that stay."""

import importlib.util
import os
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness.examples import example_ranks
from harness.frameworks import need, on_demand

torch = on_demand("torch")

need("sklearn", "tqdm", "matplotlib")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 120

SMALL_LM = ["--steps", 2, "--batch-size", 2, "--context", 32, "--width", 64, "--layers", 1]
SMALL_BENCHMARK = ["--model", "resnet18", "--image-size", 32, "--batch-size", 2, "--num-warmup-batches", 1]

examples = example_ranks("torch")


def run(ranks, example, *arguments):
    """Run an example in new processes and return what it printed, the progress bar aside."""
    ringrun = [sys.executable, "-m", "ringtrain.run", "--no-prefix-output", "-np", str(ranks)]
    command = [*ringrun, sys.executable, f"examples/{example}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *map(str, arguments)], cwd=ROOT, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def main_of(monkeypatch):
    """Runs an example that ends at once in this process, which has imported PyTorch; returns its exit status."""

    def main(example, *arguments):
        monkeypatch.setattr(sys, "argv", [f"examples/{example}", *arguments])
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
        return ended.value.code

    return main


def epochs_in(printed):
    return [int(epoch) for epoch in re.findall(r"^epoch +(\d+):", printed, re.MULTILINE)]


def accuracy_in(printed):
    return float(re.search(r"^test accuracy ([\d.]+) on", printed, re.MULTILINE)[1])


def test_the_digits_are_learned():
    assert accuracy_in(run(2, "torch_digits.py")) >= 0.97


def learns_through_a_store(run, *options):
    printed = run(2, "kvstore_torch.py", *options)
    assert float(re.search(r"^test accuracy ([\d.]+) with 2 workers", printed, re.MULTILINE)[1]) >= 0.96


def test_the_digits_are_learned_through_a_store():
    learns_through_a_store(run)


@pytest.mark.parametrize("options", [["--update-on-kvstore", 0], ["--kv-store", "ringtrain"]], ids=str)
def test_the_digits_are_learned_through_a_store_of_another_kind(examples, options):
    learns_through_a_store(examples.run, *options)


def test_ranks_that_train_alone_learn_to_write_and_resume_with_the_same_bits(examples, tmp_path):
    options = ["--islands", "rank", "--batch-size", 32]
    whole = examples.run(2, "torch_diloco.py", *options, "--steps", 100)
    assert [int(step) for step in re.findall(r"^step +(\d+):", whole, re.MULTILINE)] == [25, 50, 75, 100]
    losses = re.findall(r"test loss ([\d.]+) bits", whole)
    assert float(losses[-1]) < 4 < float(losses[0])
    options += ["--checkpoint", tmp_path / "state"]
    examples.run(2, "torch_diloco.py", *options, "--steps", 60)  # the last checkpoint is that of step 50
    resumed = run(2, "torch_diloco.py", *options, "--steps", 100)
    assert re.findall(r"test loss ([\d.]+) bits", resumed) == losses[2:]


@pytest.mark.parametrize("flag", ["--use-adasum", "--fp16-allreduce"])
def test_the_digits_are_learned_in_other_ways(examples, flag):
    assert accuracy_in(examples.run(2, "torch_digits.py", flag, "--epochs", 4)) >= 0.9


def test_the_digits_go_on_from_a_checkpoint_on_other_ranks(examples, tmp_path):
    checkpoint, picture = tmp_path / "digits.pt", tmp_path / "accuracy.png"
    assert epochs_in(examples.run(1, "torch_digits.py", "--epochs", 2, "--checkpoint", checkpoint)) == [1, 2]
    printed = examples.run(2, "torch_digits.py", "--epochs", 3, "--checkpoint", checkpoint)
    assert epochs_in(printed) == [3]
    assert accuracy_in(printed) >= 0.8  # one epoch from the start comes to 0.6
    finished = examples.run(1, "torch_digits.py", "--epochs", 3, "--checkpoint", checkpoint, "--plot", picture)
    assert epochs_in(finished) == []
    assert accuracy_in(finished) == accuracy_in(printed)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["accuracy.png", "digits.pt"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_language_model_learns_and_goes_on_from_a_checkpoint(examples, tmp_path):
    checkpoint, picture = tmp_path / "charlm.pt", tmp_path / "loss.png"
    printed = examples.run(1, "torch_charlm.py", *SMALL_LM, "--steps", 20, "--epochs", 1, "--checkpoint", checkpoint)
    found = re.search(r"^([\d.]+) bits per character before, ([\d.]+) after", printed, re.MULTILINE)
    before, after = map(float, found.groups())
    assert before > 6.5
    assert after < 5.5
    assert "\nThe " in printed
    assert re.search(r"^epoch  1: test loss [\d.]+ bits per character, [\d,]+ characters/s$", printed, re.MULTILINE)
    goes_on = [
        *SMALL_LM,
        "--steps",
        20,
        "--epochs",
        3,
        "--checkpoint",
        checkpoint,
        "--plot",
        picture,
        "--accumulation",
        3,
    ]
    printed = run(2, "torch_charlm.py", *goes_on)
    assert epochs_in(printed) == [2, 3]
    assert f"{before:.3f} bits per character before" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_language_model_computes_in_32_bits(examples):
    printed = examples.run(2, "torch_charlm.py", *SMALL_LM, "--epochs", 2, "--accumulation", 1, "--float32")
    assert epochs_in(printed) == [1, 2]


BENCHMARK_FLAGS = [
    [],
    ["--fp16-allreduce", "--gradient-as-shared-view", "--channels-last", "--model", "resnet34"],
    ["--use-adasum"],
    ["--bf16"],
]


@pytest.mark.parametrize("flags", BENCHMARK_FLAGS, ids=lambda flags: " ".join(flags) or "plain")
def test_the_benchmark_prints_what_horovods_prints(examples, flags):
    printed = examples.run(2, "torch_synthetic_benchmark.py", *SMALL_BENCHMARK, "--num-iters", 2, *flags)
    number = r"[\d.]+ \+-[\d.]+"
    assert len(re.findall(r"^Iter #\d: [\d.]+ img/sec per CPU$", printed, re.MULTILINE)) == 2
    assert re.search(rf"^Img/sec per CPU: {number}\nTotal img/sec on 2 CPU\(s\): {number}$", printed, re.MULTILINE)


def test_the_benchmark_goes_on_but_mixes_no_numbers_of_ranks(examples, tmp_path):
    files = ["--checkpoint", tmp_path / "benchmark.pt", "--plot", tmp_path / "rates.png"]
    command = ["torch_synthetic_benchmark.py", *SMALL_BENCHMARK, *files, "--num-iters"]
    assert examples.run(2, *command, 1).count("Iter #") == 1
    assert run(2, *command, 3).count("Iter #") == 2
    assert examples.run(1, *command, 1).count("Iter #") == 1
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_a_resnet_learns_and_goes_on_from_a_checkpoint(examples, tmp_path):
    command = ["torch_resnet.py", "--image-size", 8, "--batch-size", 64, "--batches-per-allreduce", 2]
    command += ["--checkpoint-format", tmp_path / "resnet-{epoch}.pt", "--epochs"]
    epoch = r"^epoch (\d): loss [\d.]+, accuracy [\d.]+, test accuracy ([\d.]+), [\d,]+ images/s$"
    assert [number for number, _ in re.findall(epoch, examples.run(2, *command, 1), re.MULTILINE)] == ["1"]
    ((number, accuracy),) = re.findall(epoch, run(1, *command, 2), re.MULTILINE)
    assert number == "2" and float(accuracy) >= 0.5  # by chance, 0.1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resnet-1.pt", "resnet-2.pt"]


def test_a_train_py_goes_on_from_its_checkpoint_and_draws_what_it_did(examples, tmp_path):
    command = ["torch_train.py", "--amp", "--checkpoint", tmp_path / "train.pt", "--plot", tmp_path / "train.png"]
    epoch = r"^epoch +(\d): loss ([\d.]+), test accuracy ([\d.]+), [\d,]+ images/s$"
    (first,) = re.findall(epoch, examples.run(2, *command, "--epochs", 1), re.MULTILINE)
    (second,) = re.findall(epoch, run(1, *command, "--epochs", 2), re.MULTILINE)
    assert (first[0], second[0]) == ("1", "2")
    assert float(second[1]) < float(first[1]) and float(second[2]) > 0.6  # by chance, 0.1
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


def test_cifar10_without_its_images_says_how_to_get_them(main_of, capsys):
    assert main_of("torch_cifar10.py", "--data-dir", "missing") == 2
    said = capsys.readouterr().err
    assert "missing does not have data_batch_1. Download the images first" in said
    assert "curl -O https://" in said and "tar xzf cifar-10-python.tar.gz" in said


def write_cifar10(folder, images=32):
    """The digits in the files of CIFAR-10: a dictionary with rows of 3,072 bytes, and labels."""
    from sklearn.datasets import load_digits

    rows, labels = load_digits(return_X_y=True)
    large = np.kron(rows[: 6 * images].reshape(-1, 1, 8, 8) * 15, np.ones((3, 4, 4))).astype(np.uint8)
    for part, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        own = slice(part * images, (part + 1) * images)
        (folder / name).write_bytes(pickle.dumps({b"data": large[own].reshape(images, -1), b"labels": [*labels[own]]}))


def test_cifar10_is_read_and_training_goes_on_from_a_checkpoint(examples, tmp_path):
    data, results = tmp_path / "cifar-10-batches-py", tmp_path / "results"
    data.mkdir()
    results.mkdir()
    write_cifar10(data)
    command = ["torch_cifar10.py", "--data-dir", data, "--batch-size", 16]
    command += ["--checkpoint-format", results / "resnet-{epoch}.pt", "--epochs"]
    epoch = r"^epoch (\d): loss ([\d.]+), accuracy [\d.]+, test accuracy [\d.]+, [\d,]+ images/s$"
    ((first, before),) = re.findall(epoch, examples.run(2, *command, 1), re.MULTILINE)
    ((second, after),) = re.findall(epoch, run(1, *command, 2), re.MULTILINE)
    assert (first, second) == ("1", "2")
    assert float(after) < float(before)
    assert sorted(path.name for path in results.iterdir()) == ["resnet-1.pt", "resnet-2.pt"]


def test_the_benchmark_says_that_there_is_no_gpu(main_of):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    # Python prints it, and ends with exit status 1
    expected = "--cuda needs a GPU and a PyTorch that was built for CUDA: this one finds no GPU"
    assert main_of("torch_synthetic_benchmark.py", "--cuda") == expected


@pytest.mark.parametrize(
    ("name", "parameters"), [("resnet18", 11_689_512), ("resnet34", 21_797_672), ("resnet50", 25_557_032)]
)
def test_the_resnets_have_the_sizes_of_the_paper(name, parameters):
    spec = importlib.util.spec_from_file_location("benchmark", ROOT / "examples/torch_synthetic_benchmark.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    model = benchmark.MODELS[name]()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 1000)


@pytest.mark.parametrize(
    "example",
    ["torch_digits.py", "torch_charlm.py", "torch_synthetic_benchmark.py", "torch_resnet.py", "torch_cifar10.py"],
)
def test_every_example_explains_itself(example, main_of, capsys):
    assert main_of(example, "--help") in (None, 0)
    assert f"ringrun -np 2 python examples/{example}" in capsys.readouterr().out
