"""Type checkers and editors see the types of ringtrain in a script of a user."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringtrain.options import keywords, table

ROOT = Path(__file__).resolve().parents[2]

# A type checker has to refuse the lines that end in `# error`, and no other.
SCRIPT = """\
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import assert_type

import ringtrain as hvd
import ringtrain.kvstore as kvstore
import ringtrain.torch as hvt

hvd.init(fusion_threshold_mb=64, network="sockets", autotune=True, flight_dir="records")
hvd.init(fusion_treshold_mb=64)  # error
hvt.init(cache_capacity="many")  # error
hvd.init(network="ethernet")  # error

numbers: NDArray[np.float32] = np.zeros(4, np.float32)
assert_type(hvd.allreduce(numbers), NDArray[np.float32])
assert_type(hvd.alltoall(numbers), NDArray[np.float32])
assert_type(hvd.alltoall(numbers, [2, 2]), tuple[NDArray[np.float32], Any])
assert_type(hvd.synchronize(hvd.alltoall_async(numbers)), NDArray[np.float32])
assert_type(hvd.grouped_alltoall([numbers]), list[NDArray[np.float32]])
assert_type(hvt.alltoall(torch.ones(2)), torch.Tensor)
assert_type(hvt.alltoall(torch.ones(2), splits=[1, 1]), tuple[torch.Tensor, torch.Tensor])

model = torch.nn.Linear(2, 1)
optimizer = hvt.DistributedOptimizer(torch.optim.SGD(model.parameters()), named_parameters=model.named_parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
optimizer.synchronize()
with optimizer.skip_synchronize():
    optimizer.step()
with optimizer.no_sync():
    optimizer.zero_grad()
optimizer.synchronise()  # error

kvstore.create("local").push("weight", numbers)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def errors_told(output):
    """The lines of the script with an error."""
    return [int(line.split(":")[1]) for line in output.splitlines() if "script.py:" in line and "error: " in line]


LINES_WITH_ERRORS = [number for number, line in enumerate(SCRIPT.splitlines(), start=1) if "# error" in line]


@pytest.mark.slow
def test_mypy_sees_the_types_of_a_script(script):
    pytest.importorskip("mypy", reason="mypy is not installed in this environment")
    pytest.importorskip("torch", reason="PyTorch is not installed in this environment")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", script.name]
    done = subprocess.run(
        command,
        cwd=script.parent,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert errors_told(done.stdout) == LINES_WITH_ERRORS, done.stdout


@pytest.mark.slow
def test_pyright_sees_the_types_of_a_script(script):
    """Basedpyright is pyright in a package of PyPI; pyright's own package downloads it from npm at its first start."""
    pytest.importorskip("basedpyright", reason="basedpyright is not installed in this environment")
    pytest.importorskip("torch", reason="PyTorch is not installed in this environment")
    config = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (script.parent / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, script.name]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=300)
    assert errors_told(done.stdout) == LINES_WITH_ERRORS, done.stdout


def test_the_keywords_of_init_are_those_of_the_option_table():
    assert Path(keywords.__file__).read_text() == table.typed(), "run `make docs`"
    assert set(keywords.Options.__annotations__) == {option.name for option in table.TABLE}


@pytest.mark.parametrize(
    ("module", "framework", "parts"),
    [
        ("ringtrain", None, {"elastic"}),
        ("ringtrain.elastic", None, set()),
        ("ringtrain.kvstore", None, set()),
        ("ringtrain.optim", None, set()),
        pytest.param("ringtrain.torch", "torch", {"elastic"}, marks=pytest.mark.slow),
        pytest.param("ringtrain.torch.elastic", "torch", set(), marks=pytest.mark.slow),
        pytest.param("ringtrain.jax", "jax", {"distributed", "elastic"}, marks=pytest.mark.slow),
        pytest.param("ringtrain.jax.elastic", "jax", set(), marks=pytest.mark.slow),
    ],
)
def test_a_prompt_completes_public_names_only(module, framework, parts):
    if framework:
        pytest.importorskip(framework, reason=f"{framework} is not installed in this environment")
    completed = importlib.import_module(module)
    names = {name for name in dir(completed) if not name.startswith("__")}
    assert names == {*completed.__all__, *parts}
