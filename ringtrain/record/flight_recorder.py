"""The flight recorder: the last operations of this rank and the stacks of its threads, written to a file when something
has gone wrong.

Every rank writes one when an operation waits for long anywhere in the job, also the rank that is waited for.
`python -m ringtrain.flight FOLDER` compares the files of all ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import ringtrain._core as _core
from ringtrain import failure
from ringtrain.record.folders import temporary_folder
from ringtrain.record.logger import logger

if TYPE_CHECKING:
    from pathlib import Path

# In the folder for temporary files, each with the name of a job.
_FOLDERS = "ringtrain-flight-"
# How many of other jobs stay there, and how long one stays in any case.
_MAX_KEPT_FOLDERS = 8
_MIN_KEPT_S = 600.0

_job = ""
_rank = 0
_process_sets: Callable[[], dict[int, list[int]]] = dict
_folder = ""
_is_own_folder = False
_has_failed = False
_has_told_of_stacks = False
_handles_signal = False
_dump: tuple[int, int] | None = None  # the signal that makes faulthandler write all stacks, and to which descriptor


def start(rank: int, folder: str, token: str, process_sets: Callable[[], dict[int, list[int]]]) -> None:
    """Called by init(): from now on SIGUSR1 has the file written, unless the script has a handler of its own, and so
    has a stall. `process_sets` returns the ranks of each process set by its id."""
    global _job, _rank, _folder, _is_own_folder, _has_failed, _has_told_of_stacks, _handles_signal, _process_sets
    _job, _rank, _is_own_folder, _process_sets = token, rank, not folder, process_sets
    _has_failed = _has_told_of_stacks = False
    _folder = folder or os.path.join(temporary_folder(), f"{_FOLDERS}{token}")
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, on_signal)
        _handles_signal = True
    _watch_stalls()


def stop() -> None:
    """Called by shutdown()."""
    global _handles_signal
    if _handles_signal and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        _handles_signal = False
    _ignore_stalls()


def _watch_stalls() -> None:
    global _dump
    number = next((one for one in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1) if _is_free(one)), None)
    if number is None:
        return
    descriptor = os.memfd_create("ringtrain-stacks")
    faulthandler.register(number, descriptor, all_threads=True)
    _dump = number, descriptor
    stacks = os.path.join(_folder, f"rank-{_rank}.stacks")
    with contextlib.suppress(OSError):
        os.unlink(stacks)  # of an earlier job
    _core.watch_stalls(_on_stall, descriptor, number, _folder, stacks)


def _is_free(number: int) -> bool:
    with contextlib.suppress(ValueError):
        return signal.getsignal(number) is signal.SIG_DFL
    return False


def _ignore_stalls() -> None:
    global _dump
    _core.ignore_stalls()
    if _dump is not None:
        number, descriptor = _dump
        _dump = None
        faulthandler.unregister(number)
        os.close(descriptor)


def _on_stall(question: str) -> None:
    """Called on a thread of its own when an operation waits for long, perhaps for this rank."""
    frames = sys._current_frames()
    _core.answer_question(_whereabouts(frames.get(threading.main_thread().ident or 0)))
    global _has_told_of_stacks
    if _write(f"stall: {question}") is not None and _rank == 0 and not _has_told_of_stacks:
        _has_told_of_stacks = True
        text = "each rank has written its stacks to %s on its host; print them with `python -m ringtrain.flight %s`"
        logger.warning(text, _folder, _folder)


def _whereabouts(innermost: FrameType | None) -> str:
    """The innermost frame that is of the script: "in load() at train.py:17"."""
    own = (frame for frame in _stack(innermost) if failure.is_of_script(frame))
    frame = next(own, innermost)
    return "nowhere" if frame is None else failure.whereabouts(frame)


def _stack(innermost: FrameType | None) -> Iterator[FrameType]:
    frame = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


def _threads() -> list[dict[str, Any]]:
    """The stacks of all threads, innermost frame first, the main thread first."""
    known = {thread.ident: thread for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sys._current_frames()
    calling = frames.pop(own)
    if own == main or own in known:
        frames[own] = next((frame for frame in _stack(calling) if frame.f_globals is not globals()), calling)
    return [
        {
            "name": known[ident].name if ident in known else f"thread {ident}",
            "is_main": ident == main,
            "stack": [failure.whereabouts(frame) for frame in _stack(frame)],
            "whereabouts": _whereabouts(frame),
        }
        for ident, frame in sorted(frames.items(), key=lambda item: (item[0] != main, item[0]))
    ]


def on_signal(number: int, frame: FrameType | None) -> None:
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
    path = _write(reason)
    if path is not None:
        logger.warning(
            "the last operations of rank %d are in %s; `python -m ringtrain.flight %s` compares those of all ranks",
            *(_rank, path, _folder),
        )
    return path


def _write(reason: str) -> Path | None:
    from pathlib import Path  # slow, and a rank without a failure does not need it

    folder = Path(_folder)
    path = folder / f"rank-{_rank}.json"
    try:
        if _is_own_folder and not folder.exists():
            _remove_old_folders(folder.parent)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".json.unfinished-{threading.get_ident()}")
        unfinished.write_text(json.dumps(_contents(reason), indent=1))
        os.replace(unfinished, path)
    except OSError as error:
        logger.error("rank %d cannot write its last operations: %s; set flight_dir to another folder", _rank, error)
        return None
    return path


def _remove_old_folders(parent: Path) -> None:
    """Removes the folders of earlier jobs of this user, except the latest."""
    import shutil  # slow, as above

    found = []
    for folder in parent.glob(f"{_FOLDERS}*"):
        with contextlib.suppress(OSError):
            state = folder.lstat()
            if folder.is_dir() and not folder.is_symlink() and state.st_uid == os.getuid():
                found.append((state.st_mtime, folder))
    for modified_s, folder in sorted(found)[:-_MAX_KEPT_FOLDERS]:
        if time.time() - modified_s > _MIN_KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)


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
        "process_sets": _process_sets(),
        "operations": _core.last_operations(),
        "threads": _threads(),
    }
