"""What `ringtrain.run` is given, checked before anything is started; each error names the argument."""

from __future__ import annotations

import operator
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ringtrain.runner.allocation.hosts import (
    Host,
    UsageError,
    existing_file,
    parse_hosts,
    read_hostfile,
    total_slots,
)
from ringtrain.runner.elastic.asked import Asked
from ringtrain.runner.job import START_TIMEOUT_S


def check_function(function: Any) -> None:
    """Raises TypeError for what cannot be called, such as the result of the function."""
    if not callable(function):
        raise TypeError(f"the first argument must be a function, not {function!r}")


def check_args(args: Any) -> tuple[Any, ...]:
    """Raises TypeError, also for a text, whose letters would become the arguments."""
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise TypeError(f"args must be a tuple or a list, not {args!r}; write ({args!r},) for one argument")
    return tuple(args)


def require_one_at_most(**arguments: Any) -> None:
    """Raises ValueError where two of these are given, which exclude each other."""
    given = [name for name, value in arguments.items() if value]
    if len(given) > 1:
        raise ValueError(f"give {' or '.join(given)}, not both")


def check_num_proc(num_proc: Any) -> int:
    """Raises TypeError and ValueError."""
    return _positive_number("num_proc", num_proc)


def check_ssh_port(ssh_port: Any) -> int | None:
    """Raises TypeError and ValueError."""
    return None if ssh_port is None else _positive_number("ssh_port", ssh_port)


def check_file(ssh_identity_file: Any) -> str | None:
    """Raises UsageError where there is no such file."""
    return None if ssh_identity_file is None else existing_file(os.fspath(ssh_identity_file), "ssh_identity_file")


def check_words(mpi_args: Any) -> tuple[str, ...]:
    """Words as a shell would have them. Raises TypeError and ValueError."""
    if mpi_args is None:
        return ()
    if not isinstance(mpi_args, str):
        raise TypeError(f"mpi_args must be a text such as '--map-by slot', not {mpi_args!r}")
    try:
        return tuple(shlex.split(mpi_args))
    except ValueError as error:
        raise ValueError(f"mpi_args: {error}: {mpi_args}") from error


def check_interfaces(network_interfaces: Any) -> str | None:
    """Names with commas between them, in their order but for those of a set. Raises TypeError."""
    if not network_interfaces:
        return None
    names = [network_interfaces] if isinstance(network_interfaces, str) else list(network_interfaces)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f'network_interfaces must be names such as ["eth0"], not {network_interfaces!r}')
    return ",".join(sorted(names) if isinstance(network_interfaces, (set, frozenset)) else names)


def check_hosts(hosts: Any, hostfile: Any, num_proc: int) -> list[Host]:
    """Raises TypeError, and UsageError where a host cannot be read or the hosts have fewer slots than `num_proc`."""
    if hostfile is not None:
        found = read_hostfile(os.fspath(hostfile))
    elif hosts is None:
        return []
    elif isinstance(hosts, str):
        found = parse_hosts(hosts, "hosts")
    else:
        raise TypeError(f'hosts must be a text such as "h1:2,h2:2", not {hosts!r}')
    if num_proc > total_slots(found):
        given = f"{hosts=}" if hostfile is None else f"{hostfile=}"
        raise UsageError(f"num_proc={num_proc} is more than the {total_slots(found)} slots of {given}")
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


def check_elastic(
    num_proc: int,
    min_num_proc: Any,
    max_num_proc: Any,
    slots: Any,
    host_discovery_script: Any,
    elastic_timeout: Any,
    reset_limit: Any,
    cooldown_range: Any,
) -> Asked:
    """Raises TypeError and ValueError. A `num_proc` of 1, which nobody may have written, is none."""
    if host_discovery_script is not None and not isinstance(host_discovery_script, str):
        raise TypeError(f"host_discovery_script must be a command, not {host_discovery_script!r}")
    return Asked(
        None if num_proc == 1 else num_proc,
        None if min_num_proc is None else _positive_number("min_num_proc", min_num_proc),
        None if max_num_proc is None else _positive_number("max_num_proc", max_num_proc),
        None if slots is None else _positive_number("slots", slots),
        host_discovery_script,
        None if elastic_timeout is None else _seconds("elastic_timeout", elastic_timeout),
        None if reset_limit is None else _whole_number("reset_limit", reset_limit),
        None if cooldown_range is None else _two_times(cooldown_range),
    )


def check_start_timeout(start_timeout: Any) -> float:
    """Raises TypeError and ValueError."""
    if start_timeout is None:
        return START_TIMEOUT_S
    return _seconds("start_timeout", start_timeout)


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = value + 0.0
    except TypeError:
        raise TypeError(f"{name} must be a number of seconds, not {value!r}") from None
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{name} must be a number of seconds from 0, not {value!r}")
    return float(seconds)


def _two_times(cooldown_range: Any) -> Sequence[float]:
    if isinstance(cooldown_range, str) or not isinstance(cooldown_range, Sequence) or len(cooldown_range) != 2:
        raise TypeError(f"cooldown_range must be two numbers of seconds, not {cooldown_range!r}")
    return [_seconds("cooldown_range", value) for value in cooldown_range]


def _positive_number(name: str, value: Any) -> int:
    return _whole_number(name, value, least=1)


def _whole_number(name: str, value: Any, least: int = 0) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {value!r}")
    return number
