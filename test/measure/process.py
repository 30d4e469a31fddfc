"""The cost of a rank while it does nothing, and its threads."""

import re
import signal
import time
from pathlib import Path
from typing import NamedTuple


class Asleep(NamedTuple):
    """Returns what the threads of this process did while its main thread slept, for each second of that sleep."""

    cpu_s: float
    """processor time; about 1 for a thread that spins"""
    wakeups: float
    """times that a thread went to sleep again; about 1,000 for a thread that looks every millisecond"""


def measure_asleep(seconds: float) -> Asleep:
    """Makes the calling thread sleep, and returns what the others did in that time.

    Processor time alone would judge the machine: what one wake-up costs differs by ten times between machines.
    """
    wakeups, cpu_s, began = _count_wakeups(), time.process_time(), time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    return Asleep((time.process_time() - cpu_s) / took, (_count_wakeups() - wakeups) / took)


def _count_wakeups() -> int:
    statuses = [file.read_text() for file in Path("/proc/self/task").glob("*/status")]
    return sum(int(re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.MULTILINE)[0]) for text in statuses)


def threads_that_take_signals() -> set[int]:
    """The numbers of this process's threads to which the system may give one."""
    found = set()
    for file in Path("/proc/self/task").glob("*/status"):
        try:
            status = file.read_text()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
        (blocked,) = re.findall(r"^SigBlk:\s*(\w+)", status, re.MULTILINE)
        if not all(int(blocked, 16) >> number - 1 & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)):
            found.add(int(file.parent.name))
    return found
