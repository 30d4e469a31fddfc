"""From what the ranks answered to a passed, skipped or failed test."""

from __future__ import annotations

from typing import Literal, NamedTuple, NoReturn

import pytest

_TAIL_LINES = 60


class RankResult(NamedTuple):
    """The outcome of a test on one rank; `output` is what that rank printed meanwhile."""

    outcome: Literal["passed", "failed", "skipped", "hung", "died"]
    details: str = ""
    output: str = ""


class JobResult(NamedTuple):
    """`ranks[i]` is rank i; `launcher` what mpirun printed and how it ended, where a rank died."""

    ranks: list[RankResult]
    launcher: str = ""

    def is_in_step(self) -> bool:
        """Whether the job can run another test."""
        return all(rank.outcome == "passed" for rank in self.ranks) or self.is_skip()

    def is_skip(self) -> bool:
        return all(rank.outcome == "skipped" for rank in self.ranks)


def conclude(result: JobResult) -> None:
    """Return, skip or fail as the ranks did."""
    if result.is_skip():
        pytest.skip(result.ranks[0].details)
    if not result.is_in_step():
        fail(describe(result))


def fail(text: str) -> NoReturn:
    """Fail the test with `text` alone: pytest's own traceback would show the harness."""
    raise pytest.fail.Exception(text, pytrace=False) from None


def describe(result: JobResult) -> str:
    """The failure report: every rank that did not pass, headed by its number, then those that did."""
    ranks = result.ranks
    passed = [number for number, rank in enumerate(ranks) if rank.outcome == "passed"]
    paragraphs = [f"{len(ranks) - len(passed)} of {_counted(len(ranks))} did not pass"]
    for number, rank in enumerate(ranks):
        if rank.outcome == "passed":
            continue
        heading = "" if rank.outcome == "failed" else f" {rank.outcome};"
        paragraphs.append(f"rank {number}:{heading} {rank.details.strip()}")
    if result.launcher:
        paragraphs.append(result.launcher)
    if passed:
        paragraphs.append(f"passed on rank {', '.join(map(str, passed))}")
    return "\n\n".join(paragraphs)


def tail(text: str) -> str:
    """The last lines of `text`."""
    return "\n".join(text.strip().splitlines()[-_TAIL_LINES:]) or "(nothing)"


def _counted(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
