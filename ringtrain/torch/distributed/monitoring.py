"""The ranks that do not arrive at a monitored_barrier, by torch's store and in the words of gloo."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

_LONGEST_TO_HEAR_S = 5.0


def missing_at(store: Any, prefix: str, rank: int, size: int, seconds: float, wait_all_ranks: bool, title: str) -> str:
    """Wait for all ranks. Returns the text of the error, "" if all have arrived.

    Args:
        prefix: of the keys of this barrier in the store.
        title: of the group.
    """
    end = time.monotonic() + seconds
    store.set(f"{prefix}/{rank}", "here")
    if rank == 0:
        missing: list[int] = []
        arrived: list[int] = []
        said = ""
        for one in range(1, size):
            if time.monotonic() >= end and not wait_all_ranks:
                said = _overdue(seconds, one)
                break
            if _comes(store, f"{prefix}/{one}", end):
                arrived.append(one)
            else:
                missing.append(one)
                if not wait_all_ranks:
                    break
        if missing:
            which = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
            said = f"{which} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms, in {title}"
        store.set(f"{prefix}/said", said or "-")
        # The process of rank 0 has the store, and may end after this.
        end = time.monotonic() + _LONGEST_TO_HEAR_S
        for one in arrived:
            _comes(store, f"{prefix}/{one} has heard", end)
    elif not _comes(store, f"{prefix}/said", end + min(5.0, seconds)):
        said = f"Rank 0 failed to pass monitoredBarrier in {seconds * 1000:.0f} ms, in {title}"
    else:
        answer = store.get(f"{prefix}/said").decode()
        store.set(f"{prefix}/{rank} has heard", "-")
        said = "" if answer == "-" else answer
    if said and rank:
        said = (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
            f"send/recv from rank 0. {said}"
        )
    return said


def _overdue(seconds: float, processed: int) -> str:
    """Returns the text of rank 0 when the time is over before it has looked for rank `processed`."""
    passed = f"Successfully processed ranks: {', '.join(map(str, range(1, processed)))}."
    nobody = "No ranks successfully processed in monitoredBarrier."
    return f"Rank 0 timed out in monitoredBarrier after {seconds * 1000:.0f} ms. {passed if processed > 1 else nobody}"


def _comes(store: Any, key: str, end: float) -> bool:
    """Whether the key is set in time."""
    try:
        store.wait([key], timedelta(seconds=max(0.001, end - time.monotonic())))
    except Exception:
        return False
    return True
