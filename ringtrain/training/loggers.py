"""Loggers for TensorBoard, Weights & Biases and MLflow.

All ranks call `log`, and rank 0 writes the averages of their values, by numbers of samples if these are given. Beside
them are figures of the engine since the `log` before:

    ringtrain/step_ms             how long a step took
    ringtrain/exposed_ms          how long a rank waited for communication in a step
    ringtrain/megabytes           how much a rank gave to operations in a step
    ringtrain/straggler           the rank for which the others waited most often, if there was one
    ringtrain/straggler_waits     for how many operations they waited for it

from ringtrain.training.loggers import TensorBoardLogger

with TensorBoardLogger("runs/digits") as logger:
    for step, batch in enumerate(batches):
        ...
        if step % 50 == 0:  # on all ranks
            logger.log({"loss": loss}, step)
"""

from __future__ import annotations

import importlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringtrain import ops
from ringtrain.engine.requirements import require_weight
from ringtrain.errors import MismatchError
from ringtrain.job import session
from ringtrain.record.metrics import metrics

__all__ = ["Logger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]


class Logger(ABC):
    """Averages values over the ranks, and writes them on rank 0. Subclasses say where to.

    Make it after init(), on all ranks. In an elastic job the rank that becomes rank 0 opens a log of its own.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._last_step = 0
        if session.rank() == 0:
            self._open_once()
        self._begin_span()

    def log(self, values: Mapping[str, Any], step: int, *, weight: float | None = None) -> dict[str, float]:
        """Average the values over the ranks and write them on rank 0, beside the figures of the engine.

        All ranks call it together, with the same names. Ranks that have joined need not take part.

        Args:
            values: by name; numbers, or tensors and arrays of one element.
            step: the place of these values in the training; it grows.
            weight: how much the values of this rank count, such as the number of samples that they are the mean of:
                the averages are sum(weight * value) / sum(weight) over the ranks. All ranks give one, or none does; 0
                on a rank without samples, whose values are not read.

        Returns:
            The averages, on all ranks, without the figures of the engine.

        Raises:
            NotInitializedError: before init().
            TypeError: a value or the weight is not a number.
            ValueError: the weight is negative, NaN or infinite.
            MismatchError: on all ranks, some of these gave a weight and others none, or all weights are 0.
        """
        names = sorted(values)
        own = np.array([_number(name, values[name]) for name in names])
        counts = 1.0 if weight is None else require_weight(weight, ops.Average, "log")
        steps, self._last_step = max(1, step - self._last_step), step
        figures = self._figures(steps)
        came_last = np.zeros(session.size())
        came_last[session.rank()] = self._since_begin("came_last")
        title = f"loggers.log({', '.join(names)})"
        weighted = own * counts if counts else np.zeros_like(own)
        ranks, weights, are_given, *sums = ops.allreduce(
            np.concatenate([[1.0, counts, weight is not None], weighted, list(figures.values()), came_last]),
            op=ops.Sum,
            name=title,
        ).tolist()
        if are_given not in (0, ranks):
            raise MismatchError(
                f"{title}: {are_given:.0f} of {ranks:.0f} ranks gave a weight. Give weight= on all ranks or on none: 0 "
                "on a rank without samples."
            )
        if weights == 0:
            raise MismatchError(f"{title}: the weights of all ranks are 0, so there is no average. Leave it out.")
        averages = {name: one / weights for name, one in zip(names, sums, strict=False)}
        averages |= {name: one / ranks for name, one in zip(figures, sums[len(names) :], strict=False)}
        if session.rank() == 0:
            self._open_once()
            self._write({**averages, **_straggler(np.array(sums[-session.size() :]))}, step)
        self._begin_span()
        return {name: averages[name] for name in names}

    def close(self) -> None:
        """End the log. Ranks other than 0 have nothing to end."""
        if self._is_open:
            self._is_open = False
            self._close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_once(self) -> None:
        if not self._is_open:
            self._open()
            self._is_open = True

    def _begin_span(self) -> None:
        """Begins to count for the next `log`, which does not count itself."""
        self._before, self._begun_s = _counted(), time.perf_counter()

    def _figures(self, steps: int) -> dict[str, float]:
        """Averages over the steps of this rank since the span has begun."""
        return {
            "ringtrain/step_ms": 1e3 * (time.perf_counter() - self._begun_s) / steps,
            "ringtrain/exposed_ms": 1e3 * self._since_begin("exposed_s") / steps,
            "ringtrain/megabytes": 1e-6 * self._since_begin("bytes") / steps,
        }

    def _since_begin(self, name: str) -> float:
        """How much a counter has grown since the span has begun; 0 where init() has made it begin anew meanwhile."""
        return max(0.0, _counted()[name] - self._before[name])

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _write(self, values: dict[str, float], step: int) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...


class TensorBoardLogger(Logger):
    """Writes event files for TensorBoard. PyTorch is not needed, only the package tensorboard.

    Args:
        log_dir: a folder for each run, such as "runs/digits"; or a SummaryWriter, or anything else that has
            `add_scalar(name, value, step)`, `flush` and `close`. A writer is needed on rank 0 alone.

    Raises:
        ImportError: the package tensorboard is missing; on rank 0.
        NotInitializedError: before init().
    """

    def __init__(self, log_dir: Any):
        self._log_dir = log_dir
        super().__init__()

    def _open(self) -> None:
        if isinstance(self._log_dir, str | os.PathLike):
            package = _imported("tensorboard.summary", "tensorboard")
            self._writer = package.Writer(os.fspath(self._log_dir))
        else:
            self._writer = self._log_dir

    def _write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a dashboard shows it now

    def _close(self) -> None:
        self._writer.close()


class WandbLogger(Logger):
    """Writes to a run of Weights & Biases; `run` is that run on rank 0, and None elsewhere.

    Weights & Biases keeps the values of a step until the next one begins, so more can be logged to `run` meanwhile.

    Args:
        arguments: of `wandb.init`, such as project="digits", config={"lr": 0.1} or mode="offline".

    Raises:
        ImportError: the package wandb is missing; on rank 0.
        NotInitializedError: before init().
    """

    def __init__(self, **arguments: Any):
        self._arguments = arguments
        self.run: Any = None
        super().__init__()

    def _open(self) -> None:
        self.run = _imported("wandb", "wandb").init(**self._arguments)

    def _write(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def _close(self) -> None:
        self.run.finish()


class MLflowLogger(Logger):
    """Writes to the active run of MLflow, or to a new one; `run` is that run on rank 0, and None elsewhere.

    Where it is kept is what `mlflow.set_tracking_uri` and `mlflow.set_experiment` say, or MLFLOW_TRACKING_URI.

    Args:
        arguments: of `mlflow.start_run`, such as run_name="digits".

    Raises:
        ImportError: neither mlflow nor mlflow-skinny is installed; on rank 0.
        NotInitializedError: before init().
    """

    def __init__(self, **arguments: Any):
        self._arguments = arguments
        self.run: Any = None
        super().__init__()

    def _open(self) -> None:
        self._mlflow = _imported("mlflow", "mlflow-skinny")
        active = self._mlflow.active_run()
        self._is_own = active is None
        self.run = active or self._mlflow.start_run(**self._arguments)

    def _write(self, values: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(values, step=step, run_id=self.run.info.run_id)

    def _close(self) -> None:
        if self._is_own:
            self._mlflow.end_run()


def _counted() -> dict[str, float]:
    """Returns the counters of this rank since init()."""
    all_of_it = metrics()
    operations = (one for name, one in all_of_it.items() if isinstance(one, dict) and not name.startswith("kvstore"))
    return {
        "bytes": sum(one["bytes"] for one in operations),
        "exposed_s": all_of_it["exposed_s"],
        "came_last": all_of_it["came_last"],
    }


def _straggler(came_last: Any) -> dict[str, float]:
    """From how often each rank came last."""
    waits = float(max(came_last))
    if not waits or len(came_last) == 1:
        return {}
    return {"ringtrain/straggler": float(np.argmax(came_last)), "ringtrain/straggler_waits": waits}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f'log: "{name}" must be a number or an array of one element, not {value!r}') from error


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'cannot import {module} ({error}); run "pip install {package}"') from error
