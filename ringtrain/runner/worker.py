"""What each rank of `ringtrain.run(function)` runs: one call, whose result or exception it leaves in a file."""

from __future__ import annotations

import os
import pickle
import traceback
from pathlib import Path
from typing import Any

from ringtrain.job import launched_by
from ringtrain.pickling import pickler
from ringtrain.runner.function import CALL_FILE, error_file, exit_file, result_file
from ringtrain.runner.supervise.rank_wrapper import PROCESS_VARIABLE


def main(own_folder: str) -> None:
    """Raises what the function does, so that the rank fails and prints its traceback.

    An exit leaves its code alone: it would end the caller, too, if that raised it. The code is written down here, since
    other ranks may fail of the exit, and the launcher end this one for that, before it has ended by itself.
    """
    folder = Path(own_folder)
    launch = launched_by.detect()
    # in an elastic job its rank may have changed
    rank = int(os.environ.get(PROCESS_VARIABLE, launch.rank if launch is not None else 0))
    try:
        function, args, kwargs = pickle.loads((folder / CALL_FILE).read_bytes())
        result = _pickled_result(function(*args, **kwargs), rank)
    except SystemExit as end:
        exit_file(folder, rank).write_text(str(_exit_code(end)))
        raise
    except BaseException as error:
        error_file(folder, rank).write_bytes(_pickled_error(error))
        raise
    result_file(folder, rank).write_bytes(result)


def _exit_code(end: SystemExit) -> int:
    """What Python makes of it for the shell; of anything but a number, which it prints, that is 1."""
    if end.code is None:
        return 0
    return end.code & 0xFF if isinstance(end.code, int) else 1


def _pickled_result(result: Any, rank: int) -> bytes:
    try:
        data: bytes = pickler().dumps(result)
    except Exception as error:
        raise TypeError(f"the result of rank {rank} cannot be pickled: {error}") from error
    return data


def _pickled_error(error: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        data: bytes = pickler().dumps((error, text))
        pickle.loads(data)  # an exception with arguments of its own may fail only here
    except Exception:
        data = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), text))
    return data
