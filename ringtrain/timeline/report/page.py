"""The figures as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from ringtrain.timeline.report import charts
from ringtrain.timeline.report.bandwidth import Bandwidth
from ringtrain.timeline.report.figures import Figures, Parts
from ringtrain.timeline.report.format import PART_NAMES, duration, gb_per_s, percent, size
from ringtrain.timeline.report.step_parts import Part
from ringtrain.timeline.report.verdict import Verdict

# A browser would refuse whatever the page might ask for, and shows an empty icon instead of looking for one.
_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title><style>
{style}</style></head><body><main>
"""
_END = "</main></body></html>\n"

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
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    title = f"{figures.file}: where the time of a step goes"
    sections = [
        _HEAD.format(title=escape(title), style=style),
        _top(title, figures, verdict),
        _ranks(figures),
        _steps(figures),
        _median_step(figures),
        _stragglers(figures),
        _bandwidth(figures),
        _operations(figures),
        _definitions(),
        _END,
    ]
    return "\n".join(sections)


def _top(title: str, figures: Figures, verdict: Verdict) -> str:
    advice = "".join(f"<li>{_marked_up(sentence)}</li>" for sentence in verdict.advice)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in figures.notes)
    return (
        f'<h1>{escape(title)}</h1>\n<p class="verdict" id="verdict">{escape(verdict.sentence)}</p>\n'
        f'<ul class="advice">{advice}</ul>\n{notes}{_tiles(figures)}'
    )


def _tiles(figures: Figures) -> str:
    parts = figures.parts
    tiles = {
        "median step": duration(figures.median_step.ns),
        "steps": f"{len(figures.steps)} on {len(figures.ranks)} ranks",
        "compute, with what it hides": percent(parts.share(Part.COMPUTE, Part.HIDDEN)),
        "the script waits": percent(parts.share(Part.EXPOSED, Part.NEGOTIATION, Part.SLOWEST)),
    }
    if figures.bandwidth:
        tiles["bus bandwidth of allreduces"] = gb_per_s(figures.bandwidth.achieved_gb_per_s).partition(" =")[0]
    return '<dl class="tiles">' + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in tiles.items()) + "</dl>"


def _ranks(figures: Figures) -> str:
    count = len(figures.steps)
    head = ["", "step", *(PART_NAMES[part] for part in Part)]
    rows = [["average", *_row_of_parts(figures.parts, count * len(figures.ranks))]]
    for one in figures.ranks:
        name = f"rank {one.rank}" + (f" on {one.host}" if one.host else "")
        rows.append([name, *_row_of_parts(one.parts, count)])
    return (
        _heading("Where the time of a step goes", f"Averaged over {count} steps. The five parts are a whole step.")
        + charts.legend()
        + charts.bars_of_ranks(figures)
        + _table(head, rows)
    )


def _row_of_parts(parts: Parts, count: int) -> list[str]:
    times = parts.as_list()
    return [
        duration(parts.total_ns / count),
        *(f"{duration(times[part] / count)} ({percent(parts.share(part))})" for part in Part),
    ]


def _steps(figures: Figures) -> str:
    what = (
        "Averaged over the ranks. A step goes from one mark of the optimizer to the next; a triangle stands on a step "
        "that is longer than the picture is high."
    )
    return _heading("Step after step", what) + charts.legend() + charts.bars_of_steps(figures)


def _median_step(figures: Figures) -> str:
    step = figures.median_step
    more = "" if len(step.lanes) == len(figures.ranks) else f" The first {len(step.lanes)} ranks are shown."
    what = f"Step {step.number} takes {duration(step.ns)}: half of the steps are shorter.{more}"
    return _heading("The median step", what) + charts.legend() + charts.lanes(figures)


def _stragglers(figures: Figures) -> str:
    count, step_ns = len(figures.steps), figures.mean_step_ns()
    rows = []
    for one in sorted(figures.ranks, key=lambda rank: -rank.kept_waiting_ns):
        cost = one.kept_waiting_ns / count
        often = f"{one.slowest_in_steps} ({percent(one.slowest_in_steps / count)})"
        rows.append([f"rank {one.rank}", one.host, often, duration(cost), percent(cost / step_ns)])
    nobody = sum(step.slowest_rank is None for step in figures.steps)
    what = (
        "A rank is the slowest of a step if the others waited longest for it, and for at least 1 % of the step. "
        f"In {nobody} of {count} steps that was nobody."
    )
    head = ["", "host", "slowest in steps", "keeps the others waiting, each step", "of a step"]
    return _heading("Who is the slowest", what) + _table(head, rows, left=(1,))


def _bandwidth(figures: Figures) -> str:
    bandwidth = figures.bandwidth
    if bandwidth is None:
        return _heading("Bandwidth", "There was no allreduce.")
    rows = []
    lower = ""
    for one in bandwidth.sizes:
        limit = f"up to {size(one.up_to_bytes)}" if one.up_to_bytes else f"more than {lower}"
        lower = size(one.up_to_bytes or 0)
        speeds = [gb_per_s(one.median_gb_per_s), gb_per_s(one.best_gb_per_s)]
        rows.append([limit, str(one.count), duration(one.busy_ns), *speeds])
    head = ["size", "allreduces", "time of all", "median", "best"]
    return _heading("Bandwidth", _told_bandwidth(bandwidth)) + _table(head, rows)


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


def _operations(figures: Figures) -> str:
    count = len(figures.steps)
    rows = []
    for one in figures.operations:
        times = [one.total_ns, one.exposed_ns, one.negotiation_ns, one.slowest_ns]
        name = f"{one.kind} {one.name}"
        rows.append([name, size(one.bytes), one.site, *(duration(ns / count) for ns in times)])
    what = (
        "Time in each step in which the script waits because of this operation, averaged over ranks and steps. Those "
        "that were fused share their time by their bytes."
    )
    waits = [PART_NAMES[part] for part in (Part.EXPOSED, Part.NEGOTIATION, Part.SLOWEST)]
    head = ["operation", "size", "call site", "in all", *waits]
    if not rows:
        return _heading("The most expensive operations", "The script never waited for one.")
    return _heading("The most expensive operations", what) + _table(head, rows, left=(0, 2))


def _definitions() -> str:
    rows = [[PART_NAMES[part], text] for part, text in _DEFINITIONS.items()]
    return (
        "<details><summary>What the parts of a step are</summary>"
        "<p>At each moment a rank is in exactly one of them, so they add up to the step. The first that fits counts, "
        "from the top.</p>"
        f"{_table(['part', 'is'], rows, left=(1,))}</details>"
    )


def _heading(title: str, what: str) -> str:
    return f'<h2>{escape(title)}</h2>\n<p class="faint">{_marked_up(what)}</p>\n'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = ()) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        classes = ['class="left"' if at in left else "" for at in range(len(cells))]
        drawn = (f"<{tag} {css}>{escape(cell)}</{tag}>" for cell, css in zip(cells, classes, strict=True))
        return f"<tr>{''.join(drawn)}</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f'<div class="table"><table><thead>{line(head, "th")}</thead><tbody>\n{body}\n</tbody></table></div>\n'


def _marked_up(text: str) -> str:
    """With `code` between backquotes."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
