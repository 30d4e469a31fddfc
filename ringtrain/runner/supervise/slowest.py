"""One sentence at the end of a job in which the others have waited for one rank, by what each rank has counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Of shorter jobs the start is most of the time, and of less waiting nobody needs to know.
_LEAST_S = 10.0
_LEAST_SHARE_OF_OPERATIONS, _LEAST_SHARE_OF_TIME = 0.5, 0.1


def in_words_of_slowest(counts: Mapping[int, Sequence[float]], num_proc: int) -> str:
    """Returns "" if no rank was the slowest, or if not all ranks have told what they counted.

    Args:
        counts: of each rank, the operations for which all others waited for it, all that were compared, the seconds in
            which its script has waited, and those since init().
    """
    if num_proc < 2 or len(counts) < num_proc:
        return ""
    slowest = max(counts, key=lambda rank: counts[rank][0])
    came_last, operations, own_wait_s, elapsed_s = counts[slowest]
    others = [waited_s for rank, (_, _, waited_s, _) in counts.items() if rank != slowest]
    cost_s = sum(others) / len(others) - own_wait_s
    if elapsed_s < _LEAST_S or came_last < _LEAST_SHARE_OF_OPERATIONS * operations or operations == 0:
        return ""
    if cost_s < _LEAST_SHARE_OF_TIME * elapsed_s:
        return ""
    return (
        f"the others waited for rank {slowest} in {came_last:.0f} of {operations:.0f} operations, {cost_s:.0f} s of "
        f"{elapsed_s:.0f} s: --timeline-filename t.json, and then python -m ringtrain.timeline report t.json, show why"
    )
