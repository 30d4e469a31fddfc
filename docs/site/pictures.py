"""Draws the pictures of the examples, docs/pictures/NAME.svg, of what an example prints:

ringrun -np 2 python examples/torch_digits.py | python docs/site/pictures.py torch_digits

Lines with a loss become a curve, and one of the accuracy if they have it; other output is shown as it is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
PREFIX = re.compile(r"^\[[^\]]*\] ", re.MULTILINE)
PLACE = re.compile(r"^(epoch|step|second|Iter #) *(\d+):")
VALUES = {"loss": re.compile(r"loss:? ([\d.]+)"), "accuracy": re.compile(r"accuracy[ =]([\d.]+)")}
WIDTH, HEIGHT, LEFT, RIGHT, TOP = 560, 220, 60, 36, 40
COLOURS = {"loss": "#2f6de0", "accuracy": "#c2410c"}


def picture_of(printed: str) -> str:
    lines = PREFIX.sub("", printed).splitlines()
    told = [(PLACE.match(line), line) for line in lines]
    unit = next((place[1] for place, _ in told if place), "")
    curves = {
        name: [(int(place[2]), float(found[1])) for place, line in told if place and (found := value.search(line))]
        for name, value in VALUES.items()
    }
    curves = {name: points for name, points in curves.items() if len(points) > 1}
    return chart(unit, curves) if curves else text(lines)


def chart(unit: str, curves: dict[str, list[tuple[int, float]]]) -> str:
    """Side by side, each with its own axis, from 0 on."""
    each = WIDTH // len(curves)
    parts = [part for place, name in enumerate(curves) for part in curve(name, unit, curves[name], place * each, each)]
    return svg(HEIGHT, parts)


def curve(name: str, unit: str, points: Sequence[tuple[int, float]], left: int, width: int) -> list[str]:
    first, last = points[0][0], points[-1][0]
    highest = max(value for _, value in points) if name == "loss" else 1.0
    inner, bottom = width - LEFT - RIGHT, HEIGHT - 40

    def at(place: int, value: float) -> tuple[float, float]:
        x = left + LEFT + inner * (place - first) / (last - first)
        return round(x, 1), round(bottom - (bottom - TOP) * value / highest, 1)

    dots = [at(*point) for point in points]
    colour = COLOURS[name]
    return [
        label(left + LEFT, TOP - 16, name, "start"),
        f'<path d="M{left + LEFT} {TOP}V{bottom}H{left + width - RIGHT}" fill="none" stroke="#9aa5b1"/>',
        *(label(left + LEFT - 6, at(first, value)[1] + 4, f"{value:.3g}", "end") for value in (0, highest)),
        *(label(at(place, 0)[0], bottom + 16, f"{unit} {place}", "middle") for place in (first, last)),
        f'<polyline points="{" ".join(f"{x},{y}" for x, y in dots)}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in dots),
    ]


def text(lines: list[str]) -> str:
    style = 'style="font: 12px monospace" fill="#1f2933" xml:space="preserve"'
    rows = [f'<text x="12" y="{22 + 18 * row}" {style}>{escape(line[:78])}</text>' for row, line in enumerate(lines)]
    return svg(18 * len(lines) + 16, rows)


def label(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" style="font: 12px sans-serif" fill="#1f2933">{words}</text>'


def svg(height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>\n"])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{sys.argv[1]}.svg").write_text(picture_of(sys.stdin.read()))
