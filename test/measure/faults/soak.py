"""Many random faults: how long until the others know, and does anything hang or stay?"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence

from measure.faults.injection import FROM_OUTSIDE, KINDS, Injection, Kind, Phase
from measure.faults.trial import Outcome, Place, ends_all, run
from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of
from ringtrain.bench.results import Result, Round, Row
from ringtrain.runner.hosts import Host, parse_hosts, total_slots

# Short, so that a rank that is stopped costs little time; long enough for a loaded machine.
_LIMITS = {"stall_warning_time_s": 0.5, "stall_shutdown_time_s": 1.0, "start_timeout_s": 6}
_IN_INIT: tuple[Phase, ...] = ("connect", "share")
_LATER: tuple[Phase, ...] = (
    *("idle", "negotiate", "reduce", "reduce float16", "reduce in place", "scatter", "step", "call"),
    *("call without a name", "shutdown"),
)
_EXPECTED: dict[Kind, set[str]] = {
    "kill": {"PeerLostError"},
    "vanish": {"PeerLostError"},
    "stop": {"StalledError"},
    "raise": {"RemoteError"},
    "interrupt": {"RemoteError"},
    "exhaust memory": {"RemoteError", "PeerLostError"},  # Python may raise, or the C library end the process
    "exit": {"ShutDownError"},
}


class Faults:
    name = "faults"
    help = "random faults in jobs of their own: time until the other ranks know, what hangs and what stays"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--count", type=int, default=200, metavar="N", help="how many faults (default: %(default)s)")
        add("--max-ranks", type=int, default=4, metavar="N", help="each job has 2 to N (default: %(default)s)")
        add("--over", type=parse_hosts, default=[], metavar="h1:2,h2:2", help="each job has all slots of these hosts")
        add("--seed", type=int, default=0, metavar="N", help="of what is chosen at random (default: %(default)s)")

    def measure(self, session: Session) -> list[Row]:
        arguments = session.arguments
        hosts = arguments.over
        arguments.over = [str(host) for host in hosts]
        rows: dict[str, Row] = {}
        counts = dict.fromkeys(("hung", "orphans", "leftovers", "unexpected", "stuck launchers", "left daemons"), 0)
        limits = {**_LIMITS, **dict(arguments.option)}
        for injection, place in _choices(arguments.count, arguments.max_ranks, arguments.seed, hosts):
            outcome = run(injection, place, limits, limit_s=60)
            found = _problems(outcome)
            for name, number in found.items():
                counts[name] += number
            # A launcher that never ends, or leaves its daemons, although no rank is left is not ours to mend.
            counts["stuck launchers"] += outcome.returncode is None and not found["hung"]
            counts["left daemons"] += len(outcome.daemons)
            if any(found.values()):
                print(_describe(outcome), file=sys.stderr, flush=True)
            name = injection.kind + (" in init" if injection.phase in _IN_INIT else "")
            row = rows.setdefault(name, Row({"fault": name}, []))
            if outcome.reports and outcome.struck_at is not None:
                row.rounds.append(Round({ringtrain_competitor.NAME: {"seconds": _seconds(outcome, limits)}}))
        problems = sum(counts.values()) - counts["stuck launchers"] - counts["left daemons"]
        session.facts.append({**counts, "problems": problems})
        return sorted(rows.values(), key=lambda row: str(row.key["fault"]))

    def table(self, result: Result) -> list[str]:
        table = Table(["fault", "count", "p50 s", "p99 s", "max s"], first_is_text=True)
        everything: list[float] = []
        for row in result.rows:
            seconds = [one.values[ringtrain_competitor.NAME]["seconds"] for one in row.rounds]
            everything += seconds
            table.add([str(row.key["fault"]), *_quantiles(seconds)])
        table.add(["all", *_quantiles(everything)])
        counts = {name: sum(fact[name] for fact in result.facts) for name in result.facts[0] if name != "problems"}
        note = "seconds from the fault to the last error; from the end of the time limit where that is what noticed it"
        return [*lines_of(table), note, "", ", ".join(f"{count} {name}" for name, count in counts.items())]


def _choices(count: int, max_ranks: int, seed: int, hosts: list[Host]) -> Iterator[tuple[Injection, Place]]:
    generator = random.Random(seed)
    for _ in range(count):
        place = Place(total_slots(hosts), hosts) if hosts else Place(generator.randint(2, max_ranks))
        rank = generator.randrange(place.ranks)
        if generator.random() < 0.15:
            kind = generator.choice([kind for kind in FROM_OUTSIDE if kind != "interrupt"])
            yield Injection(kind, rank).during(generator.choice(_IN_INIT), generator.uniform(0, 0.02)), place
        else:
            phase = generator.choice(_LATER)
            yield Injection(generator.choice(KINDS), rank).during(phase, generator.uniform(0.001, 0.5)), place


def _problems(outcome: Outcome) -> dict[str, int]:
    is_hung = bool(outcome.ranks_left)
    expected = set(_EXPECTED[outcome.injection.kind])
    if outcome.injection.phase in _IN_INIT:
        expected |= {"StalledError", "PeerLostError"}
    if outcome.injection.phase == "shutdown":
        expected = {""}
    errors = {report.error for report in outcome.reports.values()}
    # in init() any launcher may end the job before the others can say anything
    may_be_silent = outcome.injection.phase in _IN_INIT or ends_all(outcome.injection.kind)
    is_silent = bool(outcome.silent()) and not may_be_silent
    unexpected = outcome.struck_at is None or is_silent or not errors <= expected
    return {
        "hung": int(is_hung),
        "orphans": len(outcome.orphans),
        "leftovers": len(outcome.leftovers),
        "unexpected": int(unexpected and not is_hung),
    }


def _seconds(outcome: Outcome, limits: Mapping[str, object]) -> float:
    """From the fault to the last error, but for the time that the options allow a rank that does not answer."""
    limit = "start_timeout_s" if outcome.injection.phase in _IN_INIT else "stall_shutdown_time_s"
    has_waited = any(report.error == "StalledError" for report in outcome.reports.values())
    waited_s = float(str(limits[limit])) if has_waited or outcome.injection.kind == "stop" else 0.0
    return max(0.0, outcome.slowest_s() - waited_s)


def _describe(outcome: Outcome) -> str:
    left = [*outcome.ranks_left, *outcome.orphans, *outcome.daemons, *outcome.leftovers]
    seen = f"status {outcome.returncode}, silent {outcome.silent()}, left {left}"
    reports = [f"  rank {rank}: {report}" for rank, report in outcome.reports.items()]
    head = f"{outcome.injection} of {outcome.place.ranks}: {seen}, struck at {outcome.struck_at}"
    return "\n".join([head, *reports, outcome.output[-3000:]])


def _quantiles(seconds: Sequence[float]) -> list[str]:
    if not seconds:
        return ["0", "", "", ""]
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return [str(len(ordered)), *(f"{value:.2f}" for value in (statistics.median(ordered), p99, ordered[-1]))]
