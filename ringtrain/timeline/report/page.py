"""The figures as one HTML page, made of the template page.html."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from statistics import median
from typing import NamedTuple

import jinja2
import markupsafe

from ringtrain.timeline.report.figures import (
    PART_NAMES,
    Bandwidth,
    Figures,
    Lane,
    Parts,
    StepFigures,
    Verdict,
    duration,
    gb_per_s,
    percent,
    size,
)
from ringtrain.timeline.report.trace import Part

# --- charts -----------------------------------------------------------------------------------------------------------
# Pictures of the figures as shapes: bars of the ranks, bars of the steps, and one step as it went. page.html makes
# inline SVG of them. Colours are classes p0 to p4, one for each Part; style.css has them for light and dark. All that
# a picture shows is in a table too, or in the title of what is pointed at.


_WIDTH = 960
_LEFT = 88  # for names and the scale
_ROW = 30
_MOST_ROWS = 17
_MOST_COLUMNS = 200
_STEPS_HEIGHT = 220
_TALLEST = 3  # times the median: longer steps are cut off, or nothing else could be seen
_FINEST = 1600  # pieces of a lane are at least this fraction of it


class Shape(NamedTuple):
    """An element of SVG."""

    tag: str
    attributes: dict[str, str]
    text: str = ""
    children: Sequence[Shape] = ()


class Chart(NamedTuple):
    height: float
    label: str
    shapes: list[Shape]
    width: int = _WIDTH


def bars_of_ranks(figures: Figures) -> Chart:
    """A bar for the average and one for each rank: where a step goes, in shares of it."""
    rows = [("average", figures.parts), *((f"rank {one.rank}", one.parts) for one in figures.ranks)][:_MOST_ROWS]
    drawn: list[Shape] = [_bar(name, parts, at * _ROW) for at, (name, parts) in enumerate(rows)]
    return Chart(len(rows) * _ROW, "Where a step goes, of each rank", drawn)


def _bar(name: str, parts: Parts, top: float) -> Shape:
    drawn: list[Shape] = [_text(_LEFT - 10, top + 19, name, "end")]
    left = float(_LEFT)
    for part in Part:
        share = parts.share(part)
        width = share * (_WIDTH - _LEFT)
        drawn += _rect(left, top + 3, width, _ROW - 6, part)
        if width > 44:
            drawn.append(_text(left + width / 2, top + 19, percent(share), "middle", f"on p{part.value}"))
        left += width
    return _group(f"{name}: {_told(parts)}", drawn)


def bars_of_steps(figures: Figures) -> Chart:
    """A stacked bar for each step, or for as many neighbours together as fit, averaged over the ranks."""
    together = -(-len(figures.steps) // _MOST_COLUMNS)
    chunks = [figures.steps[at : at + together] for at in range(0, len(figures.steps), together)]
    means = [_mean_ns(chunk, figures) for chunk in chunks]
    top_ns = min(max(means), _TALLEST * median(means)) * 1.05
    column = (_WIDTH - _LEFT) / len(chunks)
    drawn = [*_scale(top_ns)]
    for at, (chunk, mean_ns) in enumerate(zip(chunks, means, strict=True)):
        drawn.append(_column(chunk, mean_ns, top_ns, (_LEFT + at * column, column)))
    first, last = figures.steps[0].number, figures.steps[-1].number
    drawn.append(_text(_LEFT, _STEPS_HEIGHT + 18, f"step {first}", "start", "faint"))
    drawn.append(_text(_WIDTH, _STEPS_HEIGHT + 18, f"step {last}", "end", "faint"))
    label = "Time of each step" if together == 1 else f"Time of a step, {together} neighbours averaged"
    return Chart(_STEPS_HEIGHT + 24, label, drawn)


def _mean_ns(steps: Sequence[StepFigures], figures: Figures) -> float:
    return sum(step.parts.total_ns for step in steps) / len(steps) / len(figures.ranks)


def _scale(top_ns: float) -> Iterator[Shape]:
    for tick in _ticks(top_ns):
        y = _STEPS_HEIGHT * (1 - tick / top_ns)
        yield Shape("line", {"class": "grid", "x1": f"{_LEFT}", "x2": f"{_WIDTH}", "y1": f"{y:.1f}", "y2": f"{y:.1f}"})
        yield _text(_LEFT - 10, y + 4, _short(tick), "end", "faint")


def _ticks(top_ns: float) -> list[float]:
    """Three to seven round times from 0 to the top."""
    power = 10 ** math.floor(math.log10(top_ns))
    between = next(power * part for part in (0.2, 0.5, 1, 2) if top_ns / (power * part) < 7)
    return [between * count for count in range(math.ceil(top_ns / between))]


def _column(steps: Sequence[StepFigures], mean_ns: float, top_ns: float, place: tuple[float, float]) -> Shape:
    left, width = place
    height = mean_ns / top_ns
    gap = min(1.0, width / 6)
    parts = Parts(*map(sum, zip(*(step.parts.as_list() for step in steps), strict=True)))
    numbers = f"step {steps[0].number}" + (f" to {steps[-1].number}" if len(steps) > 1 else "")
    drawn: list[Shape] = []
    bottom = 0.0
    for part in Part:
        share = min(height * parts.share(part), 1 - bottom)
        y = _STEPS_HEIGHT * (1 - bottom - share)
        drawn += _rect(left, y, width - gap, _STEPS_HEIGHT * share, part)
        bottom += share
    if height > 1:
        drawn.append(_cut(left, width))
    return _group(f"{numbers}: {duration(mean_ns)}; {_told(parts)}", drawn)


def _short(tick: float) -> str:
    """A round time without the digits that say nothing."""
    number, _, unit = duration(tick).partition(" ")
    return f"{float(number):g} {unit}" if unit else number


def lanes(figures: Figures) -> Chart:
    """The median step as it went: what each rank did when."""
    shown = figures.median_step.lanes
    begin = min(lane.pieces[0][0] for lane in shown)
    end = max(lane.pieces[-1][1] for lane in shown)
    drawn = [shape for at, lane in enumerate(shown) for shape in _lane(lane, begin, end, at * _ROW)]
    bottom = len(shown) * _ROW
    for tick in _ticks(end - begin):
        x = _LEFT + (_WIDTH - _LEFT) * tick / (end - begin)
        anchor = "end" if x > _WIDTH - _LEFT / 2 else "middle" if tick else "start"
        drawn.append(_text(x, bottom + 16, _short(tick), anchor, "faint"))
    return Chart(bottom + 22, f"The ranks in step {figures.median_step.number}", drawn)


def _lane(lane: Lane, begin: int, end: int, top: float) -> Iterator[Shape]:
    scale = (_WIDTH - _LEFT) / (end - begin)
    yield _text(_LEFT - 10, top + 19, f"rank {lane.rank}", "end")
    for piece_begin, piece_end, part in _coarser(lane.pieces, (end - begin) // _FINEST):
        rect = _rect(_LEFT + (piece_begin - begin) * scale, top + 3, (piece_end - piece_begin) * scale, _ROW - 6, part)
        title = f"rank {lane.rank}: {PART_NAMES[Part(part)]}, {duration(piece_end - piece_begin)}"
        yield _group(title, rect)


def _coarser(pieces: Sequence[tuple[int, int, int]], finest_ns: int) -> list[tuple[int, int, int]]:
    """Merges pieces too short to be seen with the piece before."""
    kept: list[tuple[int, int, int]] = []
    for piece in pieces:
        if kept and (piece[1] - piece[0] < finest_ns or piece[2] == kept[-1][2]):
            kept[-1] = (kept[-1][0], piece[1], kept[-1][2])
        else:
            kept.append(piece)
    return kept


def _told(parts: Parts) -> str:
    return ", ".join(f"{PART_NAMES[part]} {percent(parts.share(part))}" for part in Part)


def _group(title: str, shapes: Sequence[Shape]) -> Shape:
    """Returns it with a title, which the pointer shows."""
    return Shape("g", {}, children=[Shape("title", {}, title), *shapes])


def _rect(x: float, y: float, width: float, height: float, part: int) -> list[Shape]:
    """None where it could not be seen."""
    if width < 0.01 or height < 0.01:
        return []
    place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{width:.2f}", "height": f"{height:.2f}"}
    return [Shape("rect", {"class": f"p{int(part)}", **place})]


def _text(x: float, y: float, text: str, anchor: str, css: str = "") -> Shape:
    return Shape("text", {"class": css, "x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}, text)


def _cut(left: float, width: float) -> Shape:
    """A triangle on a column that is higher than the picture."""
    return Shape("path", {"class": "cut", "d": f"M{left:.1f} 8 l{width / 2:.1f} -8 l{width / 2:.1f} 8z"})


# --- the page ---------------------------------------------------------------------------------------------------------


_DEFINITIONS = {
    Part.COMPUTE: "The script does not wait for ringtrain, and nothing is communicated. That is all that is not "
    "ringtrain: the model, the update, loading data, evaluating.",
    Part.HIDDEN: "The script does not wait, and communication goes on behind its compute. It costs no time, unless it "
    "takes processor time or memory bandwidth from the compute.",
    Part.EXPOSED: "The script waits while something is communicated.",
    Part.NEGOTIATION: "The script waits for something that all ranks have submitted and that has not begun: the ranks "
    "agree on it, or it waits for its turn, or the script is about to wake up.",
    Part.SLOWEST: "The script waits, and all that it waits for has still to be submitted by some other rank.",
}


def page(figures: Figures, verdict: Verdict) -> str:
    """The whole page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ringtrain.timeline", "report"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["code"] = lambda text: markupsafe.Markup(_marked_up(text))
    return environment.get_template("page.html").render(
        title=f"{figures.file}: where the time of a step goes",
        figures=figures,
        verdict=verdict,
        tiles=_tiles(figures),
        bars_of_ranks=bars_of_ranks(figures),
        bars_of_steps=bars_of_steps(figures),
        lanes=lanes(figures),
        shares=list(_shares(figures)),
        median_step=_told_median_step(figures),
        stragglers=list(_stragglers(figures)),
        bandwidth=_told_bandwidth(figures.bandwidth) if figures.bandwidth else "",
        speeds=list(_speeds(figures.bandwidth)) if figures.bandwidth else [],
        operations=list(_operations(figures)),
        definitions=[[PART_NAMES[part], text] for part, text in _DEFINITIONS.items()],
        PART_NAMES=PART_NAMES,
        Part=Part,
    )


def _tiles(figures: Figures) -> dict[str, str]:
    parts = figures.parts
    tiles = {
        "median step": duration(figures.median_step.ns),
        "steps": f"{len(figures.steps)} on {len(figures.ranks)} ranks",
        "compute, with what it hides": percent(parts.share(Part.COMPUTE, Part.HIDDEN)),
        "the script waits": percent(parts.share(Part.EXPOSED, Part.NEGOTIATION, Part.SLOWEST)),
    }
    if figures.bandwidth:
        tiles["bus bandwidth of allreduces"] = gb_per_s(figures.bandwidth.achieved_gb_per_s).partition(" =")[0]
    return tiles


def _shares(figures: Figures) -> Iterator[list[str]]:
    count = len(figures.steps)
    yield ["average", *_row_of_parts(figures.parts, count * len(figures.ranks))]
    for one in figures.ranks:
        name = f"rank {one.rank}" + (f" on {one.host}" if one.host else "")
        yield [name, *_row_of_parts(one.parts, count)]


def _row_of_parts(parts: Parts, count: int) -> list[str]:
    times = parts.as_list()
    return [
        duration(parts.total_ns / count),
        *(f"{duration(times[part] / count)} ({percent(parts.share(part))})" for part in Part),
    ]


def _told_median_step(figures: Figures) -> str:
    step = figures.median_step
    more = "" if len(step.lanes) == len(figures.ranks) else f" The first {len(step.lanes)} ranks are shown."
    return f"Step {step.number} takes {duration(step.ns)}: half of the steps are shorter.{more}"


def _stragglers(figures: Figures) -> Iterator[list[str]]:
    count, step_ns = len(figures.steps), figures.mean_step_ns()
    for one in sorted(figures.ranks, key=lambda rank: -rank.kept_waiting_ns):
        cost = one.kept_waiting_ns / count
        often = f"{one.slowest_in_steps} ({percent(one.slowest_in_steps / count)})"
        yield [f"rank {one.rank}", one.host, often, duration(cost), percent(cost / step_ns)]


def _speeds(bandwidth: Bandwidth) -> Iterator[list[str]]:
    lower = ""
    for one in bandwidth.sizes:
        limit = f"up to {size(one.up_to_bytes)}" if one.up_to_bytes else f"more than {lower}"
        lower = size(one.up_to_bytes or 0)
        speeds = [gb_per_s(one.median_gb_per_s), gb_per_s(one.best_gb_per_s)]
        yield [limit, str(one.count), duration(one.busy_ns), *speeds]


def _told_bandwidth(bandwidth: Bandwidth) -> str:
    achieved, best = bandwidth.achieved_gb_per_s, bandwidth.best_gb_per_s
    sentences = [
        f"Bus bandwidth as in nccl-tests, 2(n-1)/n times bytes / time. The {bandwidth.allreduces} allreduces together "
        f"reach {gb_per_s(achieved)}. The best single one of them, of {size(bandwidth.best_bytes)}, reached "
        f"{gb_per_s(best)}: that is the most that this timeline has seen, not what the hardware can do. All together "
        f"use {percent(achieved / best)} of it."
    ]
    if bandwidth.link_used is not None:
        sentences.append(
            f"Between the {bandwidth.hosts} hosts they use {percent(bandwidth.link_used)} of a link of "
            f"{bandwidth.link_gbit_per_s:g} Gbit/s, which was given with --link-gbit."
        )
    elif bandwidth.hosts == 1:
        sentences.append("All ranks are on one host, so this is its memory, not a network.")
    else:
        sentences.append(
            "The timeline does not know how fast the links are; --link-gbit compares with what `ringrun --check` says."
        )
    return " ".join(sentences)


def _operations(figures: Figures) -> Iterator[list[str]]:
    count = len(figures.steps)
    for one in figures.operations:
        times = [one.total_ns, one.exposed_ns, one.negotiation_ns, one.slowest_ns]
        yield [f"{one.kind} {one.name}", size(one.bytes), one.site, *(duration(ns / count) for ns in times)]


def _marked_up(text: str) -> str:
    """Marks up `code` between backquotes."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
