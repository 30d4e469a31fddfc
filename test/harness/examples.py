"""Runs of examples in ranks that stay: what an example imports takes longer than most of its tests.

    with ExampleRanks("torch") as examples:
        printed = examples.run(2, "torch_digits.py", "--epochs", 1)

A run in a process of its own, as a user starts it, is `ringrun examples/...`; each example has a test of that, too.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.job import Job
from harness.protocol import Task
from harness.report import conclude
from harness.spec import JobSpec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TIMEOUT_S = 120


class ExampleRanks:
    """Owns a job for each number of ranks that was asked for; `library` is what its examples import.

    An example that ends with an error ends its job, and the next one has another.
    """

    def __init__(self, library: str) -> None:
        self._library = library
        self._jobs: dict[int, Job] = {}

    def __enter__(self) -> ExampleRanks:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as all_of_them:
            for job in self._jobs.values():
                all_of_them.callback(job.close)

    def run(self, ranks: int, example: str, *arguments: object) -> str:
        """Runs an example on that many ranks; returns what they printed, without the progress bar of rank 0.

        The absolute path of another script may take its place.
        """
        if ranks not in self._jobs:
            self._jobs[ranks] = Job(JobSpec(ranks, library=self._library))
        words = {"example": example, "arguments": [str(argument) for argument in arguments]}
        task = Task(__name__, Path(__file__), _main_of.__name__, pickle.dumps(words), initialise=False, options=())
        result = self._jobs[ranks].run(task, TIMEOUT_S)
        if not result.is_in_step():
            self._jobs.pop(ranks).kill()
        conclude(result)
        return "".join(rank.output for rank in result.ranks)


def example_ranks(library: str) -> Any:
    """Returns a fixture for a module: ExampleRanks that stay for all of its tests."""

    @pytest.fixture(scope="module")
    def examples() -> Iterator[ExampleRanks]:
        with ExampleRanks(library) as ranks:
            yield ranks

    return examples


def _main_of(example: str, arguments: list[str]) -> None:
    """In a rank: what `python examples/EXAMPLE ARGUMENTS` does."""
    path = EXAMPLES / example
    before = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            runpy.run_path(str(path), run_name="__main__")
    except BaseException:
        print(said.getvalue(), file=sys.stderr)
        raise
    finally:
        sys.argv, sys.path[:] = before
