"""The file of --config-file, in YAML: ringrun's flags without their hyphens, and the sections of horovodrun's file.

    hosts: h1:2,h2:2
    env: [GREETING=hello, "WORDS=good day"]
    autotune: true
    params:
      fusion_threshold_mb: 32

Both become flags. The file and the command line go through one parser, in which the command line comes last and wins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ringtrain.options.horovod_variables import as_switch
from ringtrain.runner import horovod_flags
from ringtrain.runner.allocation.hosts import UsageError

if TYPE_CHECKING:
    import yaml

# whoever has no such file needs no PyYAML: it is imported where one is read

# flags that may be given several times, so a list of values is one of them each
_LISTS = ("env", "network-interfaces", "network-interface")
# and the one flag that takes two words
_RANGE = "--blacklist-cooldown-range"


class Words(NamedTuple):
    """What an entry of the file is on the command line, and where it stands."""

    source: str
    words: list[str]


class _Entry(NamedTuple):
    source: str
    name: str
    value: yaml.Node


def read_config(path: str, switches: Collection[str]) -> list[Words]:
    """The entries of a file as words for the parser. Raises UsageError, which names the file and the line.

    Args:
        path: the file.
        switches: names of the flags that take no value; in the file they are true or false.
    """
    entries = list(_entries(path, _root(path)))
    for number, entry in enumerate(entries):
        if any(entry.name == former.name for former in entries[:number]):
            raise UsageError(f"{entry.source}: {entry.name} is there twice")
    return [Words(entry.source, list(_words(entry, switches))) for entry in entries if not _is_empty(entry.value)]


def _root(path: str) -> yaml.Node | None:
    import yaml

    try:
        return yaml.compose(Path(path).read_text(), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config-file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise UsageError(f"{path}{line}: this is not YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: this is not YAML: {error}") from error


def _entries(path: str, root: yaml.Node | None, section: str = "") -> Iterator[_Entry]:
    """Each name with its value; those in a section behind the section's name and a dot."""
    import yaml

    if root is None:
        return
    source = f"{path}, line {root.start_mark.line + 1}"
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f'{source}: write a name, a colon and a value, as in "num-proc: 4"')
    for key, value in root.value:
        source, name = f"{path}, line {key.start_mark.line + 1}", section + str(key.value)
        if not isinstance(value, yaml.MappingNode):
            yield _Entry(source, name, value)
        elif section:
            raise UsageError(f"{source}: {name} has no section of its own")
        else:
            yield from _entries(path, value, f"{name}.")


def _is_empty(value: yaml.Node) -> bool:
    return str(value.tag) == "tag:yaml.org,2002:null"


def _words(entry: _Entry, switches: Collection[str]) -> Iterator[str]:
    flag = _horovods_flag(entry)
    if flag is not None:
        name, is_switch, off = flag.names[0], flag.takes == 0, "".join(flag.off[:1])
    else:
        name, is_switch = _name(entry, switches)
        off = f"--no-{name.lstrip('-')}"
    texts = _texts(entry)
    if name == _RANGE:
        yield from (name, *texts)
    elif not is_switch:
        yield from (f"{name}={text}" for text in texts)
    elif flag is not None and not off:
        yield name
    else:
        spelling = {"on": name, "off": off}.get(as_switch(texts[0]))
        if spelling is None:
            raise UsageError(f"{entry.source}: {entry.name} takes true or false")
        yield spelling


def _horovods_flag(entry: _Entry) -> horovod_flags.Flag | None:
    """Of an entry as it stands in horovodrun's file, which has sections and, on top, `controller`."""
    if entry.name == "controller":
        flag = horovod_flags.BY_KEY.get(f"controller: {str(entry.value.value).lower()}")
    else:
        flag = horovod_flags.BY_KEY.get(entry.name)
    if flag is None and ("." in entry.name or entry.name == "controller"):
        raise UsageError(f"{entry.source}: horovodrun's file has no {entry.name}: {entry.value.value}")
    return flag


def _name(entry: _Entry, switches: Collection[str]) -> tuple[str, bool]:
    """The flag that is called so, and whether it is a switch."""
    name = entry.name.lstrip("-").replace("_", "-")
    if name == "config-file":
        raise UsageError(f"{entry.source}: a file cannot name another one")
    switch = name.removeprefix("no-")
    if switch != name and switch in switches:
        raise UsageError(f'{entry.source}: write "{switch}: false"')
    # a single hyphen for -np, -n and -H
    return ("-" if len(name) <= 2 else "--") + name, name in switches


def _texts(entry: _Entry) -> list[str]:
    """The value as it is written, or each of a list."""
    import yaml

    nodes = entry.value.value if isinstance(entry.value, yaml.SequenceNode) else [entry.value]
    if not all(isinstance(node, yaml.ScalarNode) for node in nodes):
        raise UsageError(f"{entry.source}: {entry.name} takes texts or numbers")
    if len(nodes) != 1 and entry.name.replace("_", "-") not in (*_LISTS, _RANGE.lstrip("-")):
        raise UsageError(f"{entry.source}: {entry.name} takes one value")
    return [node.value for node in nodes]
