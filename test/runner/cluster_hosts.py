"""Simulated hosts that are further apart, for the batch systems of clusters: each also has its own /tmp and /dev/shm.

    with cluster_hosts(2, "slurm") as hosts:
        hosts.start(0, ["slurmctld", "-D"], {"SLURM_CONF": ...})
        subprocess.run(hosts.command(["srun", "hostname"], host=0))

All other folders are the same on all. Needs root, what hosts.py needs, and `nsenter`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.hosts import HostsUnavailable, SimulatedHosts, simulated_hosts

# The process that keeps the namespaces of a host.
HOLDER = "sleep infinity"


class ClusterHosts:
    """Names of the hosts, a folder that all of them see, and what runs there."""

    def __init__(self, names: list[str], folder: Path, holders: list[int], daemons: contextlib.ExitStack):
        """`holders` are process ids; `daemons` are ended with the hosts."""
        self.names = names
        self.addresses = [f"10.99.0.{host + 1}" for host in range(len(names))]
        self.folder = folder
        self._holders = holders
        self._daemons = daemons

    def command(self, words: Sequence[str], host: int = 0, user: str | None = None) -> list[str]:
        """The command line that runs `words` on a host, as root or as a user that is known there."""
        by_user = [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        return [
            *("nsenter", "--net", "--uts", "--mount", f"--target={self._holders[host]}"),
            *(f"--wd={os.getcwd()}", *by_user, *words),
        ]

    def start(self, host: int, words: Sequence[str], variables: Mapping[str, str]) -> None:
        """A daemon that stays in the foreground."""
        self._daemons.enter_context(_daemon(self.command(words, host), variables))

    def processes_on(self, host: int) -> dict[int, str]:
        """The command lines of all that has its network, by pid."""
        own = os.stat(f"/proc/{self._holders[host]}/ns/net").st_ino
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.stat(entry / "ns/net").st_ino == own:
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if words:
                        found[int(entry.name)] = words
        return found

    def kill_all_on(self, host: int) -> None:
        """As if it had lost its power."""
        for pid, words in self.processes_on(host).items():
            if words != HOLDER:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def logs(self) -> str:
        """The ends of what daemons have written into the folder."""
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def cluster_hosts(
    count: int,
    name: str,
    needed: Sequence[str],
    files: Mapping[str, str] | None = None,
    has_users: bool = False,
) -> Iterator[ClusterHosts]:
    """Make the hosts, and remove them afterwards with all that still runs on them.

    Args:
        name: begins the name of their folder.
        needed: programs without which there is no such cluster.
        files: what other text is to stand in some files of /etc on the hosts, by path; FOLDER is that folder.
        has_users: whether others than root may enter /root, which has then nothing but what these tests run with.

    Raises:
        HostsUnavailable: as simulated_hosts, or a program is missing.
    """
    missing = [program for program in ("nsenter", *needed) if shutil.which(program) is None]
    if missing:
        raise HostsUnavailable(f"{', '.join(missing)}: not installed; make {name}")
    with contextlib.ExitStack() as undo:
        hosts = undo.enter_context(simulated_hosts(count))
        # not below /tmp, of which each host has its own
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix=f"{name}-", dir="/var/tmp")))
        folder.chmod(0o755)
        mounts = []
        for number, (path, text) in enumerate((files or {}).items()):
            (own := folder / f"file-{number}").write_text(text.replace("FOLDER", str(folder)))
            mounts.append(f"mount --bind {own} {path}")
        own_folders = ["/tmp", "/root"] if has_users else ["/tmp"]
        holders = [undo.enter_context(_held(hosts, host, folder, mounts, own_folders)) for host in range(count)]
        yield ClusterHosts(hosts.names, folder, holders, undo)


@contextlib.contextmanager
def _held(
    hosts: SimulatedHosts, host: int, folder: Path, mounts: Sequence[str], own_folders: Sequence[str]
) -> Iterator[int]:
    """The pid of a process that keeps the namespaces of a host. In its own folders are what these tests run with."""
    name = hosts.names[host]
    roots = (Path.cwd(), Path(sys.prefix), Path(sys.base_prefix))
    needed = {str(path) for path in roots if any(path.is_relative_to(above) for above in own_folders)}
    kept = [(folder / f"kept-{host}-{number}", path) for number, path in enumerate(sorted(needed))]
    lines = [
        f"hostname {name}",
        "mount --make-rprivate /",
        f"mount --bind /etc/netns/{name}/hosts /etc/hosts",
        *mounts,
        *(f"mkdir {place} && mount --bind {path} {place}" for place, path in kept),
        "mount -t tmpfs tmpfs /dev/shm",
        *(f"mount -t tmpfs -o mode={1777 if path == '/tmp' else 755} tmpfs {path}" for path in own_folders),
        *(f"mkdir -p {path} && mount --bind {place} {path}" for place, path in kept),
        f"echo ready && exec {HOLDER}",
    ]
    words = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--mount", "--uts", "sh", "-c", " && ".join(lines)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            if holder.stdout.readline() != b"ready\n":
                raise HostsUnavailable(f"{name} cannot have mounts of its own")
            yield holder.pid
        finally:
            holder.kill()


@contextlib.contextmanager
def _daemon(command: Sequence[str], variables: Mapping[str, str]) -> Iterator[None]:
    with subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
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
