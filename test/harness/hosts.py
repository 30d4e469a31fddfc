"""Several hosts on one machine: network namespaces joined by a bridge, each with an address and a host name of its own.

    with simulated_hosts(2, rate="1gbit") as hosts:
        subprocess.run(hosts.command_on(0, ["mpirun", "-H", ",".join(hosts.names), ...]), env={**os.environ,
                       **hosts.environment})

The hosts have one kernel, one process table, one /tmp and one /dev/shm. The bridge stands in a namespace, too: the
machine's own network is not touched. Needs root, `ip` and `unshare`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

# `ip netns exec NAME` lays the files of this folder over those of /etc.
_NETNS_FOLDER = Path("/etc/netns")
_RUNNING_FOLDER = Path("/run/netns")
_NAME = re.compile(r"ringtrain(?P<pid>\d+)-\d+-\w+")
_serial = itertools.count(1)

# The arguments of ssh from a launcher: options, a host, and a command for that host's shell.
_AGENT = """\
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
"""


class HostsUnavailable(Exception):
    """This machine cannot simulate hosts; the message says why."""


class SimulatedHosts:
    """Names of the hosts, and how to run something on them."""

    def __init__(self, names: list[str], agent: Path, switch: str):
        self.names = names
        self._agent, self._switch = agent, switch
        self.environment = {
            "PRTE_MCA_plm_ssh_agent": str(agent),
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": str(agent),
            "I_MPI_HYDRA_BOOTSTRAP": "ssh",
            "I_MPI_HYDRA_BOOTSTRAP_EXEC": str(agent),
            # UCX (in MPICH) would find the /dev/shm that all hosts share, and send nothing over the network
            "UCX_TLS": "tcp,self",
        }
        """For launchers (Open MPI 5, MPICH, Intel MPI) that are to reach the hosts."""

    def command_on(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on the host of that index."""
        name = self.names[host]
        on_host = ["ip", "netns", "exec", name, "unshare", "--uts"]
        return [*on_host, "sh", "-c", 'hostname "$0" && exec "$@"', name, *command]

    def alone(self, host: int) -> SimulatedHosts:
        """This host alone."""
        return SimulatedHosts([self.names[host]], self._agent, self._switch)

    def address(self, host: int) -> str:
        """Where the others reach the host of that index."""
        return _address(host)

    def run_on(self, host: int, *command: str) -> None:
        """Run a command such as `ip link set eth0 down` there. Raises HostsUnavailable if it fails."""
        _run("ip", "netns", "exec", self.names[host], *command)

    def add_second_network(self) -> None:
        """Joins the hosts by their interfaces eth1, too."""
        _add_network(self._switch, self.names, 1)

    def reset_connections(self, host: int, port: int) -> None:
        """Reset the connections of the host to and from that port. Raises HostsUnavailable."""
        either = f"sport = :{port} or dport = :{port}"
        self.run_on(host, "ss", "-K", "-t", "state", "established", f"( {either} )")

    @contextlib.contextmanager
    def unplugged(self, host: int, network: int = 0) -> Iterator[None]:
        """Pull a cable of the host: nothing comes from it there, and nothing to it."""
        port = _port(host, network)
        _run("ip", "-n", self._switch, "link", "set", port, "down")
        try:
            yield
        finally:
            _run("ip", "-n", self._switch, "link", "set", port, "up")

    def logging_agent(self, folder: Path) -> Path:
        """Returns a program that reaches hosts as ssh does, and logs its words and its environment in `folder`/log."""
        (agent := folder / "ssh").write_text(
            f'#!/bin/sh\n(echo "$@"; env) >> {folder}/log\nexec {self.environment["HYDRA_LAUNCHER_EXEC"]} "$@"\n'
        )
        agent.chmod(0o755)
        return agent

    @contextlib.contextmanager
    def bad_cable(self, delay_s: float = 0, loss: float = 0) -> Iterator[None]:
        """Between the hosts, in place of the switch: frames are late, or get lost by this probability."""
        ports = [f"port{index}" for index in range(len(self.names))]
        for port in ports:
            _run("ip", "-n", self._switch, "link", "set", port, "nomaster")
        program = [sys.executable, str(Path(__file__).with_name("bad_link.py"))]
        command = ["ip", "netns", "exec", self._switch, *program, str(delay_s), str(loss), *ports]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as cable:
            try:
                assert cable.stdout is not None and cable.stdout.readline() == "ready\n"
                yield
            finally:
                cable.kill()

    def bytes_sent(self, host: int, interface: str = "eth0") -> int:
        """Bytes that the host has sent to the others so far."""
        counter = f"/sys/class/net/{interface}/statistics/tx_bytes"
        result = subprocess.run(self.command_on(host, ["cat", counter]), capture_output=True, text=True, check=True)
        return int(result.stdout)


@contextlib.contextmanager
def simulated_hosts(count: int, rate: str | Sequence[str] | None = None) -> Iterator[SimulatedHosts]:
    """Make `count` hosts, and remove them afterwards with all that still runs on them.

    Args:
        count: number of hosts, 1 to 200.
        rate: limit of what each host sends, as `tc` writes it ("1gbit"), or a limit for each host, of what it sends and
            of what it receives; None is no limit.

    Raises:
        HostsUnavailable: not root, a program is missing, or the kernel refuses.
    """
    _require_root_and_programs(rate)
    _remove_stale()
    prefix = f"ringtrain{os.getpid()}-{next(_serial)}"
    names = [f"{prefix}-host{index}" for index in range(count)]
    switch = f"{prefix}-switch"
    with contextlib.ExitStack() as undo:
        for name in [switch, *names]:
            undo.callback(_remove, name)
            _run("ip", "netns", "add", name)
        _add_network(switch, names, 0)
        for index, name in enumerate(names):
            if rate is not None:
                _limit(name, "eth0", rate if isinstance(rate, str) else rate[index])
            if rate is not None and not isinstance(rate, str):
                _limit(switch, f"port{index}", rate[index])
        for name in names:
            _write_hosts_file(name, names)
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        agent = folder / "agent.sh"
        agent.write_text(_AGENT)
        agent.chmod(0o755)
        yield SimulatedHosts(names, agent, switch)


@contextlib.contextmanager
def hosts_or_skip(count: int, rate: str | Sequence[str] | None = None) -> Iterator[SimulatedHosts]:
    """Simulated hosts, or a skip that says why there are none."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(simulated_hosts(count, rate))
        except HostsUnavailable as reason:
            pytest.skip(str(reason))
        yield hosts


def _add_network(switch: str, names: Sequence[str], network: int) -> None:
    bridge, interface = f"bridge{network}", f"eth{network}"
    _run("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
    _run("ip", "-n", switch, "link", "set", bridge, "up")
    for index, name in enumerate(names):
        port = _port(index, network)
        _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", interface, "netns", name)
        _run("ip", "-n", switch, "link", "set", port, "master", bridge, "up")
        _run("ip", "-n", name, "address", "add", f"{_address(index, network)}/24", "dev", interface)
        _run("ip", "-n", name, "link", "set", interface, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")


def _port(index: int, network: int = 0) -> str:
    return f"port{index}" if network == 0 else f"port{index}net{network}"


def _limit(name: str, interface: str, rate: str) -> None:
    limit = ("root", "tbf", "rate", rate, "burst", "256k", "latency", "50ms")
    _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", interface, *limit)


def _address(index: int, network: int = 0) -> str:
    return f"10.{99 - network}.0.{index + 1}"


def _write_hosts_file(name: str, names: list[str]) -> None:
    lines = ["127.0.0.1 localhost", *(f"{_address(index)} {host}" for index, host in enumerate(names))]
    folder = _NETNS_FOLDER / name
    folder.mkdir(parents=True)
    (folder / "hosts").write_text("\n".join(lines) + "\n")


def _remove(name: str) -> None:
    if (_RUNNING_FOLDER / name).exists():
        for pid in _run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "delete", name)
    shutil.rmtree(_NETNS_FOLDER / name, ignore_errors=True)
    with contextlib.suppress(OSError):  # absent, or somebody else's namespaces have files there
        _NETNS_FOLDER.rmdir()


def _remove_stale() -> None:
    """Remove what a killed process could not."""
    folders = [folder for folder in (_RUNNING_FOLDER, _NETNS_FOLDER) if folder.exists()]
    for name in sorted({path.name for folder in folders for path in folder.iterdir()}):
        match = _NAME.fullmatch(name)
        if match is not None and not Path("/proc", match["pid"]).exists():
            _remove(name)


def _require_root_and_programs(rate: str | Sequence[str] | None) -> None:
    if os.geteuid() != 0:
        raise HostsUnavailable("simulated hosts need root, who may make network namespaces")
    programs = ["ip", "unshare", "hostname", *(["tc"] if rate is not None else [])]
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        raise HostsUnavailable(f"simulated hosts need {', '.join(missing)}; install iproute2, util-linux and hostname")


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        raise HostsUnavailable(f"simulated hosts: `{' '.join(command)}`: {result.stderr.strip()}")
    return result.stdout
