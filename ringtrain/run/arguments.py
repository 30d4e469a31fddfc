"""What `ringtrain.run` is given, checked before anything is started; each error names the argument."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from ringtrain.run.hosts import Host, UsageError, parse_hosts, total_slots


def check_function(function: Any) -> None:
    """Raises TypeError for what cannot be called, such as the result of the function."""
    if not callable(function):
        raise TypeError(f"the first argument must be a function, not {function!r}")


def check_args(args: Any) -> tuple[Any, ...]:
    """Raises TypeError, also for a text, whose letters would become the arguments."""
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise TypeError(f"args must be a tuple or a list, not {args!r}; write ({args!r},) for one argument")
    return tuple(args)


def check_num_proc(np: Any) -> int:
    """Raises TypeError and ValueError."""
    try:
        num_proc = operator.index(np)
    except TypeError:
        raise TypeError(f"np must be a whole number, not {np!r}") from None
    if num_proc < 1:
        raise ValueError(f"np must be at least 1, not {np!r}")
    return num_proc


def check_hosts(hosts: Any, num_proc: int) -> list[Host]:
    """Raises TypeError, and UsageError where a host cannot be read or the hosts have fewer slots than `num_proc`."""
    if hosts is None:
        return []
    if not isinstance(hosts, str):
        raise TypeError(f'hosts must be a text such as "h1:2,h2:2", not {hosts!r}')
    found = parse_hosts(hosts, "hosts")
    if num_proc > total_slots(found):
        raise UsageError(f"np={num_proc} is more than the {total_slots(found)} slots of hosts={hosts!r}")
    return found


def check_env(env: Any) -> dict[str, str]:
    """Raises TypeError and ValueError."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise TypeError(f"env must be a mapping of names to texts, not {env!r}")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env must map names to texts, but maps {name!r} to {value!r}")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env has {name!r}: {value!r}, which cannot be a variable")
    return dict(env)


def check_start_timeout_s(start_timeout_s: Any) -> float:
    """Raises TypeError and ValueError."""
    try:
        seconds = start_timeout_s + 0.0
    except TypeError:
        raise TypeError(f"start_timeout_s must be a number of seconds, not {start_timeout_s!r}") from None
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"start_timeout_s must be a number of seconds from 0, not {start_timeout_s!r}")
    return float(seconds)
