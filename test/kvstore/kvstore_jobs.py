"""Jobs of workers, servers and a scheduler that are started one by one, as by hand, without a launcher or MPI."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.hosts import SimulatedHosts
from harness.socket_ranks import free_port

from ringtrain.job.rendezvous import secret

END_S = 60.0
# For tests that await the end of a job after the death of a worker: for so long the scheduler waits for another one.
SOON_OVER = {"RINGTRAIN_KV_HEARTBEAT_S": "0.5", "RINGTRAIN_KV_TIMEOUT_S": "4"}


class Process:
    """One of them; what it prints goes to a file."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], file: Path):
        self.name = name
        self.popen = popen
        self.pid = popen.pid
        self._file = file

    def output(self) -> str:
        return self._file.read_text()

    def wait_for(self, text: str, count: int = 1, within_s: float = END_S) -> None:
        """Until it has printed this so often."""
        deadline = time.monotonic() + within_s
        while self.output().count(text) < count:
            is_over = self.popen.poll() is not None or time.monotonic() > deadline
            assert not is_over or self.output().count(text) >= count, f"{self.name}: no {text!r} in:\n{self.output()}"
            time.sleep(0.005)

    def end(self, code: int = 0, within_s: float = END_S) -> str:
        """Returns what it has printed until its end."""
        try:
            self.popen.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} has not ended:\n{self.output()}") from None
        assert self.popen.returncode == code, f"{self.name} ended with {self.popen.returncode}:\n{self.output()}"
        return self.output()

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()


class Job:
    """`variables` are those of all its processes, which are on this host, or on simulated ones in turn."""

    def __init__(
        self, folder: Path, workers: int, servers: int, variables: dict[str, str], hosts: SimulatedHosts | None
    ):
        self._folder = folder
        self._hosts = hosts
        self.port = free_port()
        self.processes: list[Process] = []
        (folder / "home").mkdir(exist_ok=True)
        if not (folder / "secret").exists():
            secret.write(folder / "secret")
        self._variables = {
            secret.FILE_VARIABLE: str(folder / "secret"),
            "HOME": str(folder / "home"),
            "DMLC_PS_ROOT_URI": hosts.names[0] if hosts else "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(self.port),
            "DMLC_NUM_WORKER": str(workers),
            "DMLC_NUM_SERVER": str(servers),
            "OMP_NUM_THREADS": "1",
            # So long a scheduler waits for another worker, once none is left.
            "RINGTRAIN_KV_TIMEOUT_S": "10",
            **variables,
        }

    def start(self, role: str, arguments: Sequence[str], **variables: str) -> Process:
        """A process of Python. Variables beat those of the job; empty ones are not set."""
        environment = {**os.environ, **self._variables, "DMLC_ROLE": role, **variables}
        number = len(self.processes)
        file = self._folder / f"output-{number}"
        command = [sys.executable, "-u", *arguments]
        if self._hosts:
            command = self._hosts.command_on(number % len(self._hosts.names), command)
        with file.open("wb") as output:
            popen = subprocess.Popen(
                command,
                env={name: value for name, value in environment.items() if value},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(Process(f"{role or 'process'} {number}", popen, file))
        return self.processes[-1]

    def scheduler(self, **variables: str) -> Process:
        return self.start("scheduler", ["-m", "ringtrain.kvstore", "scheduler"], **variables)

    def server(self, **variables: str) -> Process:
        return self.start("server", ["-m", "ringtrain.kvstore", "server"], **variables)

    def worker(self, program: str, **variables: str) -> Process:
        return self.start("worker", ["-c", program], **variables)

    def outputs(self) -> str:
        return "\n".join(f"--- {process.name}\n{process.output()}" for process in self.processes)


@contextlib.contextmanager
def job(
    folder: Path, workers: int, servers: int, hosts: SimulatedHosts | None = None, **variables: str
) -> Iterator[Job]:
    """Kills what still runs at the end."""
    one = Job(folder, workers, servers, variables, hosts)
    try:
        yield one
    finally:
        for process in one.processes:
            if process.popen.poll() is None:
                process.kill()
