"""What a rank costs while it does nothing, and what its threads are."""

import re
import signal
import time
from pathlib import Path


def cpu_seconds_asleep(seconds: float) -> float:
    """Processor time that this process uses, in all its threads, while its own thread sleeps."""
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before


def threads_that_take_signals() -> set[int]:
    """The numbers of this process's threads to which the system may give one."""
    found = set()
    for file in Path("/proc/self/task").glob("*/status"):
        (blocked,) = re.findall(r"^SigBlk:\s*(\w+)", file.read_text(), re.MULTILINE)
        if not all(int(blocked, 16) >> number - 1 & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)):
            found.add(int(file.parent.name))
    return found
