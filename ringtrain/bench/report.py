"""The report of a result: tables for people, and a PNG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ringtrain.bench.results import Result, Row, Spread
from ringtrain.bench.rounds import state_of

# --- tables -----------------------------------------------------------------------------------------------------------


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


# --- the PNG of a result: lines over the sizes, or bars of the competitors --------------------------------------------


# what a measurement has along an axis is drawn as lines over it: quantity, factor, and the label of both
_AXES = {
    "bytes": ("seconds", 1e6, "us"),
    "ranks": ("messages", 1.0, "messages of the busiest rank"),
    "workers": ("seconds", 1e3, "ms"),
    "predicted ranks": ("efficiency", 1.0, "efficiency, predicted"),
}


def draw(result: Result, path: str) -> None:
    """Write the medians of all competitors, with their smallest and largest values, to a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    has_parts = any("part" in row.key for row in result.rows)  # which have nothing in common
    parts = dict.fromkeys(row.key.get("part") for row in result.rows) or [None]
    panels = [[row for row in result.rows if row.key.get("part") == part] for part in parts]
    figure, grid = pyplot.subplots(len(panels), squeeze=False, figsize=(9, max(5, 2.5 * len(panels))))
    for axes, rows in zip(grid[:, 0], panels, strict=True):
        _draw_panel(axes, rows)
        if has_parts:
            axes.set_title(rows[0].key["part"])
    place = result.environment
    figure.suptitle(f"{result.measurement}, {ranks_text(result)} on {count_text(place['hosts'], 'host')}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_panel(axes: Any, rows: list[Row]) -> None:
    axis = next((name for name in _AXES if len({row.key.get(name) for row in rows}) > 1), None)
    if axis is None:
        _draw_bars(axes, rows)
    else:
        _draw_lines(axes, rows, axis)


def _draw_lines(axes: Any, all_rows: list[Row], axis: str) -> None:
    quantity, factor, label = _AXES[axis]
    for name in dict.fromkeys(name for row in all_rows for name in row.competitors()):
        rows = [row for row in all_rows if name in row.competitors()]
        at = [row.key[axis] for row in rows]
        median, least, most = factor * np.array([row.spread(name, quantity) for row in rows]).T
        axes.plot(at, median, marker="o", label=name)
        axes.fill_between(at, least, most, alpha=0.2)
    axes.set(xscale="log", yscale="log", xlabel=axis, ylabel=label)
    if axis == "workers":
        axes.set(xscale="linear", yscale="linear", xticks=[row.key[axis] for row in all_rows], ylim=(0, None))
    if axis == "predicted ranks":
        axes.set(yscale="linear", ylim=(0, 1.05))
    axes.legend()


def _draw_bars(axes: Any, rows: list[Row]) -> None:
    bars = [(_label(row.key, name), row.spread(name)) for row in rows for name in row.competitors()]
    bars.reverse()  # barh begins at the bottom
    medians = [1e3 * spread.median for _, spread in bars]
    below = [1e3 * (spread.median - spread.least) for _, spread in bars]
    above = [1e3 * (spread.most - spread.median) for _, spread in bars]
    axes.barh([label for label, _ in bars], medians, xerr=(below, above), capsize=3)
    axes.set(xlabel="ms")


def _label(key: dict[str, Any], name: str) -> str:
    whose = [f"rank {key['rank']}"] if "rank" in key else [key["model"]] if "model" in key and "part" not in key else []
    return ", ".join([name, *whose])
