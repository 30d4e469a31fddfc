"""The tests may ask for ranks: see harness/plugin.py."""

import os
import sys
from pathlib import Path

# `harness`, `hosts` and `exact` lie here
sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.plugin import pytest_configure

# Open MPI's way to libfabric, which no test takes, looks for its hardware for a second whenever a rank starts.
os.environ.setdefault("OMPI_MCA_btl", "^ofi")

__all__ = ["pytest_configure"]
