"""The PNG of a result: lines over the sizes, or bars of the competitors."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringtrain.bench.report import count_text, ranks_text
from ringtrain.bench.results import Result, Row

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
