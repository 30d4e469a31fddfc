"""The figures as one HTML page, made of the template page.html."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

import jinja2
import markupsafe

from ringtrain.timeline.report import charts
from ringtrain.timeline.report.bandwidth import Bandwidth
from ringtrain.timeline.report.figures import Figures, Parts
from ringtrain.timeline.report.format import PART_NAMES, duration, gb_per_s, percent, size
from ringtrain.timeline.report.step_parts import Part
from ringtrain.timeline.report.verdict import Verdict

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
        bars_of_ranks=charts.bars_of_ranks(figures),
        bars_of_steps=charts.bars_of_steps(figures),
        lanes=charts.lanes(figures),
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
    """With `code` between backquotes."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
