"""The options: what they are stands in one table in the core; here are the ways to set them.

A keyword of `init()` beats the environment variable `RINGTRAIN_<NAME>`, which beats Horovod's variable for the same
knob, which beats the default.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ringtrain import _core


class Option(NamedTuple):
    """One row of the table: numbers have a range, choices a list whose first element is the default, others neither."""

    name: str
    alias: str
    alias_factor: float
    type: str
    default: float | str
    minimum: float
    maximum: float
    choices: list[str]
    meaning: str


_SWITCH = {True: "on", False: "off"}
_RANGES_IN_WORDS = {"steps": "steps such as 100-110", "text": "a path"}
TABLE = [Option(**row) for row in _core.option_table()]


def environment_name(name: str) -> str:
    """The environment variable of an option: RINGTRAIN_FUSION_THRESHOLD_MB for fusion_threshold_mb."""
    return f"RINGTRAIN_{name.upper()}"


def resolve(keywords: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The value of every option, as text for the core.

    Raises:
        TypeError: a keyword that is no option.
        ValueError: a value out of range; the message says where it was set.
    """
    known = {option.name for option in TABLE}
    for name in keywords:
        if name not in known:
            raise TypeError(f"init() has no option {name!r}; the options are {', '.join(sorted(known))}")
    return {option.name: _resolve_one(option, keywords, environ) for option in TABLE}


def set_by_user(keywords: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the options that do not have their default, or have it by choice."""
    return [
        option.name
        for option in TABLE
        if option.name in keywords or environment_name(option.name) in environ or option.alias in environ
    ]


def read_tuned(settings: Mapping[str, str], fixed: Collection[str]) -> dict[str, str]:
    """What a former job has found and written to `autotune_file`, but for what is fixed; nothing if there is no file.

    Raises:
        ValueError: the file holds anything else.
    """
    path = settings["autotune_file"]
    if not path or not os.path.exists(path):
        return {}
    with open(path) as file:
        entries = [line.strip().partition("=") for line in file if line.strip()]
    tuned = {name: value for name, _, value in entries}
    for name, value in tuned.items():
        try:
            _core.check_option(name, value)
        except ValueError as error:
            raise ValueError(f"{error} (from {path}, which autotune_file names)") from None
    return {"autotune": "off"} | {name: value for name, value in tuned.items() if name not in fixed}


def _resolve_one(option: Option, keywords: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    variable = environment_name(option.name)
    if option.name in keywords:
        value = keywords[option.name]
        text = _SWITCH[value] if isinstance(value, bool) and option.choices else str(value)
        origin = "given to init()"
    elif variable in environ:
        text, origin = environ[variable], f"from {variable}"
    elif option.alias and option.alias in environ:
        text, origin = _from_alias(option, environ[option.alias]), f"from {option.alias}={environ[option.alias]}"
    else:
        return str(option.default)
    try:
        _core.check_option(option.name, text)
    except ValueError as error:
        raise ValueError(f"{error} ({origin})") from None
    return text


def _from_alias(option: Option, text: str) -> str:
    """The alias in our unit; what does not fit is left for the check to refuse."""
    if option.choices:
        return {"0": "off", "1": "on"}.get(text, text)
    if option.type != "number":
        return text
    try:
        return repr(float(text) * option.alias_factor)
    except ValueError:
        return text


def markdown() -> str:
    """The table as docs/options.md has it."""
    lines = ["| option | default | range | Horovod's variable | meaning |", "| --- | --- | --- | --- | --- |"]
    for option in TABLE:
        if option.type == "number":
            default, values = f"{option.default:g}", f"{option.minimum:g} to {option.maximum:g}"
        elif option.type == "choice":
            default, values = str(option.default), ", ".join(option.choices)
        else:
            default, values = "none", _RANGES_IN_WORDS[option.type]
        alias = f"`{option.alias}`" if option.alias else ""
        lines.append(f"| `{option.name}` | {default} | {values} | {alias} | {option.meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print("# Options\n\nGenerated from the table in the core by `make docs`.\n")
    print(__doc__.split("\n\n", 1)[1])
    print(markdown(), end="")
