"""Which operations of the ranks are one operation, when the last rank had submitted it, and who that was."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ringtrain.timeline.report.trace import Operation, RankTrace

Meeting = list[Operation]  # one operation of each rank that took part, by rank

# Clocks of different hosts are brought together by barriers, which all ranks leave at nearly the same time only.
_CLOCKS_DIFFER_NS = 2_000_000


def meet(ranks: Sequence[RankTrace]) -> list[Meeting]:
    """Find the operations that belong together, and note in each when all had submitted it and who did so last."""
    clocks_differ = _CLOCKS_DIFFER_NS if len({rank.host for rank in ranks}) > 1 else 0
    of_name: dict[tuple[int, str], dict[int, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for operation in rank.operations:
            of_name[operation.process_set, operation.name][rank.rank].append(operation)
    meetings = []
    for by_rank in of_name.values():
        for meeting in _meetings_of_one_name(list(by_rank.values()), clocks_differ):
            _note_who_came_last(meeting)
            meetings.append(meeting)
    return meetings


def _meetings_of_one_name(queues: list[list[Operation]], clocks_differ: int) -> Iterator[Meeting]:
    """A name is in flight once at a time on a rank, and nobody's operation ends before all have submitted theirs.

    So whoever had submitted by the time that the earliest ended took part; the others have theirs still to come. That
    holds too where a rank took no part, as after join(), or began its timeline later.
    """
    heads = [0] * len(queues)
    while True:
        waiting = [at for at, queue in enumerate(queues) if heads[at] < len(queue)]
        if not waiting:
            return
        first_end = min(queues[at][heads[at]].ended_ns for at in waiting) + clocks_differ
        meeting = []
        for at in waiting:
            operation = queues[at][heads[at]]
            if operation.submitted_ns <= first_end:
                meeting.append(operation)
                heads[at] += 1
        yield meeting


def _note_who_came_last(meeting: Meeting) -> None:
    last = max(meeting, key=lambda operation: operation.submitted_ns)
    for operation in meeting:
        # A rank that has begun knows that all have submitted, whatever the clock of another host says.
        operation.all_submitted_ns = max(operation.submitted_ns, min(last.submitted_ns, operation.begun_ns))
        operation.last_rank = last.rank
