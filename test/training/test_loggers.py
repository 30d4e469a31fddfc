"""The loggers: rank 0 writes the averages of all ranks, and figures of the engine, by the real packages.

`make test-loggers` has these packages; elsewhere their tests are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringtrain as hvd
from ringtrain.training.loggers import MLflowLogger, TensorBoardLogger, WandbLogger


class Writer:
    """Keeps what a SummaryWriter is told."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self.is_closed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.steps.setdefault(step, {})[name] = value

    def flush(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
def test_rank_0_writes_the_average_of_all_ranks() -> None:
    writer = Writer()
    with TensorBoardLogger(writer) as logger:
        averages = logger.log({"loss": np.float32(hvd.rank()), "lr": 0.5}, step=4)
    assert averages == {"loss": (hvd.size() - 1) / 2, "lr": 0.5}
    assert writer.is_closed == (hvd.rank() == 0)
    assert {name: value for name, value in writer.steps.get(4, {}).items() if "/" not in name} == (
        averages if hvd.rank() == 0 else {}
    )


@pytest.mark.ranks(2, 3)
def test_values_are_averaged_by_the_number_of_samples() -> None:
    logger, samples = TensorBoardLogger(Writer()), [6, 2, 0][hvd.rank()]
    loss = float("nan") if samples == 0 else 4.0 * hvd.rank()
    assert logger.log({"loss": loss, "accuracy": 0.5}, step=1, weight=samples) == {"loss": 1.0, "accuracy": 0.5}
    assert logger.log({"loss": 1.5}, step=2) == {"loss": 1.5}
    for weight in (-1, float("nan")):
        with pytest.raises(ValueError, match="log: weight must be a finite number that is not negative, not"):
            logger.log({"loss": 1.0}, step=3, weight=weight)
    with pytest.raises(hvd.MismatchError, match=rf"1 of {hvd.size()} ranks gave a weight. Give weight= on all ranks"):
        logger.log({"loss": 1.0}, step=3, weight=3 if hvd.rank() == 0 else None)
    with pytest.raises(hvd.MismatchError, match="the weights of all ranks are 0"):
        logger.log({"loss": 1.0}, step=3, weight=0)
    assert logger.log({"loss": 1.5}, step=3) == {"loss": 1.5}


@pytest.mark.ranks(2, 3)
def test_the_figures_of_a_step_name_the_straggler_and_its_bytes() -> None:
    writer, logger = Writer(), None
    for step in range(-3, 21):
        time.sleep(0.02 * (hvd.rank() == 1))
        hvd.allreduce(np.ones(1000), name="logged")
        if step == 0:
            logger = TensorBoardLogger(writer)
    assert logger is not None
    logger.log({}, step=20)
    logger.log({}, step=21)
    if hvd.rank() == 0:
        first, second = writer.steps[20], writer.steps[21]
        assert first["ringtrain/megabytes"] == pytest.approx(0.008)
        assert second["ringtrain/megabytes"] == 0 and "ringtrain/straggler" not in second
        assert first["ringtrain/straggler"] == 1 and first["ringtrain/straggler_waits"] > 10
        assert 0 < first["ringtrain/exposed_ms"] < first["ringtrain/step_ms"]
    else:
        assert not writer.steps


@pytest.mark.ranks(2)
def test_a_value_that_is_not_a_number_is_refused_on_the_callers_line() -> None:
    logger = TensorBoardLogger(Writer())
    with pytest.raises(TypeError, match='log: "loss" must be a number or an array of one element, not'):
        logger.log({"loss": np.zeros(2)}, step=1)


@pytest.mark.ranks(1)
def test_a_missing_package_is_named() -> None:
    before = {name: sys.modules.get(name) for name in ("wandb", "mlflow", "tensorboard.summary")}
    sys.modules.update(dict.fromkeys(before))  # None: importing it fails
    try:
        for make, package in ((WandbLogger, "wandb"), (MLflowLogger, "mlflow-skinny")):
            with pytest.raises(ImportError, match=f'run "pip install {package}"'):
                make()
        with pytest.raises(ImportError, match='run "pip install tensorboard"'):
            TensorBoardLogger("runs")
    finally:
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})


def test_a_logger_needs_init() -> None:
    with pytest.raises(hvd.NotInitializedError):
        TensorBoardLogger(Writer())


# --- the real packages ------------------------------------------------------------------------------------------------


def log_twice(logger: Any) -> None:
    """Losses of 0.5 and 1.5 on average, on two ranks."""
    for step in (1, 2):
        hvd.allreduce(np.ones(1000), name="logged")
        logger.log({"loss": float(hvd.rank() + step - 1)}, step)


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns steps and values by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(one.step, one.tensor_proto.float_val[0]) for one in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


@pytest.mark.ranks(2)
def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; see `make test-loggers`")
    folder = tmp_path / str(hvd.rank())
    with TensorBoardLogger(folder) as logger:
        log_twice(logger)
    if hvd.rank() != 0:
        assert not folder.exists()
        return
    logged = read_tensorboard(folder)
    assert logged["loss"] == [(1, 0.5), (2, 1.5)]
    assert [value for _, value in logged["ringtrain/megabytes"]] == pytest.approx([0.008, 0.008])


@pytest.mark.ranks(2)
def test_mlflow_reads_what_was_logged(tmp_path: Path) -> None:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed; see `make test-loggers`")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with MLflowLogger(run_name="digits") as logger:
        log_twice(logger)
    assert mlflow.active_run() is None
    if hvd.rank() != 0:
        assert logger.run is None
        return
    history = mlflow.MlflowClient().get_metric_history(logger.run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 1.5)]
    assert mlflow.get_run(logger.run.info.run_id).data.metrics["ringtrain/megabytes"] == pytest.approx(0.008)


@pytest.mark.ranks(2)
def test_weights_and_biases_keeps_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed; see `make test-loggers`")
    with WandbLogger(project="digits", mode="offline", dir=tmp_path) as logger:
        log_twice(logger)
        if hvd.rank() != 0:
            assert logger.run is None
            return
        logger.run.log({"more": 1}, step=3)  # the values of a step are kept until the next one begins
        summary = dict(logger.run.summary)
    assert summary["loss"] == 1.5 and summary["ringtrain/megabytes"] == pytest.approx(0.008)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.ranks(2)
def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; see `make test-loggers`")
    page = Path(hvd.__file__).parents[1] / "docs" / "timeline.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        exec(code.replace("hvd.init()", "None"), names)
    finally:
        os.chdir(before)
    assert np.allclose(names["weights"][0], 1, atol=0.01)
    hvd.barrier()
    assert list(tmp_path.glob("runs/first/*tfevents*"))


def test_the_example_of_a_train_py_writes_a_log_for_tensorboard(tmp_path: Path) -> None:
    for module in ("tensorboard", "torch", "sklearn"):
        pytest.importorskip(module, reason=f"{module} is not installed; see `make test-loggers`")
    root = Path(hvd.__file__).parents[1]
    command = ["-m", "ringtrain.run", "-np", "2", "--no-prefix-output", sys.executable, "examples/torch_train.py"]
    done = subprocess.run(
        [sys.executable, *command, "--epochs", "2", "--log-dir", tmp_path / "runs"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = re.findall(r"loss ([\d.]+), test accuracy ([\d.]+)", done.stdout)
    logged = read_tensorboard(tmp_path / "runs")
    steps = [step for step, _ in logged["loss"]]
    assert steps == [23, 46]  # of 720 images for each rank, 32 in a step
    for name, of_epochs in zip(("loss", "accuracy"), zip(*printed, strict=True), strict=True):
        assert [value for _, value in logged[name]] == pytest.approx([float(one) for one in of_epochs], abs=1e-3)
    assert {"images_per_s", "ringtrain/step_ms", "ringtrain/exposed_ms"} < logged.keys()
