"""Errors that leave backward() by way of torch's C++, which keeps their text alone: they get their class back."""

from __future__ import annotations

from collections import deque

_KEPT = 16
# Class and text of errors of operations of groups, the newest first. The error itself would keep the frames that it was
# raised in, and their tensors.
_last: deque[tuple[type[Exception], str]] = deque(maxlen=_KEPT)


def note(error: Exception) -> None:
    """Keep class and text of the error of an operation, in case torch raises its text."""
    _last.appendleft((type(error), str(error)))


def with_class(raised: RuntimeError) -> Exception | None:
    """Returns an error like that of the operation whose text torch has raised, or None."""
    text = str(raised)
    for kind, message in list(_last):
        if f"{kind.__name__}: {message}" in text:
            return kind(message)
    return None
