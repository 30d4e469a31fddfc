"""Reports of this rank about itself when something goes wrong, or when nothing goes on.

Where in the script an operation was submitted, whether all threads wait, and an exception of which this rank ends.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, TracebackType

import ringtrain._core as _core
from ringtrain._core import Site

# --- call sites: where in the script an operation was submitted -------------------------------------------------------


# Frames of these packages are not the user's: ringtrain itself, and what calls its hooks.
_NOT_THE_USERS = ("ringtrain", "torch", "jax", "optax", "mxnet")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_MOST = 100_000  # names, or places, that are remembered; beyond that all are forgotten

_by_name: dict[str, Site] = {}
_by_place: dict[tuple[int, int], tuple[CodeType, Site]] = {}  # id of the code, which is kept so that it stays its id


def call_site(name: str = "") -> Site:
    """Returns the place that called ringtrain; the first one that did so with this name, which is quick to find."""
    if _of_thread.submitter is None:
        note_submitter()
    known = _by_name.get(name)
    if known is not None:
        return known
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame = frame.f_back
    if frame is None:
        site = _NOWHERE
    else:
        place = (id(frame.f_code), frame.f_lasti)
        if place not in _by_place:
            if len(_by_place) >= _MOST:
                _by_place.clear()
            _by_place[place] = frame.f_code, Site(_text(frame))
        site = _by_place[place][1]
    if name:
        if len(_by_name) >= _MOST:
            _by_name.clear()
        _by_name[name] = site
    return site


def call_place() -> str:
    """The place that called ringtrain, as text; "" if there is none."""
    note_submitter()
    return place_of_script()


def place_of_script() -> str:
    """The same for what submits nothing."""
    frame = _frame_of_user()
    return "" if frame is None else _text(frame)


def whereabouts(frame: FrameType) -> str:
    """Where it is, for messages: "in load() at train.py:17", or "at train.py:40" outside of functions."""
    name = frame.f_code.co_name
    return f"at {_text(frame)}" if name == "<module>" else f"in {name}() at {_text(frame)}"


def is_of_script(frame: FrameType) -> bool:
    """Whether it is neither of ringtrain nor of Python or a package that is installed."""
    file = frame.f_code.co_filename
    is_of_library = file.startswith((_STANDARD_LIBRARY, "<frozen ")) or any(part in file for part in _PACKAGES)
    return _is_the_users(frame) and not is_of_library


def _frame_of_user() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_the_users(frame):
        frame = frame.f_back
    return frame


def _text(frame: FrameType) -> str:
    file = os.path.relpath(frame.f_code.co_filename) if _is_below_here(frame) else frame.f_code.co_filename
    return f"{file}:{frame.f_lineno}"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the place that called ringtrain."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and not _is_the_users(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_the_users(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_THE_USERS


def _is_below_here(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(os.getcwd() + os.sep)


_NOWHERE = Site("")


# --- deadlocks: whether all threads of this rank that could submit something wait -------------------------------------

# When that holds on all ranks and nothing can be agreed on, it is a deadlock. Only what is certain counts: a thread
# that looks with `poll` now and then does not wait, and a rank with another thread at work may still submit something.
# Daemon threads count only once they have submitted something, since those of other libraries never end.

_lock = threading.RLock()  # a signal handler may come here in the middle
_waiting: dict[int, _core.Handle] = {}  # by thread
_submitters: set[int] = set()  # threads that live and have submitted something


class _Submitter:
    """A thread that has submitted something, until it ends: its number may be another thread's then."""

    def __init__(self) -> None:
        self._number, self._all = threading.get_ident(), _submitters
        self._all.add(self._number)

    def __del__(self) -> None:
        self._all.discard(self._number)


class _OfThread(threading.local):
    submitter: _Submitter | None = None


_of_thread = _OfThread()


def note_submitter() -> None:
    """The calling thread submits operations; if that is new, what was said without counting it was too early."""
    if _of_thread.submitter is None:
        with _lock:
            _of_thread.submitter = _Submitter()
            _core.say_blocked([])


@contextmanager
def waiting(handle: _core.Handle) -> Iterator[None]:
    """The calling thread has waited for the handle for a while and goes on waiting within."""
    me = threading.get_ident()
    try:
        with _lock:
            _waiting[me] = handle
            _core.say_blocked(list(_waiting.values()) if _are_all_waiting() else [])
        yield
    finally:  # a signal handler may raise anywhere
        _waiting.pop(me, None)
        with _lock:
            _core.say_blocked([])


def _are_all_waiting() -> bool:
    return all(
        thread.ident in _waiting or (thread.daemon and thread.ident not in _submitters)
        for thread in threading.enumerate()
    )


# --- exceptions: when this rank fails, the others are told why, and the process ends ----------------------------------


# How long the exception of this rank waits until the others know of it.
_TELLING_S = 2.0
# How long MPI_Finalize may wait for the other ranks after a failure: one that is stopped would never come.
_FINALIZE_S = 3.0

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_previous: _Hook | None = None
_last_words = ""


def tell_exceptions() -> None:
    """From now on an uncaught exception is told to the other ranks before this process ends of it.

    This is for the main thread. An exception in another thread does not end the process: the others may never need what
    that thread was for, and if they do, they wait and get StalledError.
    """
    global _previous
    if _previous is None:
        _previous, sys.excepthook = sys.excepthook, _tell


def keep_exceptions() -> None:
    """Undo `tell_exceptions`, unless somebody else's hook stands before ours and calls it."""
    global _previous
    if _previous is not None and sys.excepthook is _tell:
        sys.excepthook, _previous = _previous, None


def limit_exit() -> None:
    """This rank or another one has failed: the end of the process must not wait for ranks that may never end."""
    _core.limit_exit(_FINALIZE_S)


def tell(error: BaseException) -> None:
    """Makes the operations of the other ranks fail with RemoteError, and with this error's traceback."""
    limit_exit()
    _core.give_up(_traceback_of(error), _TELLING_S)


def last_words() -> str:
    """The exception of which the script of this process ends, in a line; "" if there is none."""
    return _last_words


def _tell(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    global _last_words
    assert _previous is not None
    try:
        if not hasattr(sys, "ps1"):  # at a prompt the process lives on
            _last_words = _traceback_of(error).partition("\n")[0]
            tell(error.with_traceback(frames))
    finally:
        _previous(kind, error, frames)


def _traceback_of(error: BaseException) -> str:
    """The error in a line, and the whole traceback; the type alone where its own text cannot be had."""
    try:
        lines = traceback.format_exception(error)
        first = f"{type(error).__name__}: {error}".splitlines()[0]
    except Exception:
        return type(error).__name__
    text = f"{first}\n\n{''.join(lines).rstrip()}"
    return text.encode(errors="backslashreplace").decode()
