"""The PNG of a result: lines over the sizes, or bars of the competitors."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringtrain.bench.report import count_text
from ringtrain.bench.results import Result

# what a measurement has along an axis is drawn as lines over it: quantity, factor, and the label of both
_AXES = {"bytes": ("seconds", 1e6, "us"), "ranks": ("messages", 1.0, "messages of the busiest rank")}


def draw(result: Result, path: str) -> None:
    """Write the medians of all competitors, with their smallest and largest values, to a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    axis = next((name for name in _AXES if len({row.key.get(name) for row in result.rows}) > 1), None)
    if axis is None:
        _draw_bars(axes, result)
    else:
        _draw_lines(axes, result, axis)
    place = result.environment
    axes.set_title(
        f"{result.measurement}, {count_text(place['ranks'], 'rank')} on {count_text(place['hosts'], 'host')}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_lines(axes: Any, result: Result, axis: str) -> None:
    quantity, factor, label = _AXES[axis]
    for name in dict.fromkeys(name for row in result.rows for name in row.competitors()):
        rows = [row for row in result.rows if name in row.competitors()]
        at = [row.key[axis] for row in rows]
        median, least, most = factor * np.array([row.spread(name, quantity) for row in rows]).T
        axes.plot(at, median, marker="o", label=name)
        axes.fill_between(at, least, most, alpha=0.2)
    axes.set(xscale="log", yscale="log", xlabel=axis, ylabel=label)
    axes.legend()


def _draw_bars(axes: Any, result: Result) -> None:
    bars = [(_label(row.key, name), row.spread(name)) for row in result.rows for name in row.competitors()]
    bars.reverse()  # barh begins at the bottom
    medians = [1e3 * spread.median for _, spread in bars]
    below = [1e3 * (spread.median - spread.least) for _, spread in bars]
    above = [1e3 * (spread.most - spread.median) for _, spread in bars]
    axes.barh([label for label, _ in bars], medians, xerr=(below, above), capsize=3)
    axes.set(xlabel="ms")


def _label(key: dict[str, Any], name: str) -> str:
    whose = [f"rank {key['rank']}"] if "rank" in key else [key["model"]] if "model" in key else []
    return ", ".join([name, *whose])
