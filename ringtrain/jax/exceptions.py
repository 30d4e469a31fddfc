"""Raises the exceptions of ringtrain again, which JAX turns into its own inside compiled programs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ringtrain import errors as kinds
from ringtrain.engine.handles import report_failure

_OURS = re.compile(r"ringtrain\.(\w+): (.*)", re.DOTALL)


def error_of(error: BaseException) -> Exception | None:
    """The exception of ringtrain that one of JAX's tells of, or None if it tells of something else."""
    # A call of a program that was called before takes a road of JAX's on which every failure is a ValueError.
    found = _OURS.search(str(error)) if isinstance(error, (RuntimeError, ValueError)) else None
    if found is None:
        return None
    kind: type[Exception] = ValueError if found[1] == "ValueError" else getattr(kinds, found[1], kinds.RingtrainError)
    return kind(found[2])


@contextmanager
def errors() -> Iterator[None]:
    """Within it what an operation inside jit has failed with is raised as an exception of ringtrain.

    with hvd.errors():
        loss = step(params, batch)
        loss.block_until_ready()

    JAX goes on before a program has ended, and raises when its results are read: so this must be within, too.

    Raises:
        RingtrainError: such as MismatchError, in the place of a JaxRuntimeError or a ValueError of JAX, its cause.
        ValueError: an operation of this name is in flight.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        ours = None if isinstance(error, kinds.RingtrainError) else error_of(error)
        if ours is None:
            raise
        report_failure(ours)
        raise ours from error
