"""A real SGE cluster on one machine: sge_qmaster and an sge_execd on each of a few simulated hosts, and a user.

    with sge_cluster(2) as cluster:
        cluster.run("qsub", "-sync", "y", "-pe", "mpi", "4", "script.sh")

SGE runs no jobs of root. Needs what cluster_hosts.py needs, `setpriv`, and Debian's gridengine-master, gridengine-exec
and gridengine-client.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from cluster_hosts import HOLDER, ClusterHosts, cluster_hosts
from harness.hosts import HostsUnavailable

USER, _USER_ID = "trainer", 4711
PARALLEL_ENVIRONMENT = "mpi"
SLOTS = 2  # of each host
_PROGRAMS = ("sge_qmaster", "sge_execd", "qsub", "setpriv")
_LIBRARY = Path("/usr/lib/gridengine")
_SHARE = Path("/usr/share/gridengine")
_OWN = ("/usr/lib/gridengine/sge_qmaster", "/usr/lib/gridengine/sge_execd", "sge_qmaster", "sge_execd", HOLDER)
_START_S = 60
_BOOTSTRAP = """\
admin_user none
default_domain none
ignore_fqdn false
spooling_method classic
spooling_lib libspoolc
spooling_params {common};{spool}
binary_path /usr/sbin
qmaster_spool_dir {spool}
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""
_PE = f"""\
pe_name {PARALLEL_ENVIRONMENT}
slots 999
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule $fill_up
control_slaves TRUE
job_is_first_task FALSE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""
_QUEUE = (
    f"""\
qname all.q
hostlist {{hosts}}
seq_no 0
load_thresholds NONE
suspend_thresholds NONE
nsuspend 1
suspend_interval 00:05:00
priority 0
min_cpu_interval 00:05:00
processors UNDEFINED
qtype BATCH INTERACTIVE
ckpt_list NONE
pe_list {PARALLEL_ENVIRONMENT}
rerun FALSE
slots {SLOTS}
tmpdir /tmp
shell /bin/sh
shell_start_mode posix_compliant
notify 00:00:60
initial_state default
"""
    + "".join(
        f"{name} NONE\n"
        for name in (
            *(
                "prolog",
                "epilog",
                "starter_method",
                "suspend_method",
                "resume_method",
                "terminate_method",
                "owner_list",
            ),
            *("user_lists", "xuser_lists", "subordinate_list", "complex_values", "projects", "xprojects", "calendar"),
        )
    )
    + "".join(
        f"{kind}_{name} INFINITY\n"
        for name in ("rt", "cpu", "fsize", "data", "stack", "core", "rss", "vmem")
        for kind in ("s", "h")
    )
)


class SgeCluster:
    """Commands run on the first host, by a user."""

    def __init__(self, hosts: ClusterHosts):
        self._hosts = hosts

    @property
    def names(self) -> list[str]:
        """Of the hosts, as SGE knows them."""
        return self._hosts.names

    @property
    def home(self) -> Path:
        """The folder of the user, seen by all hosts."""
        return self._hosts.folder / "home"

    @property
    def environment(self) -> dict[str, str]:
        """For SGE's commands, over that of this process."""
        return {
            "SGE_ROOT": str(self._hosts.folder / "root"),
            "SGE_CELL": "default",
            "SGE_QMASTER_PORT": "6444",
            "SGE_EXECD_PORT": "6445",
            "HOME": str(self.home),
            "TMPDIR": "/tmp",
        }

    def command(self, words: tuple[str, ...], user: str = USER) -> list[str]:
        """The command line that runs `words` on the first host."""
        return self._hosts.command(words, user=user)

    def run(self, *words: str, user: str = USER, timeout: float = 90, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host. Its two outputs are one text."""
        return subprocess.run(
            self.command(words, user),
            env={**os.environ, **self.environment, **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )

    def jobs_on(self, host: int) -> list[str]:
        """The command lines of what runs there, but for what a cluster without jobs consists of."""
        return [words for words in self._hosts.processes_on(host).values() if not words.startswith(_OWN)]

    def start(self) -> None:
        """Raises HostsUnavailable where it does not come to work."""
        folder = self._hosts.folder
        root, spool = folder / "root", folder / "spool"
        common = root / "default" / "common"
        for needed in (common, spool, folder / "execd", self.home):
            needed.mkdir(parents=True)
        os.chown(self.home, _USER_ID, _USER_ID)
        for programs in ("bin", "utilbin"):
            (root / programs).mkdir()
            (root / programs / "lx-amd64").symlink_to(_LIBRARY)
        (root / "util").symlink_to(_SHARE / "util")
        (common / "bootstrap").write_text(_BOOTSTRAP.format(common=common, spool=spool))
        (common / "act_qmaster").write_text(f"{self.names[0]}\n")
        configuration = (_SHARE / "default-configuration").read_text()
        for old, new in (("/var/spool/gridengine/execd", str(folder / "execd")), ("00:00:40", "00:00:01")):
            configuration = configuration.replace(old, new)
        (folder / "configuration").write_text(configuration)
        resources = _SHARE / "util" / "resources"
        self._set_up("spoolinit", "classic", "libspoolc", f"{common};{spool}", "init")
        self._set_up("spooldefaults", "configuration", str(folder / "configuration"))
        self._set_up("spooldefaults", "complexes", str(resources / "centry"))
        self._set_up("spooldefaults", "usersets", str(resources / "usersets"))
        self._set_up("spooldefaults", "managers", "root")
        # they stay in the foreground with SGE_ND
        self._hosts.start(0, ["sge_qmaster"], {**self.environment, "SGE_ND": "1"})
        self._wait(lambda: self._asks("-sh"), "sge_qmaster")
        for name in self.names:
            self._configure("-ah", name)
            self._configure("-as", name)
        scheduler = self.run("qconf", "-ssconf", user="root").stdout
        for setting in ("schedule_interval", "flush_submit_sec", "flush_finish_sec"):
            value = "0:0:1" if setting == "schedule_interval" else "1"
            scheduler = "\n".join(
                f"{setting} {value}" if line.startswith(setting) else line for line in scheduler.splitlines()
            )
        for flag, text in (
            ("-Msconf", f"{scheduler}\n"),
            ("-Ap", _PE),
            ("-Aq", _QUEUE.format(hosts=" ".join(self.names))),
        ):
            (file := folder / "to-be-read").write_text(text)
            self._configure(flag, str(file))
        for host in range(len(self.names)):
            self._hosts.start(host, ["sge_execd"], {**self.environment, "SGE_ND": "1"})
        self._wait(self._is_ready, "the hosts")

    def _set_up(self, program: str, *words: str) -> None:
        self._require(self.run(str(_LIBRARY / program), *words, user="root"), program)

    def _configure(self, *words: str) -> None:
        self._require(self.run("qconf", *words, user="root"), "qconf")

    def _asks(self, *words: str) -> bool:
        return self.run("qconf", *words, user="root").returncode == 0

    def _is_ready(self) -> bool:
        """Every host has told its load."""
        lines = [line.split() for line in self.run("qhost").stdout.splitlines()]
        told = [words[0] for words in lines if words and "-" not in words[3:4]]
        return all(name in told for name in self.names)

    def _require(self, done: subprocess.CompletedProcess[str], what: str) -> None:
        if done.returncode != 0:
            raise HostsUnavailable(f"{what} of SGE: {done.stdout}")

    def _wait(self, is_there, what: str) -> None:
        end = time.monotonic() + _START_S
        while not is_there():
            if time.monotonic() > end:
                messages = "\n".join(path.read_text() for path in self._hosts.folder.rglob("messages"))
                raise HostsUnavailable(f"{what} of SGE did not start: {messages[-2000:]}")
            time.sleep(0.2)


@contextlib.contextmanager
def sge_cluster(count: int) -> Iterator[SgeCluster]:
    """Start a cluster of so many hosts with SLOTS slots each, and end it with all its jobs.

    Raises:
        HostsUnavailable: as cluster_hosts; or SGE does not start.
    """
    files = {
        "/etc/passwd": f"{USER}:x:{_USER_ID}:{_USER_ID}::FOLDER/home:/bin/sh\n",
        "/etc/group": f"{USER}:x:{_USER_ID}:\n",
    }
    known = {path: Path(path).read_text() + line for path, line in files.items()}
    with cluster_hosts(count, "sge", _PROGRAMS, known, has_users=True) as hosts:
        cluster = SgeCluster(hosts)
        cluster.start()
        yield cluster
        cluster.run("qdel", "-f", "-u", USER, user="root")
