"""Where in the user's code an operation was submitted, for messages about operations that do not end."""

from __future__ import annotations

import os
import sys
import warnings
from types import CodeType, FrameType

from ringtrain._core import Site
from ringtrain.failure import deadlock

# Frames of these packages are not the user's: ringtrain itself, and what calls its hooks.
_NOT_THE_USERS = ("ringtrain", "torch", "jax", "optax", "mxnet")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_MOST = 100_000  # names, or places, that are remembered; beyond that all are forgotten

_by_name: dict[str, Site] = {}
_by_place: dict[tuple[int, int], tuple[CodeType, Site]] = {}  # id of the code, which is kept so that it stays its id


def call_site(name: str = "") -> Site:
    """Returns the place that called ringtrain; the first one that did so with this name, which is quick to find."""
    if deadlock.of_thread.submitter is None:
        deadlock.note_submitter()
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
    deadlock.note_submitter()
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
