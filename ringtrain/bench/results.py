"""Results: rows of rounds, the figures that follow from them, and the way to JSON and back."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# competitor -> quantity -> value; times are in seconds
Values = dict[str, dict[str, float]]


class Spread(NamedTuple):
    """Median, smallest and largest of some rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass
class Round:
    """All competitors measured once. `distance_ns`: how far apart the cores were, None where it is not known."""

    values: Values
    distance_ns: float | None = None
    launch: int = 0


@dataclass
class Row:
    """One line of the table: what is measured in it, such as {"bytes": 1024}, and its rounds."""

    key: dict[str, Any]
    rounds: list[Round]

    def competitors(self) -> list[str]:
        return list(dict.fromkeys(name for one in self.rounds for name in one.values))

    def spread(self, competitor: str, quantity: str = "seconds") -> Spread:
        return Spread.of([one.values[competitor][quantity] for one in self.rounds if competitor in one.values])

    def ratio(self, competitor: str, base: str, quantity: str = "seconds") -> Spread:
        """How many times more of the quantity `competitor` has than `base`, in the same round."""
        rounds = [one.values for one in self.rounds if competitor in one.values and base in one.values]
        return Spread.of([values[competitor][quantity] / values[base][quantity] for values in rounds])


@dataclass
class Result:
    """A whole measurement. `facts` has what is measured once in each launch, `notes` what its reader must know."""

    measurement: str
    arguments: dict[str, Any]
    environment: dict[str, Any]
    rows: list[Row]
    facts: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def save(result: Result, path: str) -> None:
    """Write a result as JSON, with the medians and ratios of each row for those who do not want to compute them."""
    document = asdict(result)
    for row, written in zip(result.rows, document["rows"], strict=True):
        written["summary"] = _summary(row)
    Path(path).write_text(json.dumps(document, indent=1) + "\n")


def load(path: str) -> Result:
    document = json.loads(Path(path).read_text())
    rows = [Row(row["key"], [Round(**one) for one in row["rounds"]]) for row in document.pop("rows")]
    return Result(rows=rows, **document)


def merge(launches: Sequence[Result]) -> Result:
    """One result of several launches of the same measurement: all rounds of all launches."""
    first = launches[0]
    rows: dict[str, Row] = {}
    for number, launch in enumerate(launches):
        for row in launch.rows:
            merged = rows.setdefault(json.dumps(row.key), Row(row.key, []))
            merged.rounds += [Round(one.values, one.distance_ns, number) for one in row.rounds]
    facts = [fact for launch in launches for fact in launch.facts]
    notes = list(dict.fromkeys(note for launch in launches for note in launch.notes))
    return Result(first.measurement, first.arguments, first.environment, list(rows.values()), facts, notes)


def _summary(row: Row) -> dict[str, Any]:
    first = row.competitors()[0] if row.rounds else ""
    summary: dict[str, Any] = {}
    for name in row.competitors():
        quantities = {quantity: None for one in row.rounds for quantity in one.values.get(name, {})}
        summary[name] = {quantity: row.spread(name, quantity)._asdict() for quantity in quantities}
        if name != first and "seconds" in quantities:
            summary[name][f"seconds / {first}"] = row.ratio(name, first)._asdict()
    return summary
