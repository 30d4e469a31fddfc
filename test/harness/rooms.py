"""The rooms of the tests: a folder for each part of the package, in which tests and their helpers are together.

A helper is imported by its name alone, also from another room, so no two helpers have the same name.
"""

from __future__ import annotations

import sys
from pathlib import Path

TEST_FOLDER = Path(__file__).resolve().parent.parent


def put_on_path() -> None:
    """Makes the helpers of all rooms importable, here and in processes that get this one's `sys.path`."""
    rooms = {path.parent for path in TEST_FOLDER.rglob("test_*.py")}
    helpers = [str(room) for room in sorted(rooms) if not (room / "__init__.py").exists()]
    sys.path[:0] = [path for path in (str(TEST_FOLDER), *helpers) if path not in sys.path]
