"""Docstrings of operations that are like another one, whose arguments, results and errors are written once."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

_LIKE = re.compile(r".*\b[Aa]s `(?:ringtrain\.)?(\w+)`")  # in the first line
_SECTION = re.compile(r"^( *)(Args|Returns|Raises|Examples):\n", re.MULTILINE)
_ENTRY = re.compile(r"^( *)(\w[\w, ]*): .*\n(?:\1 .*\n)*", re.MULTILINE)


def complete(functions: Mapping[str, Any], homes: Mapping[str, Any]) -> None:
    """Gives each function whose first line says "as `other`" what it lacks of the Args, Returns and Raises of `other`.

    Args:
        functions: the names of a module. An argument or an error that a function describes itself stays its own.
        homes: the names among which `other` is.
    """
    for name, function in functions.items():
        like = _LIKE.match(function.__doc__ or "") if isinstance(function, FunctionType) else None
        other = homes.get(like[1]) if like is not None else None
        if other is not None and other is not function and other.__doc__:
            function.__doc__ = "".join(_completed(function, other.__doc__, "_async" in name))


def _completed(function: FunctionType, other: str, is_async: bool) -> Iterator[str]:
    about, own, _ = _parts(function.__doc__ or "")
    _, others, margin = _parts(other)  # which Python 3.13 has removed
    yield f"{about.rstrip()}\n"
    code: CodeType = inspect.unwrap(function).__code__
    arguments = _entries(others.get("Args", "")) | _entries(own.get("Args", ""))
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    handle = f"{margin}    A Handle: `synchronize` waits for it, and returns the result.\n"
    sections = {
        "Args": "".join(arguments[name] for name in names),
        "Returns": own.get("Returns") or (handle if is_async else others.get("Returns")),
        "Raises": "".join((_entries(others.get("Raises", "")) | _entries(own.get("Raises", ""))).values()),
        "Examples": own.get("Examples"),
    }
    for title, text in sections.items():
        if text:
            yield f"\n{margin}{title}:\n{text.rstrip()}\n"


@functools.cache
def _parts(doc: str) -> tuple[str, dict[str, str], str]:
    """Returns what comes before the first section, the sections by their titles, and how far these are indented."""
    about, *parts = _SECTION.split(f"{doc}\n")
    return about, dict(zip(parts[1::3], parts[2::3], strict=True)), parts[0] if parts else ""


@functools.cache
def _entries(section: str) -> dict[str, str]:
    return {match[2]: match[0] for match in _ENTRY.finditer(section)}
