"""The tests may ask for ranks: see harness/plugin.py."""

import sys
from pathlib import Path

# `harness`, `hosts` and `exact` lie here
sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.plugin import pytest_configure

__all__ = ["pytest_configure"]
