"""Facts about this rank for the messages of errors.

The line of the script that submitted an operation, whether all threads of the rank wait, and the exception that ends
the script.
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
from ringtrain._core import PeerLostError, RemoteError, RingtrainError, ShutDownError, Site

# --- call sites: where in the script an operation was submitted -------------------------------------------------------


# Frames of these packages are not of the user: ringtrain, and libraries that call its hooks.
_NOT_THE_USERS = ("ringtrain", "torch", "jax", "optax", "mxnet")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_MAX_KNOWN = 100_000  # names, and lines of scripts; beyond that all are forgotten

_by_name: dict[str, Site] = {}
# By the id of the code, which is kept so that its id is not reused, and the instruction.
_by_place: dict[tuple[int, int], tuple[CodeType, Site]] = {}


def call_site(name: str = "") -> Site:
    """Returns the line of the script that called ringtrain. A `name` keeps the line of its first call."""
    if _of_thread.submitter is None:
        note_submitter()
    known = _by_name.get(name)
    if known is not None:
        return known
    frame = _frame_of_user()
    site = _NOWHERE if frame is None else _site_of(frame)
    if name:
        if len(_by_name) >= _MAX_KNOWN:
            _by_name.clear()
        _by_name[name] = site
    return site


def _site_of(frame: FrameType) -> Site:
    place = (id(frame.f_code), frame.f_lasti)
    if place not in _by_place:
        if len(_by_place) >= _MAX_KNOWN:
            _by_place.clear()
        _by_place[place] = frame.f_code, Site(_text(frame))
    return _by_place[place][1]


class RepeatedSite:
    """The lines of the script that call ringtrain again and again, as a rule from the same depth of calls.

    Finding a line anew takes a microsecond.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        # One tuple, which another thread cannot see half of: the depth, the code, the instruction and the line.
        self._known: tuple[int, CodeType | None, int, Site] = 0, None, -1, _NOWHERE

    def get(self) -> Site:
        """Returns the line of the script that called ringtrain, as call_site()."""
        depth, code, instruction, site = self._known
        try:
            frame = sys._getframe(depth)
        except ValueError:
            return self._find()
        if frame.f_code is code and frame.f_lasti == instruction:
            return site
        known = _by_place.get((id(frame.f_code), frame.f_lasti))
        return self._find() if known is None else known[1]

    def _find(self) -> Site:
        frame: FrameType | None = sys._getframe(1)
        depth = 0
        while frame is not None and not _is_the_users(frame):
            frame, depth = frame.f_back, depth + 1
        if frame is None:
            return _NOWHERE
        site = _site_of(frame)
        self._known = depth, frame.f_code, frame.f_lasti, site
        return site


def call_place() -> str:
    """Returns the line of the script that called ringtrain, such as "train.py:31"; "" if no script did."""
    note_submitter()
    return place_of_script()


def place_of_script() -> str:
    """Returns the same, but does not count the calling thread as one that submits operations."""
    frame = _frame_of_user()
    return "" if frame is None else _text(frame)


def whereabouts(frame: FrameType) -> str:
    """Returns where a frame is, for messages: "in load() at train.py:17", or "at train.py:40" outside functions."""
    name = frame.f_code.co_name
    return f"at {_text(frame)}" if name == "<module>" else f"in {name}() at {_text(frame)}"


def is_of_script(frame: FrameType) -> bool:
    """Whether a frame is of the script: not of ringtrain, of Python, or of an installed package."""
    is_of_package = any(part in frame.f_code.co_filename for part in _PACKAGES)
    return _is_the_users(frame) and not is_of_package and not is_of_standard_library(frame)


def is_of_standard_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((_STANDARD_LIBRARY, "<frozen ")) and not any(part in file for part in _PACKAGES)


def _frame_of_user() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_the_users(frame):
        frame = frame.f_back
    return frame


def _text(frame: FrameType) -> str:
    return _line_in_words(frame, frame.f_lineno)


def _line_in_words(frame: FrameType, line: int) -> str:
    file = os.path.relpath(frame.f_code.co_filename) if _is_below_here(frame) else frame.f_code.co_filename
    return f"{file}:{line}"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the script that called ringtrain."""
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

# If all threads of all ranks wait and no operation can be agreed on, the job is deadlocked. A thread that calls `poll`
# now and then does not wait, and a rank with another thread at work may still submit something. Daemon threads count
# only once they have submitted something, since those of other libraries never end.

_lock = threading.RLock()  # reentrant: a signal handler may run while its thread holds it
_waiting: dict[int, _core.Handle] = {}  # by thread
_submitters: set[int] = set()  # threads that live and have submitted something


class _Submitter:
    """Counts a thread that has submitted something, until it ends: its number may then belong to another thread."""

    def __init__(self) -> None:
        self._number, self._all = threading.get_ident(), _submitters
        self._all.add(self._number)

    def __del__(self) -> None:
        self._all.discard(self._number)


class _OfThread(threading.local):
    submitter: _Submitter | None = None


_of_thread = _OfThread()


def note_submitter() -> None:
    """Counts the calling thread as one that submits. If it is new, withdraws what was reported without it."""
    if _of_thread.submitter is None:
        with _lock:
            _of_thread.submitter = _Submitter()
            _core.say_blocked([])


@contextmanager
def waiting(handle: _core.Handle) -> Iterator[None]:
    """Counts the calling thread as waiting within. Tells the core what is waited for if all threads wait."""
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
    return not _others()


def _others() -> list[threading.Thread]:
    """Returns the threads that could submit something and do not wait for a Handle."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.ident not in _waiting and (not thread.daemon or thread.ident in _submitters)
    ]


def say_blocked_outside(awaited: list[_core.Handle], waits: Callable[[threading.Thread], bool]) -> bool:
    """Tells the core whether this rank is blocked while programs of another library wait for Handles.

    Args:
        awaited: the Handles that programs wait for.
        waits: whether a thread that does not wait for a Handle itself waits for one of the programs.

    Returns:
        Whether it is blocked by them.
    """
    with _lock:
        waiting = [waits(thread) for thread in _others()]  # of all, which `waits` may compare with the next time
        if not waiting:
            return False  # they have said so themselves
        is_blocked = bool(awaited) and all(waiting)
        _core.say_blocked([*_waiting.values(), *awaited] if is_blocked else [])
        return is_blocked


# --- exceptions: how a rank that fails tells the others why, and ends ----------------------------------


# How long an uncaught exception may take to reach the other ranks.
_TELLING_S = 2.0
# How long MPI_Finalize may wait for the other ranks after a failure: a stopped rank never calls it.
_FINALIZE_S = 3.0

# In the environment: tracebacks show the frames of ringtrain, too, and ranks that fail after another one show theirs.
FULL_TRACEBACK_VARIABLE = "RINGTRAIN_FULL_TRACEBACK"
_RINGRUN_VARIABLE = "RINGRUN_SPEAKER"  # that of rank_wrapper.py
_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Their messages say what is wrong; of others the frames of ringtrain may be needed.
_EXPLAINED = (RingtrainError, ValueError, TypeError)
_OF_OTHER_RANKS = (PeerLostError, RemoteError, ShutDownError)

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_previous: _Hook | None = None
_last_words = ""


def tell_exceptions() -> None:
    """Reports uncaught exceptions of the main thread to the other ranks from now on, before the process ends.

    An exception in another thread does not end the process, and is not reported: the other ranks may never need that
    thread. If they do, they wait and get StalledError.
    """
    global _previous
    if _previous is None:
        _previous, sys.excepthook = sys.excepthook, _tell


def keep_exceptions() -> None:
    """Undoes `tell_exceptions`, unless another hook was installed later and calls this one."""
    global _previous
    if _previous is not None and sys.excepthook is _tell:
        sys.excepthook, _previous = _previous, None


def limit_exit() -> None:
    """Limits how long the end of this process waits for other ranks. Called when a rank has failed."""
    _core.limit_exit(_FINALIZE_S)


def tell(error: BaseException) -> None:
    """Makes the operations of the other ranks fail with a RemoteError that has the traceback of this error."""
    limit_exit()
    _core.give_up(_traceback_of(error), _TELLING_S)


def last_words() -> str:
    """Returns the uncaught exception that ends the script, in one line; "" if there is none."""
    return _last_words


def _tell(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    global _last_words
    assert _previous is not None
    place = _innermost_place(frames)
    try:
        error.with_traceback(frames)
        _leave_out_own_frames(error)
        if not hasattr(sys, "ps1"):  # at a prompt the process lives on
            _last_words = _traceback_of(error).partition("\n")[0]
            tell(error)
    finally:
        if _is_told_by_ringrun(error):
            print(f"ringtrain.{_last_words} (this rank was at {place})", file=sys.stderr, flush=True)
        else:
            _previous(kind, error, error.__traceback__)


def _is_told_by_ringrun(error: BaseException) -> bool:
    """Whether another rank has failed, whose traceback ringrun shows, so that this rank needs no more than a line."""
    is_shown = _RINGRUN_VARIABLE in os.environ and FULL_TRACEBACK_VARIABLE not in os.environ
    return is_shown and type(error) in _OF_OTHER_RANKS and _previous is sys.__excepthook__ and bool(_last_words)


def _leave_out_own_frames(error: BaseException) -> None:
    """Takes the frames of ringtrain out of the tracebacks of an error that says what the script did wrong."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if FULL_TRACEBACK_VARIABLE not in os.environ and isinstance(one, _EXPLAINED):
            kept = _without_own_frames(one.__traceback__)
            one.__traceback__ = kept or one.__traceback__
        chain += [one.__cause__, one.__context__]


def _without_own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Leaves out the frames of ringtrain, and those of libraries that it calls."""
    shown, is_inside = [], False
    for one in _entries(frames):
        is_own = one.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER)
        is_inside = is_own or (is_inside and not is_of_script(one.tb_frame))
        if not is_inside:
            shown.append(one)
    kept: TracebackType | None = None
    for one in reversed(shown):
        kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept


def _innermost_place(frames: TracebackType | None) -> str:
    """Returns the innermost line of the script, such as "train.py:31"."""
    places = [(one.tb_frame, one.tb_lineno) for one in _entries(frames) if is_of_script(one.tb_frame)]
    return _line_in_words(*places[-1]) if places else "its end"


def _entries(frames: TracebackType | None) -> list[TracebackType]:
    found = []
    while frames is not None:
        found.append(frames)
        frames = frames.tb_next
    return found


def _traceback_of(error: BaseException) -> str:
    """Returns the error in a line, then its traceback; only the type if the error cannot be turned into text."""
    try:
        lines = traceback.format_exception(error)
        first = f"{type(error).__name__}: {error}".splitlines()[0]
    except Exception:
        return type(error).__name__
    text = f"{first}\n\n{''.join(lines).rstrip()}"
    return text.encode(errors="backslashreplace").decode()
