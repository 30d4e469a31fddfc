"""A real Slurm cluster on one machine: slurmctld and a slurmd on each of a few simulated hosts.

    with slurm_cluster(2) as cluster:
        cluster.run("salloc", "-N", "2", "-n", "4", "ringrun", "python", "train.py")

Needs what cluster_hosts.py needs, and Debian's slurmctld, slurmd, slurm-client and, for Open MPI and Intel MPI,
libpmix-dev.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster_hosts import HOLDER, ClusterHosts, cluster_hosts
from harness.hosts import HostsUnavailable

# How the command lines begin of what a cluster without jobs consists of.
_OWN = ("slurmctld", "slurmd", ": slurmscriptd", HOLDER)
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
KillWait=8
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

    def __init__(self, hosts: ClusterHosts):
        self._hosts = hosts

    @property
    def folder(self) -> Path:
        """Seen by all hosts."""
        return self._hosts.folder

    @property
    def names(self) -> list[str]:
        """Of the hosts, as Slurm knows them."""
        return self._hosts.names

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's commands, over that of this process without what a launcher has told it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "TMPDIR": "/tmp"}

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs `words` on the first host."""
        return self._hosts.command(words)

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
        return [words for words in self._hosts.processes_on(host).values() if not words.startswith(_OWN)]

    @contextlib.contextmanager
    def lost_host(self, host: int) -> Iterator[None]:
        """All that runs there is killed, Slurm's own daemon too, which is started again afterwards."""
        self._hosts.kill_all_on(host)
        yield
        self.start_daemon(host)
        self.wait_until_idle()

    def start_daemon(self, host: int) -> None:
        """Slurm's on that host."""
        words = ["slurmd", "-D", "-N", self.names[host], "-f", str(self.folder / "slurm.conf")]
        self._hosts.start(host, words, self.environment)

    def wait_until_idle(self) -> None:
        """Until no host has a job. Raises HostsUnavailable if that does not come."""
        end = time.monotonic() + _START_S
        states: list[str] = []
        while time.monotonic() < end:
            states = self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
            if states == ["idle"] * len(self.names):
                return
            time.sleep(0.2)
        raise HostsUnavailable(f"the hosts of Slurm are {states}, not idle: {self._hosts.logs()}")


@contextlib.contextmanager
def slurm_cluster(count: int) -> Iterator[SlurmCluster]:
    """Start a cluster of so many hosts, of four processors each as far as Slurm knows, and end it with all its jobs.

    Raises:
        HostsUnavailable: as cluster_hosts; or Slurm does not start.
    """
    with cluster_hosts(count, "slurm", ["slurmctld", "slurmd", "srun"]) as hosts:
        cluster = SlurmCluster(hosts)
        (hosts.folder / "slurm.conf").write_text(_configuration(hosts))
        for name in hosts.names:
            (hosts.folder / f"spool-{name}").mkdir()
        hosts.start(0, ["slurmctld", "-D", "-f", str(hosts.folder / "slurm.conf")], cluster.environment)
        for host in range(count):
            cluster.start_daemon(host)
        cluster.wait_until_idle()
        yield cluster
        cluster.run("scancel", "--user=root", "--signal=KILL")


def _configuration(hosts: ClusterHosts) -> str:
    nodes = [
        f"NodeName={name} NodeAddr={address} CPUs={_CPUS} State=UNKNOWN"
        for name, address in zip(hosts.names, hosts.addresses, strict=True)
    ]
    first, address = hosts.names[0], hosts.addresses[0]
    return _CONFIGURATION.format(first=first, address=address, folder=hosts.folder, nodes="\n".join(nodes))
