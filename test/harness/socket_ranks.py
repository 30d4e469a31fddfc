"""Ranks that are started one by one, without a launcher, and talk over sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.hosts import SimulatedHosts
from ringtrain.job.rendezvous import secret

END_S = 60.0


class Ranks:
    """Processes that run one program, with the environment of a rank each."""

    def __init__(self, processes: list[subprocess.Popen[str]]):
        self.processes = processes

    def outputs(self, codes: Sequence[int] = (), within_s: float = END_S) -> list[str]:
        """Returns what each has printed until its end; the exit codes must be these, by default all 0."""
        texts = [process.communicate(timeout=within_s)[0] for process in self.processes]
        found = [process.returncode for process in self.processes]
        assert found == (list(codes) or [0] * len(found)), "\n".join(texts)
        return texts


@contextlib.contextmanager
def started(
    program: str,
    size: int,
    folder: Path,
    hosts: SimulatedHosts | None = None,
    arguments: Sequence[str] = (),
    **variables: str,
) -> Iterator[Ranks]:
    """Rank r on host r of `hosts`, in turn; what still runs at the end is killed. Variables beat the usual ones."""
    file = folder / "secret"
    if not file.exists():
        secret.write(file)
    place = f"{_address_of_first(hosts)}:{free_port()}"
    usual = {secret.FILE_VARIABLE: str(file), "RINGTRAIN_RENDEZVOUS": place, "RINGTRAIN_SIZE": str(size)}
    processes = []
    try:
        for rank in range(size):
            command = [sys.executable, "-c", program, *arguments]
            if hosts is not None:
                command = hosts.command_on(rank % len(hosts.names), command)
            environment = {**os.environ, **usual, "RINGTRAIN_RANK": str(rank), **variables}
            processes.append(
                subprocess.Popen(
                    command,
                    env={name: value for name, value in environment.items() if value},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        yield Ranks(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()


def free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


def _address_of_first(hosts: SimulatedHosts | None) -> str:
    return "127.0.0.1" if hosts is None else hosts.names[0]
