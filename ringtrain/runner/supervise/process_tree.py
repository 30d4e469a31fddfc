"""Signals that a process of a job inherits from its parent as ignored or blocked, its limits, and its descendants.

Scripts that do not import ringtrain load this file by its path, so it needs nothing but Python itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import time
from collections.abc import Callable, Collection

# In the environment of a process that is to outlive its job, such as one that removes files of it elsewhere.
OUTLIVES_VARIABLE = "RINGRUN_OUTLIVES"

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PAUSE_S = 0.02
_OPEN_ALREADY = 64


def reset_signals() -> None:
    """Undoes what the parent has set by accident. Main thread.

    Where SIGCHLD is ignored, the kernel forgets how children end, and a blocked signal neither ends nor wakes this
    process and its children. Other ignored signals stay ignored, for nohup and for the `&` of a shell.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def require_descriptors(count: int, user: str) -> None:
    """Raises the soft limit where it is lower than `count` and some that are open already.

    Raises OSError where the hard limit is lower, which names `user`, such as "4 ranks".
    """
    needed = count + _OPEN_ALREADY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != hard < needed:
        text = f"{user} need {needed} open files, and the hard limit is {hard}: raise it, see ulimit -Hn"
        raise OSError(errno.EMFILE, text)
    if resource.RLIM_INFINITY != soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def wake_up_by_signals() -> int:
    """Returns a descriptor to read from: the numbers of the signals that have come, of those with a handler."""
    wake_up, wake_up_end = os.pipe()
    for descriptor in (wake_up, wake_up_end):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake_up_end, warn_on_full_buffer=False)
    return wake_up


def signal_at_end_of_parent(number: int) -> None:
    """Sends this process a signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Makes this process the parent of each descendant whose own parent ends, also in a session of its own."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """Returns the children of a process, their children and so on, without zombies."""
    children: dict[int, list[int]] = {}
    living = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(name))
            if state not in "ZX":
                living.add(int(name))
    found = list(children.get(pid, []))
    for one in found:  # grows meanwhile
        found += children.get(one, [])
    return [one for one in found if one in living]


def kill(pids: Collection[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_descendants(within_s: float) -> list[int]:
    """Kills all descendants of this process and waits for their end. Returns those that outlive it."""
    return kill_all(lambda: [pid for pid in descendants(os.getpid()) if not _outlives(pid)], within_s)


def kill_all(find: Callable[[], list[int]], within_s: float) -> list[int]:
    """Kills what `find` finds until that is nothing. Returns those that outlive it for `within_s` seconds.

    A process outlives SIGKILL while it waits in the kernel, for a file server or a GPU.
    """
    deadline = time.monotonic() + within_s
    while remaining := find():
        if time.monotonic() > deadline:
            break
        kill(remaining)
        time.sleep(_PAUSE_S)
    return remaining


def _outlives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return OUTLIVES_VARIABLE.encode() in (variable.partition(b"=")[0] for variable in file.read().split(b"\0"))
    except OSError:
        return False
