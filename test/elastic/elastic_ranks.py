"""Processes of an elastic job that are started one by one, with its rendezvous in this process and no launcher."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.forked import Forked, Forks
from harness.hosts import SimulatedHosts

from ringtrain.job.rendezvous import secret
from ringtrain.job.rendezvous.elastic_server import ElasticServer
from ringtrain.job.rendezvous.generations import Done, Event, Failed, Formed, Left, Limits, Stuck
from ringtrain.job.rendezvous.listener import bound

END_S = 60.0


class Process:
    """One of them; what it prints goes to a file."""

    def __init__(self, number: int, popen: subprocess.Popen[bytes] | Forked, output: Path):
        self.member = f"here/{number}"
        self.popen = popen
        self._output = output

    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, text: str, count: int = 1) -> None:
        """Until it has printed this so often."""
        deadline = time.monotonic() + END_S
        while self.output().count(text) < count:
            assert self.popen.poll() is None and time.monotonic() < deadline, f"no {text!r} in:\n{self.output()}"
            time.sleep(0.003)

    def wait_for_connection(self) -> None:
        """Until it is connected to the rendezvous."""
        deadline = time.monotonic() + END_S
        descriptors = Path(f"/proc/{self.popen.pid}/fd")

        def is_socket(descriptor: Path) -> bool:
            with contextlib.suppress(FileNotFoundError):  # closed by now
                return os.readlink(descriptor).startswith("socket:")
            return False

        while not any(map(is_socket, descriptors.iterdir())):
            assert self.popen.poll() is None and time.monotonic() < deadline, f"not connected:\n{self.output()}"
            time.sleep(0.01)

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    def ends(self, code: int = 0) -> str:
        """Wait for its end; returns what it has printed."""
        assert self.popen.wait(END_S) == code, self.output()
        return self.output()


def _listen_on(hosts: SimulatedHosts) -> socket.socket:
    """At the first of the hosts, to which a thread goes for that."""
    sockets: list[socket.socket] = []

    def go_and_listen() -> None:
        with open(f"/run/netns/{hosts.names[0]}") as place:
            assert ctypes.CDLL(None, use_errno=True).setns(place.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        sockets.append(bound("", 0))

    thread = threading.Thread(target=go_and_listen)
    thread.start()
    thread.join()
    return sockets[0]


class Job:
    """The rendezvous on the first host, and the processes that were started for it, on those of ON_HOSTS in turn."""

    def __init__(
        self,
        program: list[str],
        folder: Path,
        limits: Limits,
        variables: dict[str, str],
        hosts: SimulatedHosts | None = None,
        forks: Forks | None = None,
    ):
        secret.write(folder / "secret")
        self._hosts = hosts
        self._forks = forks
        self._program = program
        self._folder = folder
        self._variables = variables
        self._changed = threading.Condition()
        self.events: list[tuple[float, Event]] = []
        self.processes: list[Process] = []
        listener = bound("127.0.0.1", 0) if hosts is None else _listen_on(hosts)
        self.server = ElasticServer(listener, secret.read(folder / "secret"), limits, self._note)

    def _note(self, event: Event) -> None:
        with self._changed:
            self.events.append((time.monotonic(), event))
            self._changed.notify_all()

    def start(self, count: int = 1, **variables: str) -> list[Process]:
        """That many processes more. Variables beat those of the job; empty ones are not set."""
        started = [self._start_one(variables) for _ in range(count)]
        self.processes += started
        return started

    def _start_one(self, variables: dict[str, str]) -> Process:
        number = len(list(self._folder.glob("output-*")))
        environment = {
            **os.environ,
            secret.FILE_VARIABLE: str(self._folder / "secret"),
            "RINGTRAIN_RENDEZVOUS": f"{self._hosts.names[0] if self._hosts else '127.0.0.1'}:{self.server.port}",
            "RINGTRAIN_ELASTIC": "1",
            "RINGTRAIN_MEMBER": f"here/{number}",
            "OMP_NUM_THREADS": "1",
            **self._variables,
            **variables,
        }
        environment = {name: value for name, value in environment.items() if value}
        output = self._folder / f"output-{number}"
        if self._forks is not None:
            return Process(number, self._forks.start(self._program, environment, output), output)
        command = [sys.executable, *self._program]
        if self._hosts is not None:
            places = [int(one) for one in environment.pop("ON_HOSTS", "").split()] or range(len(self._hosts.names))
            command = self._hosts.command_on(places[number % len(places)], command)
        with output.open("wb") as file:
            popen = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return Process(number, popen, output)

    def process(self, member: str) -> Process:
        (found,) = [process for process in self.processes if process.member == member]
        return found

    def wait_for(self, is_it: Callable[[Event], bool]) -> Event:
        """The first event that is it, also of those that have been."""
        with self._changed:
            found = self._changed.wait_for(lambda: next((one for _, one in self.events if is_it(one)), None), END_S)
        assert found, f"{self.events}\n{self.outputs()}"
        return found

    def formed(self, generation: int) -> Formed:
        event = self.wait_for(lambda one: isinstance(one, Formed) and one.generation >= generation)
        assert isinstance(event, Formed)
        return event

    def of(self, kind: type) -> list[Event]:
        with self._changed:
            return [one for _, one in self.events if isinstance(one, kind)]

    def outputs(self) -> str:
        return "\n".join(f"--- {process.member}\n{process.output()}" for process in self.processes)


@contextlib.contextmanager
def elastic_job(
    program: str | list[str],
    folder: Path,
    first: int,
    least: int = 1,
    most: int = 16,
    timeout_s: float = 30.0,
    reset_limit: int | None = None,
    hosts: SimulatedHosts | None = None,
    forks: Forks | None = None,
    **variables: str,
) -> Iterator[Job]:
    """A job of `first` processes, which are forked where forks are given; what still runs at the end is killed."""
    command = ["-c", program] if isinstance(program, str) else program
    job = Job(command, folder, Limits(first, least, most, timeout_s, reset_limit), variables, hosts, forks)
    try:
        job.start(first)
        yield job
    finally:
        for process in job.processes:
            if process.popen.poll() is None:
                process.kill()
        job.server.close()


__all__ = ["Done", "Failed", "Formed", "Job", "Left", "Process", "Stuck", "elastic_job"]
