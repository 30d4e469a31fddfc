"""Whether this rank will submit nothing more before something ends: all threads that could do so wait.

When that holds on all ranks and nothing can be agreed on, it is a deadlock. Only what is certain counts: a thread that
looks with `poll` now and then does not wait, and a rank with another thread at work may still submit something. Daemon
threads count only once they have submitted something, since those of other libraries never end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ringtrain._core as _core

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


of_thread = _OfThread()  # for callers that submit often, to look at


def note_submitter() -> None:
    """The calling thread submits operations; if that is new, what was said without counting it was too early."""
    if of_thread.submitter is None:
        with _lock:
            of_thread.submitter = _Submitter()
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
