"""What a rank costs while it does nothing."""

import os
import time


def cpu_seconds_asleep(seconds):
    """Processor time that this process uses, in all its threads, while its own thread sleeps."""
    before = os.times()
    time.sleep(seconds)
    after = os.times()
    return (after.user + after.system) - (before.user + before.system)
