"""Numbers as people read them, and the names of the parts of a step."""

from __future__ import annotations

from ringtrain.timeline.report.step_parts import Part

PART_NAMES = {
    Part.COMPUTE: "compute",
    Part.HIDDEN: "hidden communication",
    Part.EXPOSED: "exposed communication",
    Part.NEGOTIATION: "negotiation",
    Part.SLOWEST: "waiting for the slowest rank",
}


def percent(share: float) -> str:
    """Of a share from 0 to 1; never 0 % or 100 % for what is only near it."""
    if 0 < share < 0.005:
        return "< 1 %"
    if 0.995 <= share < 1:
        return "> 99 %"
    return f"{share:.0%}".replace("%", " %")


def duration(ns: float) -> str:
    """With three digits, in the unit that suits it."""
    if ns == 0:
        return "0"
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if ns >= size:
            return f"{_three_digits(ns / size)} {unit}"
    return f"{_three_digits(ns / 1e3)} us"


def size(count: int) -> str:
    """Of so many bytes, in units of 1024."""
    for unit, unit_size in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if count >= unit_size:
            whole = count % unit_size == 0
            return f"{count // unit_size if whole else _three_digits(count / unit_size)} {unit}"
    return f"{count} B"


def gb_per_s(value: float) -> str:
    """And in Gbit/s, in which links are sold."""
    return f"{_three_digits(value)} GB/s = {_three_digits(8 * value)} Gbit/s"


def _three_digits(value: float) -> str:
    for limit, digits in ((9.995, 2), (99.95, 1)):
        if value < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"
