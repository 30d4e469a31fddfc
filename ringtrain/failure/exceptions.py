"""When this rank fails: the others are told why, and the process ends."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import TracebackType

import ringtrain._core as _core

# How long the exception of this rank waits until the others know of it.
_TELLING_S = 2.0
# How long MPI_Finalize may wait for the other ranks after a failure: one that is stopped would never come.
_FINALIZE_S = 3.0

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_previous: _Hook | None = None
_last_words = ""


def tell_exceptions() -> None:
    """From now on an exception that nobody catches is told to the other ranks before this process ends of it.

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
