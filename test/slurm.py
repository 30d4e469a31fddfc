"""A real Slurm cluster on one machine: slurmctld and a slurmd on each of a few simulated hosts.

    with slurm_cluster(2) as cluster:
        cluster.run("salloc", "-N", "2", "-n", "4", "ringrun", "python", "train.py")

Each host has its own network, host name, /tmp and /dev/shm. All other folders are the same on all. Needs root, what
hosts.py needs, `nsenter`, and Debian's slurmctld, slurmd, slurm-client and, for Open MPI and Intel MPI, libpmix-dev.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hosts import HostsUnavailable, SimulatedHosts, simulated_hosts

_PROGRAMS = ("slurmctld", "slurmd", "srun", "nsenter")
_HOLDER = "sleep infinity"
# How the command lines begin of what a cluster without jobs consists of.
_OWN = ("slurmctld", "slurmd", ": slurmscriptd", _HOLDER)
_CPUS = 4
_START_S = 60
_CONFIGURATION = """\
ClusterName=ringtrain
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
SlurmdParameters=config_overrides
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=2
InactiveLimit=0
MessageTimeout=20
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """Commands run on the first host, as a user's do on a login node."""

    def __init__(
        self,
        hosts: SimulatedHosts,
        folder: Path,
        holders: list[subprocess.Popen[bytes]],
        daemons: contextlib.ExitStack,
    ):
        self.hosts = hosts
        self.folder = folder
        self._holders = holders
        self._daemons = daemons

    @property
    def names(self) -> list[str]:
        """Of the hosts, as Slurm knows them."""
        return self.hosts.names

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's commands, over that of this process without what a launcher has told it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "TMPDIR": "/tmp"}

    def command(self, words: Sequence[str], host: int = 0) -> list[str]:
        """The command line that runs `words` on a host."""
        return [
            *("nsenter", "--net", "--uts", "--mount", f"--target={self._holders[host].pid}"),
            *(f"--wd={os.getcwd()}", *words),
        ]

    def run(self, *words: str, timeout: float = 90, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host. Its two outputs are one text."""
        return subprocess.run(
            self.command(words),
            env={**os.environ, **self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )

    def jobs_on(self, host: int) -> list[str]:
        """The command lines of what runs there, but for what a cluster without jobs consists of."""
        return [words for words in self._processes_on(host).values() if not words.startswith(_OWN)]

    @contextlib.contextmanager
    def lost_host(self, host: int) -> Iterator[None]:
        """All that runs there is killed, Slurm's own daemon too, which is started again afterwards."""
        for pid, words in self._processes_on(host).items():
            if words != _HOLDER:
                os.kill(pid, signal.SIGKILL)
        yield
        self.start_daemon(host)
        self.wait_until_idle()

    def _processes_on(self, host: int) -> dict[int, str]:
        """The command lines of all that has its network, by pid."""
        own = os.stat(f"/proc/{self._holders[host].pid}/ns/net").st_ino
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.stat(entry / "ns/net").st_ino == own:
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if words:
                        found[int(entry.name)] = words
        return found

    def start_daemon(self, host: int) -> None:
        """Slurm's on that host."""
        words = ["slurmd", "-D", "-N", self.names[host], "-f", str(self.folder / "slurm.conf")]
        self._daemons.enter_context(_daemon(self, host, words))

    def wait_until_idle(self) -> None:
        """Until no host has a job. Raises HostsUnavailable if that does not come."""
        end = time.monotonic() + _START_S
        states: list[str] = []
        while time.monotonic() < end:
            states = self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
            if states == ["idle"] * len(self.names):
                return
            time.sleep(0.2)
        logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("*.log")))
        raise HostsUnavailable(f"the hosts of Slurm are {states}, not idle: {logs}")


@contextlib.contextmanager
def slurm_cluster(count: int) -> Iterator[SlurmCluster]:
    """Start a cluster of so many hosts, of four processors each as far as Slurm knows, and end it with all its jobs.

    Raises:
        HostsUnavailable: as simulated_hosts; or Slurm is not installed, or does not start.
    """
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        raise HostsUnavailable(f"{', '.join(missing)}: not installed; apt-get install slurmctld slurmd slurm-client")
    with contextlib.ExitStack() as undo:
        hosts = undo.enter_context(simulated_hosts(count))
        # not below /tmp, of which each host has its own
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", dir="/var/tmp")))
        holders = [undo.enter_context(_held(hosts, host, folder)) for host in range(count)]
        cluster = SlurmCluster(hosts, folder, holders, undo)
        (folder / "slurm.conf").write_text(_configuration(hosts, folder))
        for name in hosts.names:
            (folder / f"spool-{name}").mkdir()
        undo.enter_context(_daemon(cluster, 0, ["slurmctld", "-D", "-f", str(folder / "slurm.conf")]))
        for host in range(count):
            cluster.start_daemon(host)
        cluster.wait_until_idle()
        yield cluster
        cluster.run("scancel", "--user=root", "--signal=KILL")


def _configuration(hosts: SimulatedHosts, folder: Path) -> str:
    addresses = [f"10.99.0.{host + 1}" for host in range(len(hosts.names))]
    nodes = [
        f"NodeName={name} NodeAddr={address} CPUs={_CPUS} State=UNKNOWN"
        for name, address in zip(hosts.names, addresses, strict=True)
    ]
    return _CONFIGURATION.format(first=hosts.names[0], address=addresses[0], folder=folder, nodes="\n".join(nodes))


@contextlib.contextmanager
def _held(hosts: SimulatedHosts, host: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that keeps the namespaces of a host."""
    name = hosts.names[host]
    # Its /tmp is its own, but for what these tests are and run with.
    needed = {
        str(path) for path in (Path.cwd(), Path(sys.prefix), Path(sys.base_prefix)) if path.is_relative_to("/tmp")
    }
    kept = [(folder / f"kept-{host}-{number}", path) for number, path in enumerate(sorted(needed))]
    keep = "".join(f"mkdir {place} && mount --bind {path} {place} && " for place, path in kept)
    give_back = "".join(f"mkdir -p {path} && mount --bind {place} {path} && " for place, path in kept)
    script = f"""
        hostname {name} && mount --make-rprivate / &&
        mount --bind /etc/netns/{name}/hosts /etc/hosts && {keep}
        mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp && {give_back}
        echo ready && exec {_HOLDER}
    """
    words = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--mount", "--uts", "sh", "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            if holder.stdout.readline() != b"ready\n":
                raise HostsUnavailable(f"{name} cannot have mounts of its own")
            yield holder
        finally:
            holder.kill()


@contextlib.contextmanager
def _daemon(cluster: SlurmCluster, host: int, words: list[str]) -> Iterator[None]:
    with subprocess.Popen(
        cluster.command(words, host),
        env={**os.environ, **cluster.environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
