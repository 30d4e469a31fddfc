"""The logger "ringtrain", for messages to the user that are not errors."""

from __future__ import annotations

import contextlib
import logging
import sys

import ringtrain._core as _core

logger = logging.getLogger("ringtrain")


def write_line(text: str) -> None:
    """Writes a line on standard error by one call.

    print() takes two where Python does not buffer, and lines of other threads, or of the core, come between them.
    """
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


class _OnStandardError(logging.Handler):
    """As `ringtrain: ...`, for scripts that set up no logging. Others get the records instead."""

    def emit(self, record: logging.LogRecord) -> None:
        above = logging.getLogger().handlers if logger.propagate else []
        if any(handler is not self for handler in (*logger.handlers, *above)):
            return
        # A launcher that has ended has closed it. That must not put a BrokenPipeError in the place of what went wrong.
        with contextlib.suppress(OSError, ValueError):
            write_line(f"ringtrain: {record.getMessage()}")


def set_level(level: str) -> None:
    """Called by init() with the option log_level; a level that the script has given the logger stays."""
    _core.set_log_level(level)
    global _own_level
    if logger.level in (logging.NOTSET, _own_level):
        _own_level = _LEVELS[level]
        logger.setLevel(_own_level)


_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
_own_level = logging.NOTSET
logger.addHandler(_OnStandardError())
