"""The tests may ask for ranks: see harness/plugin.py."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

# `harness`, `hosts` and `exact` lie here
sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.plugin import pytest_configure
from harness.spec import FOLDER_OF_LAUNCHERS

# Open MPI's way to libfabric, which no test takes, looks for its hardware for a second whenever a rank starts.
os.environ.setdefault("OMPI_MCA_btl", "^ofi")


@pytest.fixture(autouse=True)
def folder_of_launchers(monkeypatch):
    """Where the launchers that this test starts, and maybe kills, have their files."""
    with tempfile.TemporaryDirectory(prefix="ringtrain-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv(FOLDER_OF_LAUNCHERS, folder)
        yield


__all__ = ["pytest_configure"]
