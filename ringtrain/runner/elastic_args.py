"""From what the user has asked for, on the command line or in `ringtrain.run`, to an elastic job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ringtrain.options import table
from ringtrain.runner.hosts import Host, UsageError, total_slots
from ringtrain.runner.job import ElasticTerms

_TIMEOUT_VARIABLE = "HOROVOD_ELASTIC_TIMEOUT"
_NETWORK_VARIABLE = table.environment_name("network")
_TIMEOUT_S = 600.0


class Asked(NamedTuple):
    """The arguments that the user gave; None for the others."""

    num_proc: int | None = None
    min_np: int | None = None
    max_np: int | None = None
    slots: int | None = None
    discovery_script: str | None = None
    timeout_s: float | None = None
    reset_limit: int | None = None
    cooldown_s: Sequence[float] | None = None

    @property
    def is_elastic(self) -> bool:
        return self.min_np is not None or self.discovery_script is not None


class Names(NamedTuple):
    """How the user calls what `Asked` has."""

    num_proc: str
    min_np: str
    max_np: str
    slots: str
    discovery_script: str
    timeout_s: str
    reset_limit: str
    cooldown_s: str


FLAGS = Names(
    "-np",
    "--min-np",
    "--max-np",
    "--slots-per-host",
    "--host-discovery-script",
    "--elastic-timeout",
    "--reset-limit",
    "--blacklist-cooldown-range",
)
ARGUMENTS = Names(
    "num_proc",
    "min_num_proc",
    "max_num_proc",
    "slots",
    "host_discovery_script",
    "elastic_timeout",
    "reset_limit",
    "cooldown_range",
)


class ElasticJob(NamedTuple):
    """How many processes it begins with, the hosts that are known by now, and the terms."""

    num_proc: int
    hosts: list[Host]
    terms: ElasticTerms


def refuse_without_least(asked: Asked, names: Names) -> None:
    """Raises UsageError where a job that is not elastic is given what only elastic ones have."""
    for name, value in zip(names[2:], asked[2:], strict=True):
        if value is not None:
            raise UsageError(f"{name} is for elastic jobs; give {names.min_np}, too")


def elastic_job(asked: Asked, hosts: list[Host], names: Names, environ: Mapping[str, str]) -> ElasticJob:
    """`hosts` are those of the user or of an allocation, if any. Raises UsageError for what contradicts itself."""
    if asked.discovery_script is not None and hosts:
        raise UsageError(f"the hosts come either from {names.discovery_script} or from a list, not from both")
    num_proc = asked.num_proc or _usual_num_proc(asked, hosts)
    if num_proc is None:
        raise UsageError(f"how many ranks? give {names.num_proc} or {names.min_np}")
    least = num_proc if asked.min_np is None else asked.min_np
    if least > num_proc:
        raise UsageError(f"{names.min_np} {least} is more than the {num_proc} of {names.num_proc}")
    if asked.max_np is not None and num_proc > asked.max_np:
        raise UsageError(f"{names.num_proc} {num_proc} is more than the {asked.max_np} of {names.max_np}")
    if not hosts and asked.discovery_script is None:
        hosts = [Host("localhost", asked.slots or max(num_proc, asked.max_np or 0))]
    if asked.discovery_script is None and num_proc > total_slots(hosts):
        listed = ",".join(map(str, hosts))
        raise UsageError(f"{names.num_proc} {num_proc} is more than the {total_slots(hosts)} slots of {listed}")
    terms = ElasticTerms(
        least,
        asked.max_np,
        asked.slots or 1,
        asked.discovery_script,
        _timeout_s(asked, environ),
        asked.reset_limit,
        _cooldown_s(asked, names),
    )
    return ElasticJob(num_proc, hosts, terms)


def over_sockets(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of an elastic job. Raises UsageError where it is to use an MPI."""
    try:
        wanted = table.resolve({}, environ)["network"]
    except ValueError as error:
        raise UsageError(str(error)) from error
    if wanted == "mpi":
        raise UsageError(
            "an elastic job never uses an MPI, which would end all ranks with the first one that dies; leave out "
            "--network mpi"
        )
    return {**environ, _NETWORK_VARIABLE: "sockets"}


def _usual_num_proc(asked: Asked, hosts: list[Host]) -> int | None:
    """All slots that there are, as far as they are allowed."""
    slots = total_slots(hosts)
    return min(slots, asked.max_np or slots) if slots else asked.min_np


def _timeout_s(asked: Asked, environ: Mapping[str, str]) -> float:
    if asked.timeout_s is not None:
        return asked.timeout_s
    text = environ.get(_TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text or _TIMEOUT_S)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{_TIMEOUT_VARIABLE}={text} is no number of seconds")
    return seconds


def _cooldown_s(asked: Asked, names: Names) -> tuple[float, float] | None:
    if asked.cooldown_s is None:
        return None
    shortest, longest = asked.cooldown_s
    if not 0 < shortest <= longest:
        raise UsageError(f"{names.cooldown_s} {shortest:g} {longest:g}: write the shorter time first, from above 0")
    return shortest, longest
