"""Tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringtrain.bench.results import Result, Spread
from ringtrain.bench.rounds import state_of


class Table:
    """Columns of text, each as wide as its widest cell. Numbers stand on the right, the first column as it is told."""

    def __init__(self, head: Sequence[str], first_is_text: bool = False) -> None:
        self._rows = [list(head)]
        self._first_is_text = first_is_text

    def add(self, cells: Sequence[str]) -> None:
        self._rows.append(list(cells))

    def lines(self) -> Iterator[str]:
        widths = [max(len(row[column]) for row in self._rows) for column in range(len(self._rows[0]))]
        for row in self._rows:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            if self._first_is_text:
                cells[0] = row[0].ljust(widths[0])
            yield "  ".join(cells).rstrip()


def lines_of(table: Table) -> list[str]:
    return list(table.lines())


def spread_text(spread: Spread, digits: int = 2) -> str:
    return f"{spread.median:.{digits}f} [{spread.least:.{digits}f}-{spread.most:.{digits}f}]"


def milliseconds_text(spread: Spread) -> str:
    return spread_text(Spread(*(1e3 * value for value in spread)))


def heading(result: Result) -> list[str]:
    """The lines that say what was measured, where, and in which state the cores were."""
    place = result.environment
    launches = 1 + max((one.launch for row in result.rows for one in row.rounds), default=0)
    where = f"{ranks_text(result)} on {count_text(place['hosts'], 'host')}"
    words = [where, count_text(place["cpus"], "CPU"), place["mpi"] or "no MPI"]
    words += [f"ringtrain {place['ringtrain']} ({place['simd']})", count_text(launches, "launch", "launches")]
    return [f"{result.measurement}: {', '.join(words)}", *_cores(result), *result.notes, ""]


def ranks_text(result: Result) -> str:
    """On how many ranks it was measured, or on how many at a time."""
    counts = result.arguments.get("num_proc") or [result.environment["ranks"]]
    return count_text(counts[0], "rank") if len(counts) == 1 else f"{', '.join(map(str, counts))} ranks"


def count_text(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _cores(result: Result) -> list[str]:
    distances = [one.distance_ns for row in result.rows for one in row.rounds]
    known = [distance for distance in distances if distance is not None]
    if not known:
        return []
    states = [state_of(distance) for distance in distances]
    seen = [f"{count_text(states.count(state), 'round')} {state}" for state in dict.fromkeys(sorted(states))]
    return [f"cores of ranks 0 and 1: {', '.join(seen)}; round trip {min(known):.0f}-{max(known):.0f} ns"]
