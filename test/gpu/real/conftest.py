"""Tests for which there has to be a GPU: `python -m pytest test/gpu/real`. Elsewhere they are skipped and say why."""

from pathlib import Path

import pytest
from harness import gpu_double

from ringtrain import _core

_HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    if reason:
        for item in items:
            if item.path.is_relative_to(_HERE):
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_not() -> str:
    if gpu_double.is_used():
        return "this is for a real GPU, and the doubles of the driver are in LD_LIBRARY_PATH"
    return "" if _core.gpu_count() else "no CUDA driver finds a GPU here"
