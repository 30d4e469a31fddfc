"""The options: what they are stands in one table in the core; here are the ways to set them.

A keyword of `init()` beats the environment variable `RINGTRAIN_<NAME>`, which beats Horovod's or MXNet's variable
for the same knob, which beats the default. On and off may also be 1 and 0, true and false, yes and no.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import ringtrain._core as _core
from ringtrain.options import horovod_variables


class Option(NamedTuple):
    """One row of the table: numbers have a range, choices a list whose first element is the default, rates a list of
    words of which the first is the default, others neither."""

    name: str
    alias: str
    alias_factor: float
    type: str
    default: float | str
    minimum: float
    maximum: float
    choices: list[str]
    meaning: str

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off, for which there are more words: 1 and 0, true and false, ..."""
        return sorted(self.choices) == ["off", "on"]


# asks Horovod for a timeline that start_timeline begins, which needs no asking here
_NO_FILE_YET = ("HOROVOD_TIMELINE", "DYNAMIC")
_RANGES_IN_WORDS = {
    "steps": "steps such as 100-110",
    "rates": "off, auto, or numbers such as 1000,1000,100",
    "text": "any text",
}
TABLE = [Option(**row) for row in _core.option_table()]
# For tests and experiments of developers; docs/options.md leaves them out.
_OF_DEVELOPERS = {"kv_outbox_mb", "simd"}
# Options that are no more, and why they are not needed.
GONE = {
    "kv_resend_ms": "TCP sends again what is lost",
    "kv_drop_percent": "TCP drops nothing",
}


def environment_name(name: str) -> str:
    """The environment variable of an option: RINGTRAIN_FUSION_THRESHOLD_MB for fusion_threshold_mb."""
    return f"RINGTRAIN_{name.upper()}"


def resolve(keywords: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The value of every option, as text for the core.

    Raises:
        TypeError: a keyword that is not an option.
        ValueError: a value out of range; the message says where it was set.
    """
    known = {option.name for option in TABLE}
    for name in keywords:
        if name not in known and name not in GONE:
            near = _nearest(name, known)
            nearly = [near] if near else sorted(option for option in known if option.startswith(f"{name.lower()}_"))
            words = " or ".join(map(repr, nearly))
            remedy = f"did you mean {words}?" if nearly else f"the options are {', '.join(sorted(known))}"
            raise TypeError(f"init() has no option {name!r}; {remedy}")
    implied = horovod_variables.options_of(environ)
    return {option.name: _resolve_one(option, keywords, environ, implied) for option in TABLE}


def gone(keywords: Collection[str]) -> list[str]:
    """A sentence for each keyword that is an option no more."""
    return [f"the option {name} has no effect any more: {GONE[name]}" for name in keywords if name in GONE]


def _nearest(name: str, known: Collection[str]) -> str | None:
    import difflib  # slow, and only an unknown name needs it

    found = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.8)
    return found[0] if found else None


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each environment variable that is nearly the name of an option, or that of one that is gone."""
    known = {option.name: environment_name(option.name) for option in TABLE}
    prefix = environment_name("")
    sentences = []
    for variable in environ:
        if not variable.upper().startswith(prefix) or variable in known.values():
            continue
        name = variable[len(prefix) :].lower()
        near = _nearest(name, known)
        if name in GONE:
            sentences.append(f"{variable} has no effect any more: {GONE[name]}")
        elif near:
            sentences.append(f"{variable} has no effect: there is no such option; did you mean {known[near]}?")
    return sentences


def set_by_user(keywords: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the options that do not have their default, or have it by choice."""
    implied = horovod_variables.options_of(environ)
    return [
        option.name
        for option in TABLE
        if option.name in keywords
        or environment_name(option.name) in environ
        or option.alias in environ
        or option.name in implied
    ]


def differing(keywords: Mapping[str, Any], settings: Mapping[str, str]) -> list[str]:
    """Names of the options whose value among the keywords is not that in `settings`. Raises as `resolve` does."""
    wanted = resolve({name: value for name, value in keywords.items() if name not in GONE})
    numbers = {option.name for option in TABLE if option.type == "number"}
    return [
        name
        for name in keywords
        if name in wanted
        and (float(wanted[name]) != float(settings[name]) if name in numbers else wanted[name] != settings[name])
    ]


def read_tuned(settings: Mapping[str, str], fixed: Collection[str], found: str = "") -> dict[str, str]:
    """Returns what a former job wrote to `autotune_file`, except what is fixed; nothing if there is no file.

    Without a file, what autotune has `found` in this process.

    Raises:
        ValueError: the file holds anything else.
    """
    path = settings["autotune_file"]
    if path and os.path.exists(path):
        with open(path) as file:
            found = file.read()
    elif not found or settings["autotune"] == "off":
        return {}
    entries = [line.strip().partition("=") for line in found.splitlines() if line.strip()]
    tuned = {name: value for name, _, value in entries}
    for name, value in tuned.items():
        try:
            _core.check_option(name, value)
        except ValueError as error:
            raise ValueError(f"{error} (from {path}, which autotune_file names)") from None
    return {"autotune": "off"} | {name: value for name, value in tuned.items() if name not in fixed}


def _resolve_one(
    option: Option,
    keywords: Mapping[str, Any],
    environ: Mapping[str, str],
    implied: Mapping[str, tuple[str, str]],
) -> str:
    variable = environment_name(option.name)
    if option.name in keywords:
        text, origin = str(keywords[option.name]), "given to init()"
    elif variable in environ:
        text, origin = environ[variable], f"from {variable}"
    elif option.name in implied:
        text, origin = implied[option.name]
    elif option.alias and option.alias in environ:
        text, origin = _from_alias(option, environ[option.alias]), f"from {option.alias}={environ[option.alias]}"
    else:
        return str(option.default)
    if option.choices:
        text = horovod_variables.as_switch(text) if option.is_switch else text.lower()
    try:
        _core.check_option(option.name, text)
    except ValueError as error:
        raise ValueError(f"{error} ({origin})") from None
    return text


def _from_alias(option: Option, text: str) -> str:
    """The alias in our unit; what does not fit is left for the check to refuse.

    As in Horovod nothing is 0, and 0 is "as soon as can be" where only more than that is possible here.
    """
    if not text.strip() and (option.type == "number" or option.is_switch):
        text = "0"
    if option.type != "number":
        return "" if (option.alias, text) == _NO_FILE_YET else text
    try:
        value = float(text) * option.alias_factor
    except ValueError:
        return text
    return repr(option.minimum if value == 0 else value)


def _plain(number: float) -> str:
    """Returns a number without an exponent: 1048576, 0.05."""
    return f"{number:.0f}" if number.is_integer() else f"{number:g}"


def markdown() -> str:
    """The table as docs/options.md has it, which leaves out what is for developers."""
    lines = [
        "| option | default | range | Horovod's or MXNet's variable | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for option in TABLE:
        if option.name in _OF_DEVELOPERS:
            continue
        if option.type == "number":
            default, values = _plain(float(option.default)), f"{_plain(option.minimum)} to {_plain(option.maximum)}"
        elif option.type == "choice":
            default, values = str(option.default), ", ".join(option.choices)
        else:
            default, values = str(option.default) or "none", _RANGES_IN_WORDS[option.type]
        alias = f"`{option.alias}`" if option.alias else ""
        lines.append(f"| `{option.name}` | {default} | {values} | {alias} | {option.meaning} |")
    return "\n".join(lines) + "\n"


def typed() -> str:
    """The module `ringtrain.options.keywords`, which tells type checkers and editors the keywords of init()."""
    lines = [
        '"""The keywords of `init()`, for type checkers and editors."""',
        "",
        "# Generated from the table in the core by `make docs`.",
        "",
        "from __future__ import annotations",
        "",
        "from os import PathLike",
        "from typing import Literal, TypedDict",
        "",
        "",
        "class Options(TypedDict, total=False):",
        '    """Each option is described in docs/options.md."""',
        "",
        *(f"    {option.name}: {_type_of(option)}" for option in TABLE),
    ]
    return "\n".join(lines) + "\n"


def _type_of(option: Option) -> str:
    if option.type == "number":
        return "float"
    if option.type == "text":
        return "str | PathLike[str]"
    if option.is_switch:
        return 'bool | Literal["on", "off"]'
    if option.type == "rates" or not option.choices:
        return "str"
    words = [choice for choice in option.choices if not choice.isdecimal()]
    of_words = f"Literal[{', '.join(map(json.dumps, words))}]"
    return of_words if words == list(option.choices) else f"int | {of_words}"
