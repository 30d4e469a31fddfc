"""Hosts and their slots, as the user names them or as a batch system has allotted them; how to reach other hosts."""

from __future__ import annotations

import random
import re
import shlex
import shutil
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, Protocol

import ringtrain._core as _core
from ringtrain.job.host import addresses_of, usual_address
from ringtrain.job.launched_by import expand_counts, expand_node_list

# `h1`, `h1:2`, `user@h1`, `[fe80::1]:2`, and `fe80::1`, which has no number behind it.
_HOST = re.compile(
    r"(?P<user>[\w.-]+@)?(?:(?P<name>[A-Za-z0-9][\w.-]*|\[(?P<inside>[\da-fA-F:.]+)\])(?::(?P<number>\d+))?"
    r"|(?P<bare>[\da-fA-F.]*:[\da-fA-F.]*:[\da-fA-F:.]*))"
)
# Open MPI's `h1 slots=2 max_slots=4` and Hydra's `h1:2 ifname=eth0`
_LINE = re.compile(r"(?P<host>\S+)(?P<settings>(?:\s+[\w-]+\s*=\s*\S+)*)")
_SETTING = re.compile(r"([\w-]+)\s*=\s*(\S+)")
# Each host's own upper limit, network interface and binding are not ringrun's business.
_IGNORED_SETTINGS = ("max_slots", "max-slots", "ifname", "binding")


class UsageError(Exception):
    """The command line asks for something that cannot be; the message is one sentence for the user."""


class Host(NamedTuple):
    """A host name and how many ranks it takes."""

    name: str
    slots: int

    def __str__(self) -> str:
        user, at, name = self.name.rpartition("@")
        return f"{user}{at}[{name}]:{self.slots}" if ":" in name else f"{self.name}:{self.slots}"


class Word(NamedTuple):
    """A host as users write it: its name as ssh takes it, and the number behind a colon."""

    name: str
    number: int | None


def split_host(text: str) -> Word | None:
    """Returns None of what is not a host."""
    match = _HOST.fullmatch(text)
    if match is None:
        return None
    of_version_6 = match["inside"] or match["bare"]
    if of_version_6:
        try:
            ip_address(of_version_6)
        except ValueError:
            return None
    number = None if match["number"] is None else int(match["number"])
    return Word((match["user"] or "") + (of_version_6 or match["name"]), number)


def without_user(name: str) -> str:
    """Returns the part of a host's name that the network knows."""
    return name.rpartition("@")[2]


def parse_hosts(text: str, source: str = "-H") -> list[Host]:
    """Read `h1:2,h2:2`; a host without a number has one slot each time it is named, and one with 0 slots is left out.

    Raises UsageError, which names `source`, the flag or argument that the text was given with.
    """
    hosts = merge(_parse_host(item.strip(), f"{source} {text}".rstrip()) for item in text.split(","))
    if not hosts:
        raise UsageError(f"{source} {text}: no host has a slot")
    return hosts


def lines_of_hosts(path: str, what: str) -> list[tuple[int, str]]:
    """Returns the lines with their numbers, without comments and empty lines. Raises UsageError, which names `what`."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # editors of Windows put a mark at the beginning
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{what} {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    stripped = [(number, line.split("#")[0].strip()) for number, line in enumerate(text.splitlines(), start=1)]
    return [(number, line) for number, line in stripped if line]


def read_hostfile(path: str) -> list[Host]:
    """Read a file in the syntax of Open MPI (`host slots=2`) or of Hydra (`host:2`); # begins a comment.

    Raises UsageError.
    """
    hosts = merge(_parse_line(line, f"{path}, line {number}") for number, line in lines_of_hosts(path, "the hostfile"))
    if not hosts:
        raise UsageError(f"the hostfile {path} names no host with a slot")
    return hosts


def read_discovered(text: str, slots: int, source: str) -> list[Host]:
    """Read lines such as `h1:2` or `h1`, which has as many as `slots`. Raises UsageError, which names `source`."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return merge(_parse_host(line, source, slots) for line in lines if line)


def existing_file(path: str | None, source: str) -> str | None:
    """Raises UsageError, which names `source`, the flag or argument that the path was given with."""
    if path is not None and not Path(path).is_file():
        raise UsageError(f"{source} {path} is not a file")
    return path


def merge(hosts: Iterable[Host]) -> list[Host]:
    """Each host once, with all its slots, in the order in which they are first named; without those that have none."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(*item) for item in slots.items() if item[1] > 0]


def total_slots(hosts: list[Host]) -> int:
    """How many ranks the hosts take together."""
    return sum(host.slots for host in hosts)


def _parse_host(text: str, source: str, slots: int = 1) -> Host:
    word = split_host(text)
    if word is None:
        raise _not_a_host(text, source)
    return Host(word.name, slots if word.number is None else word.number)


def _parse_line(text: str, source: str) -> Host:
    host, slots = split_line(text, source)
    return _parse_host(host, source) if slots is None else Host(_parse_host(host, source).name, slots)


def split_line(text: str, source: str) -> tuple[str, int | None]:
    """Returns the host of a line and its `slots=`, if there are any. Raises UsageError, which names `source`."""
    match = _LINE.fullmatch(text)
    settings = dict(_SETTING.findall(match["settings"])) if match is not None else {}
    slots = settings.pop("slots", None)
    is_known = all(name in _IGNORED_SETTINGS for name in settings) and (slots is None or slots.isdecimal())
    if match is None or not is_known:
        raise _not_a_host(text, source)
    return match["host"], None if slots is None else int(slots)


def _not_a_host(text: str, source: str) -> UsageError:
    return UsageError(f'{source}: "{text}" is not a host; write host:2 or, in a hostfile, host slots=2')


def is_this_host(name: str) -> bool:
    """Whether the name is one of this host, or that of one of its addresses. One with a user is reached by ssh."""
    if "@" in name:
        return False
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False  # the program that connects to it reports the error
    own = {address for _, address in _core.interface_addresses()}
    return any(address in own or ip_address(address.partition("%")[0]).is_loopback for address in found)


# Beyond those where ranks meet, and below those that Linux gives to any connection.
_PORTS_FOR_TORCH = range(30_000, 32_768)


def place_for_torch(hosts: Sequence[Host], interfaces: str | None) -> str:
    """Returns where the store of torch.distributed may listen on the first host, as in `h1:30017`."""
    first = without_user(hosts[0].name) if len(hosts) > 1 else "127.0.0.1"
    if len(hosts) > 1 and is_this_host(hosts[0].name) and (interfaces or first in ("localhost", "127.0.0.1", "::1")):
        first = next(iter(_own_addresses(interfaces)), usual_address())
    port = next(filter(_is_free, random.sample(_PORTS_FOR_TORCH, 100)), _PORTS_FOR_TORCH[0])
    return f"{first}:{port}"


def _own_addresses(interfaces: str | None) -> list[str]:
    try:
        return addresses_of(interfaces or "")
    except ValueError:  # the ranks report it
        return []


def _is_free(port: int) -> bool:
    """Whether nothing listens at the port of this host."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


# --- batch systems, whose environment describes an allocation ---------------------------------------------------------


class Allocation(NamedTuple):
    """The hosts that a batch system has given to this job."""

    batch_system: str
    hosts: list[Host]


class BatchSystem(Protocol):
    """How one batch system describes an allocation in the environment."""

    def read(self, environ: Mapping[str, str]) -> list[Host] | None:
        """The hosts, or None when this process is in no allocation of it. Raises UsageError where they are garbled."""


class Slurm:
    """salloc and sbatch. A host takes as many ranks as tasks were asked for or, if none were, as it has CPUs."""

    def read(self, environ: Mapping[str, str]) -> list[Host] | None:
        names = environ.get("SLURM_JOB_NODELIST")
        if "SLURM_JOB_ID" not in environ or not names:
            return None
        asked_for_tasks = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
        variable = "SLURM_TASKS_PER_NODE" if asked_for_tasks else "SLURM_JOB_CPUS_PER_NODE"
        hosts, slots = expand_node_list(names), expand_counts(environ.get(variable, ""))
        if len(slots) != len(hosts):
            raise UsageError(f"{variable} does not fit SLURM_JOB_NODELIST={names}; give the hosts with -H")
        return [Host(*item) for item in zip(hosts, slots, strict=True)]


class Pbs:
    """PBS and Torque: a file with a line for each rank."""

    def read(self, environ: Mapping[str, str]) -> list[Host] | None:
        lines = _lines_of("PBS_NODEFILE", environ)
        return None if lines is None else merge(Host(name, 1) for name in lines)


class Lsf:
    """LSF: `h1 4 h2 4` or, where that is not set, a file with a line for each rank."""

    def read(self, environ: Mapping[str, str]) -> list[Host] | None:
        text = environ.get("LSB_MCPU_HOSTS")
        if text is None:
            lines = _lines_of("LSB_DJOB_HOSTFILE", environ)
            return None if lines is None else merge(Host(name, 1) for name in lines)
        words = text.split()
        names, slots = words[::2], words[1::2]
        if len(names) != len(slots) or not all(number.isdecimal() for number in slots):
            raise UsageError(f'LSB_MCPU_HOSTS="{text}" is not a list of hosts and slots; give the hosts with -H')
        return merge(Host(name, int(number)) for name, number in zip(names, slots, strict=True))


class Sge:
    """SGE and its descendants, in a parallel environment: a file with lines `h1 4 all.q@h1 UNDEFINED`."""

    def read(self, environ: Mapping[str, str]) -> list[Host] | None:
        lines = _lines_of("PE_HOSTFILE", environ)
        if lines is None:
            return None
        fields = [line.split() for line in lines]
        if not all(len(words) >= 2 and words[1].isdecimal() for words in fields):
            raise UsageError(f"PE_HOSTFILE={environ['PE_HOSTFILE']} has no hosts and slots; give the hosts with -H")
        return merge(Host(words[0], int(words[1])) for words in fields)


_BATCH_SYSTEMS: dict[str, BatchSystem] = {"Slurm": Slurm(), "PBS": Pbs(), "LSF": Lsf(), "SGE": Sge()}


def detect_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation in which this process runs, or None. Raises UsageError where it is garbled."""
    for name, batch_system in _BATCH_SYSTEMS.items():
        hosts = batch_system.read(environ)
        if hosts:
            return Allocation(name, hosts)
    return None


def _lines_of(variable: str, environ: Mapping[str, str]) -> list[str] | None:
    """Returns the lines of the file that the variable names; None if it is not set. Raises UsageError."""
    path = environ.get(variable)
    if path is None:
        return None
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise UsageError(f"{variable}={path} cannot be read: {error.strerror}; give the hosts with -H") from error
    return [line.strip() for line in lines if line.strip()]


# --- commands that run another command on a host ----------------------------------------------------------------------


# Variables that name a program to use instead of ssh: ringrun's own, and those of the launchers.
_AGENTS = (
    "RINGTRAIN_SSH_AGENT",
    *("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC"),
)


class _BatchShell(NamedTuple):
    """How a batch system reaches the hosts of a job, where ssh is often forbidden and would escape its accounting.

    `variable` tells that this is such a job; `hydra` is Hydra's name of it.
    """

    variable: str
    words: tuple[str, ...]
    hydra: str


_BATCH_SHELLS = (_BatchShell("PE_HOSTFILE", ("qrsh", "-inherit"), "sge"), _BatchShell("LSB_JOBID", ("blaunch",), "lsf"))


def remote_shell(environment: Mapping[str, str], options: Sequence[str], own_options: Sequence[str] = ()) -> list[str]:
    """The words before the name of a host, which a command for its shell follows.

    `own_options` are for ssh alone, `options` for whatever is used but the batch system's, which knows none.
    """
    agent = next((environment[name] for name in _AGENTS if name in environment), None)
    if agent is not None:
        return [*shlex.split(agent), *options]
    of_batch_system = _batch_shell(environment)
    if of_batch_system is not None:
        return list(of_batch_system.words)
    # never a question for a password, which the user would not see
    return ["ssh", "-oBatchMode=yes", "-oConnectTimeout=10", *own_options, *options]


def agents_of_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which launchers of all MPIs reach the hosts as the batch system does; none where ssh is right."""
    if any(name in environment for name in _AGENTS):
        return {}
    of_batch_system = _batch_shell(environment)
    if of_batch_system is None:
        return {}
    line = shlex.join(of_batch_system.words)
    return {
        "PRTE_MCA_plm_ssh_agent": line,
        "OMPI_MCA_plm_rsh_agent": line,
        "HYDRA_LAUNCHER": of_batch_system.hydra,
        "I_MPI_HYDRA_BOOTSTRAP": of_batch_system.hydra,
    }


def _batch_shell(environment: Mapping[str, str]) -> _BatchShell | None:
    """Returns the shell of the batch system in whose job this process runs, if it is installed."""
    for shell in _BATCH_SHELLS:
        if shell.variable in environment and shutil.which(shell.words[0], path=environment.get("PATH")) is not None:
            return shell
    return None


# --- variables of this host that go to others -------------------------------------------------------------------------


# Shell functions have names such as BASH_FUNC_module%%, which launchers cannot say.
_GOOD_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_OF_THIS_HOST = re.compile(
    "|".join(
        [
            # the shell that ringrun was typed into
            *("OLDPWD", "SHLVL", "_", "BASH_FUNC_.*"),
            # Names, sockets and screens of this host: with this host's DISPLAY, matplotlib would look for a window.
            *("HOST", "HOSTNAME", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "SSH_.*"),
            *("DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR", "XDG_SESSION_.*", "TMUX.*", "STY"),
            # Its GPUs. A batch system that has allotted others there says so itself.
            *(".*_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),
            # what a launcher tells each rank, or its own daemons: it hands its parameters on by itself
            *("OMPI_.*", "PRTE_.*", "PMIX_.*", "PMI_.*", "PMI2_.*", "HYDRA_.*", "HYDI_.*", "MPI_LOCAL(RANKID|NRANKS)"),
            # Slurm's words about this task or step, in which frameworks would look for their rank; those of the job go
            *("SLURMD_.*", "SLURM_(STEP.*|PROCID|LOCALID|NODEID|TASK_PID|GTIDS|SRUN_.*|LAUNCH_NODE_.*|TOPOLOGY_.*)"),
            *("SLURM_(CPU|MEM)_BIND.*", "SLURM_(CPUS|GPUS)_ON_NODE", "SLURM_JOB_GPUS", "SLURM_PTY_.*"),
        ]
    )
)


def travelling(names: Iterable[str], exported: Collection[str]) -> list[str]:
    """Returns the names that go to the ranks, in order; those in `exported`, which the user has named, always do."""
    return sorted(
        name for name in names if name in exported or (_GOOD_NAME.fullmatch(name) and not _OF_THIS_HOST.fullmatch(name))
    )
