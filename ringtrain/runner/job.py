"""A job to be started, in words of no particular launcher."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringtrain.errors import ranges_of
from ringtrain.job import launched_by
from ringtrain.record.folders import IN_MEMORY, temporary_folder
from ringtrain.runner.hosts import Host, UsageError, lines_of_hosts, split_host, split_line, total_slots
from ringtrain.runner.supervise.rank_wrapper import TORCH_PLACE_VARIABLE

# --- elastic jobs -----------------------------------------------------------------------------------------------------


class ElasticTerms(NamedTuple):
    """Between how many ranks, on which hosts, and until when it is given up.

    `most` None is no limit but the slots. Hosts come from `discovery_script` if there is one, else they are those of
    the Job; one that the script names without a number has `slots`. `timeout_s` is how long there may be fewer ranks
    than `least`, `reset_limit` how often the job may begin a generation anew. `cooldown_s` is for how long a host is
    given up, the first time and at most; None is for ever.
    """

    least: int
    most: int | None = None
    slots: int = 1
    discovery_script: str | None = None
    timeout_s: float = 600.0
    reset_limit: int | None = None
    cooldown_s: tuple[float, float] | None = None


# --- jobs with servers ------------------------------------------------------------------------------------------------


class Address(NamedTuple):
    """A host, and where ssh listens there; None is its usual port."""

    host: str
    port: int | None = None

    def __str__(self) -> str:
        if self.port is None:
            return self.host
        user, at, host = self.host.rpartition("@")
        return f"{user}{at}[{host}]:{self.port}" if ":" in host else f"{self.host}:{self.port}"

    @property
    def ssh_options(self) -> list[str]:
        return [] if self.port is None else [f"-p{self.port}"]


def read_addresses(path: str) -> list[Address]:
    """Returns each host as often as it has slots. Raises UsageError where the file cannot be read or names none."""
    found = []
    for number, line in lines_of_hosts(path, "-H"):
        source = f"{path}, line {number}"
        host, slots = split_line(line, source)
        found += [address_of(host, source)] * (1 if slots is None else slots)
    if not found:
        raise UsageError(f"-H {path} names no host")
    return found


def address_of(text: str, source: str) -> Address:
    """`h1`, or `h1:2222` for another port of ssh. Raises UsageError, which names `source`."""
    word = split_host(text)
    if word is None or word.number == 0:
        raise UsageError(f'{source}: "{text}" is not a host; write an address, or address:port for another port of ssh')
    return Address(word.name, word.number)


SCHEDULER, SERVER, WORKER = "scheduler", "server", "worker"


class RoleProcess(NamedTuple):
    """`number` is its own among all processes of the job, `task` among those of its role."""

    number: int
    role: str
    task: int

    def __str__(self) -> str:
        return "the scheduler" if self.role == SCHEDULER else f"{self.role} {self.task}"


class Cast(NamedTuple):
    """The scheduler, then the servers, then the workers."""

    servers: int
    workers: int

    @property
    def size(self) -> int:
        return 1 + self.servers + self.workers

    def processes(self) -> list[RoleProcess]:
        return [self.process(number) for number in range(self.size)]

    def process(self, number: int) -> RoleProcess:
        if number == 0:
            return RoleProcess(0, SCHEDULER, 0)
        if number <= self.servers:
            return RoleProcess(number, SERVER, number - 1)
        return RoleProcess(number, WORKER, number - 1 - self.servers)

    def label(self, number: int) -> str:
        """As in `[worker 1] text`."""
        return str(self.process(number)).removeprefix("the ")

    def listed(self, numbers: Iterable[int]) -> str:
        """`the scheduler, servers 0-1 and worker 2`."""
        tasks: dict[str, list[int]] = {}
        for process in map(self.process, sorted(numbers)):
            tasks.setdefault(process.role, []).append(process.task)
        parts = [
            "the scheduler" if role == SCHEDULER else f"{role}{'s' if len(found) > 1 else ''} {ranges_of(found)}"
            for role, found in tasks.items()
        ]
        return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def host_of(process: RoleProcess, hosts: Sequence[Address], here: Address) -> Address:
    """The scheduler stays here; servers and then workers go round the hosts, as with MXNet's launch.py."""
    if process.role == SCHEDULER or not hosts:
        return here
    return hosts[(process.number - 1) % len(hosts)]


class RoleTerms(NamedTuple):
    """How many there are of each role, where, and until when.

    `hosts` none is this host; `folder` None is the current one. `of_workers` and `of_servers` are variables of these
    alone. A worker that fails is started again so often as `restarts` says, and a server where it `has_snapshots`. With
    fewer workers than `least`, counting those that are done, the job does not go on. With `keeps_servers` these stay
    when the workers are done.
    """

    cast: Cast
    hosts: Sequence[Address] = ()
    folder: str | None = None
    of_workers: Mapping[str, str] = {}
    of_servers: Mapping[str, str] = {}
    restarts: int = 0
    least: int = 0
    keeps_servers: bool = False
    has_snapshots: bool = False


# --- any job ----------------------------------------------------------------------------------------------------------


# How long ranks may take to start unless the user sets another limit.
START_TIMEOUT_S = 120.0


class Job(NamedTuple):
    """`command` on `num_proc` ranks; no hosts means this host.

    `exported` names variables of `environment` that the ranks get in any case; `travelling` in hosts.py says which
    others do.
    `network_interfaces` is a list such as "eth0,eth1"; `ssh_port` and `ssh_identity_file` are for reaching other hosts.
    `hosts_are_allotted` says that a batch system named the hosts, not the user. `launcher_arguments` are the user's
    words for the launcher, and for a starter of ours the first ones of what starts its agents or containers;
    `binding_arguments` are those that are to stand in place of ours about binding; `has_tcp_only` keeps the network to
    TCP. `elastic` is what an elastic job may become, which begins with `num_proc` ranks. `roles` is what a job with
    servers has, where `num_proc` counts all processes. `has_wrappers`: a starter of ours makes the wrappers.
    """

    command: list[str]
    num_proc: int
    hosts: list[Host]
    environment: dict[str, str]
    exported: tuple[str, ...] = ()
    network_interfaces: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    hosts_are_allotted: bool = False
    launcher_arguments: tuple[str, ...] = ()
    binding_arguments: tuple[str, ...] = ()
    has_tcp_only: bool = False
    elastic: ElasticTerms | None = None
    roles: RoleTerms | None = None
    has_wrappers: bool = False

    def to_json(self) -> str:
        """Returns what is set, but for the command and the environment, which a process has besides."""
        known = self._replace(command=[], environment={})._asdict()
        return json.dumps({name: value for name, value in known.items() if value})

    @classmethod
    def from_json(cls, text: str, command: list[str], environment: Mapping[str, str]) -> Job:
        known: dict[str, Any] = json.loads(text)
        known["hosts"] = [Host(*host) for host in known.get("hosts", ())]
        for name in ("exported", "launcher_arguments", "binding_arguments"):
            known[name] = tuple(known.get(name, ()))
        if "elastic" in known:
            *terms, cooldown_s = known["elastic"]
            known["elastic"] = ElasticTerms._make([*terms, cooldown_s and tuple(cooldown_s)])
        if "roles" in known:
            cast, hosts, *terms = known["roles"]
            known["roles"] = RoleTerms(Cast(*cast), [Address(*address) for address in hosts], *terms)
        return cls(command=command, environment=dict(environment), **known)

    @property
    def ssh_options(self) -> list[str]:
        port = [] if self.ssh_port is None else [f"-p{self.ssh_port}"]
        identity = [] if self.ssh_identity_file is None else [f"-i{self.ssh_identity_file}"]
        return port + identity

    @property
    def ranks_of_hosts(self) -> list[int]:
        """How many ranks each host has where they fill the slots of one host after another."""
        counts: list[int] = []
        for slots in [host.slots for host in self.hosts] or [self.num_proc]:
            counts.append(min(slots, self.num_proc - sum(counts)))
        return [count for count in counts if count > 0]

    @property
    def may_have_several(self) -> bool:
        """Whether there may be more than one rank at the same time."""
        return self.num_proc > 1 or self.elastic is not None


def name_of(command: Sequence[str]) -> str:
    """Returns what a batch system lists the job as: the script of `python train.py`, else the program."""
    scripts = [word for word in command if word.endswith(".py")]
    return (scripts or list(command))[0].rpartition("/")[2]


def require_program(command: list[str], environ: Mapping[str, str]) -> None:
    """Raises UsageError for a script that cannot be executed by itself, with the command that runs it."""
    name = command[0]
    is_script = name.endswith(".py") and os.path.isfile(name)
    if is_script and shutil.which(name, path=environ.get("PATH")) is None:
        raise UsageError(f"{name} is a script and not a program: write python {shlex.join(command)}")


def environment_of_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`, with this Python as the `python` of the ranks, and without what makes this process a rank itself.

    Raises UsageError where the current folder, in which the ranks are to run, has been removed.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "the current folder has been removed, but the ranks run in it; change to another one"
        ) from None
    not_for_ranks = {launched_by.OWNER_VARIABLE}
    if launched_by.Ringrun().read(environ) is not None:
        not_for_ranks.update(launched_by.OF_RINGRUN)
    if environ.get(TORCH_PLACE_VARIABLE) == f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}":
        not_for_ranks |= {"MASTER_ADDR", "MASTER_PORT"}  # of the job that this process is a rank of
    environment = {name: value for name, value in environ.items() if name not in not_for_ranks}
    if temporary_folder() == IN_MEMORY:  # launchers and frameworks need a folder that can be written to as well
        environment["TMPDIR"] = IN_MEMORY
    python_folder = str(Path(sys.executable).parent)
    path = environment.get("PATH", os.defpath)
    # /path/to/venv/bin/ringrun may be typed without the venv being active
    if shutil.which("python", path=path) != os.path.join(python_folder, "python"):
        environment["PATH"] = python_folder + os.pathsep + path
    return environment


# --- elastic jobs, from the command line or the arguments of `ringtrain.run` ------------------------------------------


_TIMEOUT_VARIABLE = "HOROVOD_ELASTIC_TIMEOUT"
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


# The flag of ringrun and the argument of `ringtrain.run`, in the order of `Asked`.
_CALLED = (
    ("-np", "num_proc"),
    ("--min-np", "min_num_proc"),
    ("--max-np", "max_num_proc"),
    ("--slots-per-host", "slots"),
    ("--host-discovery-script", "host_discovery_script"),
    ("--elastic-timeout", "elastic_timeout"),
    ("--reset-limit", "reset_limit"),
    ("--blacklist-cooldown-range", "cooldown_range"),
)
FLAGS, ARGUMENTS = (Names(*names) for names in zip(*_CALLED, strict=True))


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
    from ringtrain.options import table  # which starters do not need, and they import this module too

    try:
        wanted = table.resolve({}, environ)["network"]
    except ValueError as error:
        raise UsageError(str(error)) from error
    if wanted == "mpi":
        raise UsageError(
            "an elastic job never uses an MPI, which would end all ranks with the first one that dies; leave out "
            "--network mpi"
        )
    return {**environ, table.environment_name("network"): "sockets"}


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
        raise UsageError(f"{_TIMEOUT_VARIABLE}={text} is not a number of seconds")
    return seconds


def _cooldown_s(asked: Asked, names: Names) -> tuple[float, float] | None:
    if asked.cooldown_s is None:
        return None
    shortest, longest = asked.cooldown_s
    if not 0 < shortest <= longest:
        raise UsageError(f"{names.cooldown_s} {shortest:g} {longest:g}: write the shorter time first, from above 0")
    return shortest, longest
