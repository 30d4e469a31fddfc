"""Bring together the parts of a job that was killed, after it."""

from __future__ import annotations

from pathlib import Path

from ringtrain.timeline.parts import other_parts, write_merged
from ringtrain.timeline.report.trace import is_empty, ranks_of


def merge(path: Path) -> int:
    """Make one file of the parts, and leave a file alone that has several ranks already.

    Returns:
        How many ranks the file has then.

    Raises:
        OSError: there is no such file.
        TraceError: it is empty or no timeline, or one of its parts is none; all of them stay as they are.
    """
    ranks = ranks_of(path)
    if not ranks:
        raise is_empty(path)
    if len(ranks) > 1:
        return len(ranks)
    others = other_parts(path)
    for part in others:
        ranks |= ranks_of(part)
    if others or _is_cut(path):
        write_merged(path, [path.read_bytes(), *(part.read_bytes() for part in others)])
    for part in others:
        part.unlink()
    return len(ranks)


def _is_cut(path: Path) -> bool:
    """Whether the rank was killed while it wrote, so that viewers could not read the end."""
    return not path.read_bytes().rstrip().endswith(b"]")
