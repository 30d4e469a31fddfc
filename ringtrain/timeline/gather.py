"""Bring the parts of all ranks to rank 0 at the end of a timeline, a few megabytes at a time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from ringtrain import objects, ops
from ringtrain.errors import RingtrainError
from ringtrain.job import session
from ringtrain.timeline.files import events_in, part_of
from ringtrain.timeline.merge import unfinished, write_merged

_PIECE_BYTES = 4 << 20


def bring_together(path: Path) -> None:
    """Make one file of the parts of all ranks, at `path` on rank 0, and remove the others. All ranks call it together.

    Raises:
        RingtrainError: rank 0 cannot write it, which all ranks are told, or another rank is gone; the parts stay as
            they are.
    """
    own = part_of(path, session.rank())
    own_bytes = own.stat().st_size if session.rank() > 0 and own.exists() else 0
    pieces = _pieces_of_others(own, ops.allgather(np.array([own_bytes])))
    problem = None
    if session.rank() == 0:
        try:
            _write(path, pieces)
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or str(error)
    for _ in pieces:  # also where rank 0 has given up: the others send all that they have
        pass
    problem = objects.broadcast_object(problem)
    if problem is not None:
        raise RingtrainError(f"rank 0 cannot make one file of the parts of {path}, which stay as they are: {problem}")
    if session.rank() != 0:
        own.unlink(missing_ok=True)  # rank 0 may have begun the next timeline


def _write(path: Path, pieces: Iterator[tuple[int, bytes]]) -> None:
    with unfinished(path) as whole, open(path, "rb") as own:
        others = (events_in(_lines(piece for _, piece in part)) for _, part in itertools.groupby(pieces, itemgetter(0)))
        write_merged(whole, itertools.chain([events_in(own)], others))
        os.replace(whole, path)


def _pieces_of_others(own: Path, lengths: Any) -> Iterator[tuple[int, bytes]]:
    """The parts of all ranks, laid end to end: on rank 0 pieces of them and whose they are, in order.

    Nothing comes on the other ranks, which send in the meantime. So all of them have to ask until the end.

    Args:
        lengths: how many bytes each rank sends; rank 0 none, since its part is there.
    """
    rank, size = session.rank(), session.size()
    first, end = int(lengths[:rank].sum()), int(lengths[: rank + 1].sum())
    with open(own if first < end else os.devnull, "rb") as file:
        for begin in range(0, int(lengths.sum()), _PIECE_BYTES):
            of_own = range(max(begin, first), min(begin + _PIECE_BYTES, end))
            sent = np.frombuffer(file.read(len(of_own)), np.uint8)
            received, counts = ops.alltoall(sent, [sent.size] + [0] * (size - 1))
            place = 0
            for sender in np.flatnonzero(counts):
                yield int(sender), received[place : place + counts[sender]].tobytes()
                place += counts[sender]


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    yield rest
