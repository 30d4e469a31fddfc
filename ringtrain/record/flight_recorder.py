"""The flight recorder: this rank's last operations, written to a file when something has gone wrong.

`python -m ringtrain.flight FOLDER` compares the files of all ranks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import ringtrain._core as _core
from ringtrain.process_sets import get_process_set_ids_and_ranks
from ringtrain.record.logger import logger

_job = ""
_rank = 0
_folder = Path()
_has_failed = False
_handles_signal = False


def start(rank: int, folder: str, token: str) -> None:
    """Called by init(): from now on SIGUSR1 has the file written, unless the script has a handler of its own."""
    global _job, _rank, _folder, _has_failed, _handles_signal
    _job, _rank, _has_failed = token, rank, False
    _folder = Path(folder) if folder else Path(tempfile.gettempdir()) / f"ringtrain-flight-{token}"
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _on_signal)
        _handles_signal = True


def stop() -> None:
    """Called by shutdown()."""
    global _handles_signal
    if _handles_signal and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        _handles_signal = False


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _core.is_initialized():
        write("SIGUSR1")


def on_failure(error: BaseException) -> None:
    """Called when an operation has failed in a way that ends the job: the first time of all is written down."""
    global _has_failed
    if _has_failed:
        return
    _has_failed = True
    write(f"{type(error).__name__}: {error}")


def write(reason: str) -> Path | None:
    """Write this rank's last operations and those that are pending to the folder of option `flight_dir`.

    Logs where. Returns the file, or None where it could not be written, which is logged, too.
    """
    path = _folder / f"rank-{_rank}.json"
    try:
        _folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".json.unfinished")
        unfinished.write_text(json.dumps(_contents(reason), indent=1))
        os.replace(unfinished, path)
    except OSError as error:
        logger.error("rank %d cannot write its last operations: %s", _rank, error)
        return None
    logger.warning(
        "the last operations of rank %d are in %s; `python -m ringtrain.flight %s` compares those of all ranks",
        *(_rank, path, _folder),
    )
    return path


def _contents(reason: str) -> dict[str, Any]:
    return {
        "job": _job,
        "rank": _rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "reason": reason,
        # Both clocks at the same moment: operations have the times of the second one.
        "time_s": time.time(),
        "monotonic_s": time.monotonic(),
        "process_sets": get_process_set_ids_and_ranks(),
        "operations": _core.last_operations(),
    }
