"""What each rank of `ringtrain.run(function)` runs: one call, whose result or exception it leaves in a file."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path

from ringtrain import launchers
from ringtrain.run.function import CALL_FILE, error_file, pickler, result_file


def main(own_folder: str) -> None:
    """Raises what the function does, so that the rank fails and prints its traceback."""
    folder = Path(own_folder)
    launch = launchers.detect()
    rank = launch.rank if launch is not None else 0
    try:
        function, args, kwargs = pickle.loads((folder / CALL_FILE).read_bytes())
        result = pickler().dumps(function(*args, **kwargs))
    except BaseException as error:
        error_file(folder, rank).write_bytes(_pickled(error))
        raise
    result_file(folder, rank).write_bytes(result)


def _pickled(error: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        data: bytes = pickler().dumps((error, text))
        pickle.loads(data)  # an exception with arguments of its own may fail only here
    except Exception:
        data = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), text))
    return data
