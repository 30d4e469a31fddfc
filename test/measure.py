"""What a rank costs while it does nothing."""

import time


def cpu_seconds_asleep(seconds):
    """Processor time that this process uses, in all its threads, while its own thread sleeps."""
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before
