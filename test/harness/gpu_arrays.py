"""CuPy arrays without a GPU: ranks that find the stand-in of test/gpu/double/python/ on the fake driver.

A test asks for them with `@pytest.mark.ranks(2, env=GPU)`, and takes `cupy` from here.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from harness import gpu_double
from harness.rooms import TEST_FOLDER

_STAND_IN = TEST_FOLDER / "gpu" / "double" / "python"


def environment(**settings: object) -> dict[str, str]:
    """The variables with which ranks find the doubles, as `gpu_double.environment`, and the stand-in for CuPy."""
    found = [str(TEST_FOLDER), *(os.path.abspath(path) for path in sys.path)]
    others = [path for path in dict.fromkeys(found) if path != str(_STAND_IN)]
    return {**gpu_double.environment(**settings), "PYTHONPATH": os.pathsep.join([str(_STAND_IN), *others])}


# The host cannot touch device memory, as it is on a GPU.
GPU = environment(guard=1)
STAGED = {**GPU, "RINGTRAIN_GPU_ALGORITHM": "staged"}


class _Cupy:
    """The libraries that ranks find; pytest itself, which imports the tests too, may have another one or none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("cupy"), name)


cupy = _Cupy()
