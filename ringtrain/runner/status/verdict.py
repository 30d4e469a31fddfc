"""Says in one sentence what is the matter with a job, by the rules of the report of timelines.

First ranks and hosts that do not answer, then what waits for long, then the largest part of the time that ranks wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ringtrain.job.job_file import Job
from ringtrain.runner.status.asking import Silence, Snapshot
from ringtrain.runner.status.waits import Waiting, in_words, some_ranks, waiting_in

# An operation waits for long from here on, and from so many of its usual waits on.
LONG_S, _USUAL_WAITS = 2.0, 5
# As in timeline/report/figures.py: of the time, and of what kept ranks waiting.
_WORTH_MENDING, _MOST = 0.10, 0.5
# Fewer operations between two snapshots say nothing.
_LEAST_OPERATIONS = 3

_Stacks = Callable[[Iterable[int]], dict[int, dict[str, Any]]]


@dataclass(frozen=True)
class Verdict:
    """kind: stopped, gone, silent, host, late, deadlock, branches, network, slow_rank, turns, compute, idle or left.
    ranks: those that it is about."""

    kind: str
    sentence: str
    ranks: list[int]


def judge(job: Job, first: Snapshot, last: Snapshot, ask_for_stacks: _Stacks) -> Verdict:
    """Says what is the matter.

    Args:
        first, last: two snapshots, about a second apart, or the same one.
        ask_for_stacks: called for the ranks that are to blame.
    """
    verdict = _Judge(job, first, last, ask_for_stacks).judge()
    begins_with_rank = verdict.sentence.startswith("rank")  # and not with the name of a host
    return replace(verdict, sentence="R" + verdict.sentence[1:]) if begins_with_rank else verdict


def long_waits(job: Job, snapshot: Snapshot) -> list[Waiting]:
    """Returns the operations that wait for long, the oldest first."""
    return [one for one in waiting_in(snapshot, len(job.ranks)) if one.since_s > _long_s(snapshot, one)]


def _long_s(snapshot: Snapshot, waiting: Waiting) -> float:
    totals: dict[str, float] = snapshot.answers[waiting.ranks[0]]["totals"]
    usual_s = (totals["waiting_s"] + totals["working_s"]) / max(totals["operations"], 1)
    return max(LONG_S, _USUAL_WAITS * usual_s)


class _Judge:
    def __init__(self, job: Job, first: Snapshot, last: Snapshot, ask_for_stacks: _Stacks):
        self._job, self._first, self._last, self._ask_for_stacks = job, first, last, ask_for_stacks
        self._waits = long_waits(job, last)
        # By rank, what it waits for longest.
        self._of_rank = {rank: waiting for waiting in reversed(self._waits) for rank in waiting.ranks}

    def judge(self) -> Verdict:
        if self._last.silent:
            return self._silent(self._last.silent)
        if not self._waits:
            return self._rates()
        return self._blame(self._waits[0])

    # ---- ranks that do not answer

    def _silent(self, silent: dict[int, Silence]) -> Verdict:
        gone = [rank for rank, one in silent.items() if one.is_gone]
        stopped = [rank for rank, one in silent.items() if one.state in ("T", "t")]
        hosts = {rank: self._job.ranks[rank].host for rank in silent}
        dead = {host for host in hosts.values() if self._is_silent(host)}
        if gone:
            return self._tell("gone", gone, f"{_are(gone)} gone ({self._processes(gone)})")
        if stopped:
            text = f"{_are(stopped)} stopped, by SIGSTOP or a debugger (state T, {self._processes(stopped)})"
            return self._tell("stopped", stopped, text)
        if dead and all(silent[rank].state is None for rank in silent if hosts[rank] in dead):
            ranks = [rank for rank, host in hosts.items() if host in dead]
            do = "does" if len(dead) == 1 else "do"
            text = f"{' and '.join(sorted(dead))} {do} not answer, with {some_ranks(ranks)}: look at power and link"
            return self._tell("host", ranks, text)
        left = [rank for rank, one in silent.items() if one.is_refused]
        if left and not self._last.answers and self._job.generation is not None:
            text = f"The processes of generation {self._job.generation} have left it, and the next one has not begun"
            return Verdict("left", f"{text}.", left)
        if left:
            has = "has" if len(left) == 1 else "have"
            text = f"{some_ranks(left)} {has} left the job or not joined it yet ({self._processes(left)})"
            return self._tell("left", left, text)
        ranks = list(silent)
        states = sorted({one.state for one in silent.values() if one.state})
        state = f"state {', '.join(states)}, " if states else ""
        return self._tell("silent", ranks, f"no answer from {some_ranks(ranks)} ({state}{self._processes(ranks)})")

    def _is_silent(self, host: str) -> bool:
        return all(rank in self._last.silent for rank, one in enumerate(self._job.ranks) if one.host == host)

    def _processes(self, ranks: list[int]) -> str:
        more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        return self._process(ranks[0]) + more

    def _process(self, rank: int) -> str:
        return f"pid {self._job.ranks[rank].pid} on {self._job.ranks[rank].host}"

    def _tell(self, kind: str, ranks: list[int], text: str) -> Verdict:
        """With what waits for these ranks, if something does."""
        for waiting in waiting_in(self._last, len(self._job.ranks)):
            is_for_these = not waiting.missing or set(waiting.missing) & set(ranks)
            if is_for_these and waiting.since_s > LONG_S / 4:
                return Verdict(kind, f"{text}; {self._who_waits(waiting, ranks)}.", ranks)
        return Verdict(kind, f"{text}.", ranks)

    def _who_waits(self, waiting: Waiting, ranks: list[int]) -> str:
        who, since = some_ranks(waiting.ranks), seconds(waiting.since_s)
        if not waiting.missing:
            return f"{waiting.text()} has been under way for {since} on {who}"
        have = "has" if len(waiting.ranks) == 1 else "have"
        awaited = "it" if len(ranks) == 1 else "them"
        return f"{who} {have} waited for {awaited} for {since} in {waiting.text()}"

    # ---- operations that wait for long

    def _blame(self, oldest: Waiting) -> Verdict:
        if not oldest.missing:
            waiting = next((one for one in self._waits if one.missing), None)
            if waiting is None:
                return self._under_way(oldest)
            oldest = waiting
        seen: list[Waiting] = []
        waiting = oldest
        while True:
            seen.append(waiting)
            idle = [rank for rank in waiting.missing if rank not in self._of_rank]
            if idle:
                return self._late(waiting, idle)
            following = self._of_rank[waiting.missing[0]]
            if following in seen:
                return self._circle(seen[seen.index(following) :])
            if not following.missing:
                return self._under_way(following)
            waiting = following

    def _late(self, waiting: Waiting, ranks: list[int]) -> Verdict:
        text = f"{self._places(ranks)}; {self._who_waits(waiting, ranks)}"
        return Verdict("late", f"{text}.", ranks)

    def _places(self, ranks: list[int]) -> str:
        """Such as "rank 3 is in load() at train.py:15"."""
        told = self._ask_for_stacks(ranks[:8])
        places = {rank: _place(told.get(rank)) for rank in ranks[:8]}
        common, count = Counter(places.values()).most_common(1)[0]
        at_common = [rank for rank in ranks if places.get(rank, common) == common]
        text = f"{_are(at_common if count > 1 else ranks[:1])} {common if count > 1 else places[ranks[0]]}"
        others = len(ranks) - (len(at_common) if count > 1 else 1)
        text += f" (and {others} more elsewhere)" if others else ""
        full = sorted({disk for one in told.values() for disk in one.get("full_disks", [])})
        if full:
            text += f", and {', '.join(full)} on {self._job.ranks[ranks[0]].host} is full"
        return text

    def _circle(self, circle: list[Waiting]) -> Verdict:
        ranks = sorted({rank for one in circle for rank in one.ranks})
        sets = {one.process_set for one in circle}
        parts = [
            f"{some_ranks(one.ranks)} {'waits' if len(one.ranks) == 1 else 'wait'} in {one.text()}"
            f"{_of_set(one) if len(sets) > 1 else ''} for {some_ranks(one.missing)}"
            for one in circle
        ]
        text = " and ".join(parts)
        since = f"for {seconds(min(one.since_s for one in circle))}"
        if len(sets) > 1:
            remedy = "submit to these process sets in the same order on all ranks"
            return Verdict("deadlock", f"A deadlock {since}: {text}; {remedy}.", ranks)
        steps = {rank: self._last.answers[rank]["steps"]["count"] for rank in ranks if rank in self._last.answers}
        counts = sorted(set(steps.values()))
        if len(counts) > 1:
            least = [rank for rank, count in steps.items() if count == counts[0]]
            made = f"{some_ranks(least)} made {counts[0]} steps and others {counts[-1]}"
            remedy = f"{made}: give all ranks as many batches, or call hvd.join()"
            return Verdict("uneven", f"The ranks wait for each other {since}: {text}; {remedy}.", ranks)
        remedy = "is a branch taken by some ranks only, or have they different numbers of batches?"
        return Verdict("branches", f"The ranks wait for each other {since}: {text}; {remedy}", ranks)

    def _under_way(self, waiting: Waiting) -> Verdict:
        text = f"{waiting.text()} has been under way for {seconds(waiting.since_s)} on all its ranks"
        return Verdict("network", f"{text}: {self._traffic()}.", waiting.ranks)

    # ---- jobs that go on

    def _rates(self) -> Verdict:
        rates = _Rates(self._first, self._last)
        if not rates.has_operations:
            return self._idle()
        if rates.lost < _WORTH_MENDING:
            pace = f" at {rates.steps_per_s:.3g} steps/s" if rates.steps_per_s else ""
            return Verdict("compute", f"The job computes{pace}: ranks wait for {percent(rates.lost)} of the time.", [])
        if not rates.is_for_ranks:
            return self._network(rates)
        slowest = rates.slowest()
        if slowest is None:
            text = f"The ranks wait for each other for {percent(rates.lost)} of the time, and take turns at being last."
            return Verdict("turns", text, [])
        lost, place = percent(rates.lost_by_others(slowest)), self._places([slowest])
        where = place.replace(f"rank {slowest}", "it", 1)
        text = f"rank {slowest} is the slowest: the others wait for it for {lost} of the time; {where}."
        return Verdict("slow_rank", text, [slowest])

    def _network(self, rates: _Rates) -> Verdict:
        is_one_host = len({rank.node for rank in self._job.ranks}) == 1
        what = "Communication" if is_one_host else "The network"
        is_limit = "is the limit" if rates.lost > 3 * _WORTH_MENDING else "costs time"
        text = f"{what} {is_limit}: ranks wait for it for {percent(rates.lost)} of the time"
        return Verdict("network", text + (f"; {self._traffic()}." if not is_one_host else "."), [])

    def _traffic(self) -> str:
        """Returns how much each host sends in a second, the slowest first."""
        rates = {}
        for rank, answer in self._last.answers.items():
            before = self._first.answers.get(rank)
            if before is None or answer["monotonic_s"] <= before["monotonic_s"]:
                continue
            sent = answer["traffic"]["sent_bytes"] - before["traffic"]["sent_bytes"]
            rates[self._job.ranks[rank].host] = sent / (answer["monotonic_s"] - before["monotonic_s"])
        if not rates:
            return "look at the network"
        parts = [f"{host} sends {rate / 1e6:.3g} MB/s" for host, rate in sorted(rates.items(), key=lambda one: one[1])]
        return ", ".join(parts[:4])

    def _idle(self) -> Verdict:
        ended = [one["last_operation"] for one in self._last.answers.values() if one.get("last_operation")]
        if not ended:
            return Verdict("idle", f"No operation has ended yet; {self._places([0])}.", [])
        last = min(ended, key=lambda one: one["ended_s_ago"])
        text = (
            f"No rank waits for another; the last operation, {in_words(last)}, ended {seconds(last['ended_s_ago'])} ago"
        )
        return Verdict("idle", f"{text}; {self._places([min(self._last.answers)])}.", [])


class _Rates:
    """How the ranks spend their time between two snapshots, or since init() if little has happened between them."""

    def __init__(self, first: Snapshot, last: Snapshot):
        ranks = [rank for rank in last.answers if rank in first.answers and "totals" in last.answers[rank]]
        spans = {rank: _difference(first.answers[rank], last.answers[rank]) for rank in ranks}
        if min((span["operations"] for span in spans.values()), default=0) < _LEAST_OPERATIONS:
            spans = {rank: {**last.answers[rank]["totals"], "span_s": last.answers[rank]["age_s"]} for rank in ranks}
        self._spans = spans
        self.has_operations = min((span["operations"] for span in spans.values()), default=0) >= _LEAST_OPERATIONS
        self._exposed = {rank: span["exposed_s"] / max(span["span_s"], 1e-9) for rank, span in spans.items()}
        self.lost = sum(self._exposed.values()) / max(len(self._exposed), 1)
        waiting, working = (sum(span[part] for span in spans.values()) for part in ("waiting_s", "working_s"))
        self.is_for_ranks = waiting > working
        self.steps_per_s = max((last.answers[rank]["steps"]["per_s"] for rank in ranks), default=0.0)

    def slowest(self) -> int | None:
        """Returns the rank that most operations wait for; None if the ranks take turns."""
        came_last = {rank: span["came_last"] for rank, span in self._spans.items()}
        worst = max(came_last, key=came_last.__getitem__)
        if came_last[worst] > _MOST * sum(came_last.values()):
            return worst
        worst = min(self._exposed, key=self._exposed.__getitem__)
        is_far_off = self._exposed[worst] < _MOST * self.lost_by_others(worst)
        return worst if sum(came_last.values()) == 0 and is_far_off else None

    def lost_by_others(self, rank: int) -> float:
        others = [share for other, share in self._exposed.items() if other != rank]
        return sum(others) / max(len(others), 1)


def _difference(first: dict[str, Any], last: dict[str, Any]) -> dict[str, float]:
    before, after = first.get("totals", {}), last["totals"]
    span = {name: value - before.get(name, 0) for name, value in after.items()}
    return {**span, "span_s": last["monotonic_s"] - first["monotonic_s"]}


def _place(told: dict[str, Any] | None) -> str:
    if told is None or not told["whereabouts"]:
        return "in a library"
    place: str = told["whereabouts"]
    return f"{place}, where it keeps the GIL" if told["is_gil_kept"] else place


def _of_set(waiting: Waiting) -> str:
    return f" of process set {waiting.process_set}" if waiting.process_set else " of all ranks"


def _are(ranks: list[int]) -> str:
    return f"{some_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'}"


def percent(share: float) -> str:
    return f"{min(share, 1):.0%}".replace("%", " %")


def seconds(value: float) -> str:
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
