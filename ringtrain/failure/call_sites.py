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
_MOST = 100_000  # names that are remembered; beyond that all are forgotten

_by_name: dict[str, Site] = {}
_by_place: dict[tuple[int, int], tuple[CodeType, Site]] = {}  # id of the code, which is kept so that it stays its id


def first_call_site(name: str) -> Site:
    """The place that called ringtrain with this name for the first time, which costs next to nothing to know."""
    deadlock.note_submitter()
    site = _by_name.get(name)
    if site is None or not name:
        if len(_by_name) >= _MOST:
            _by_name.clear()
        site = _by_name[name] = _find_site()
    return site


def call_site() -> Site:
    """The place that called ringtrain."""
    deadlock.note_submitter()
    return _find_site()


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


def _find_site() -> Site:
    frame = _frame_of_user()
    if frame is None:
        return _NOWHERE
    place = (id(frame.f_code), frame.f_lasti)
    known = _by_place.get(place)
    if known is None:
        if len(_by_place) >= _MOST:
            _by_place.clear()
        known = _by_place[place] = frame.f_code, Site(_text(frame))
    return known[1]


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
