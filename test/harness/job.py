"""One job: a launcher and its ranks, which run test after test until one fails or the next test wants another job."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import cast

from harness import processes
from harness.hosts import simulated_hosts
from harness.protocol import Answer, Hello, Task, launcher_file, output_file, socket_file, stacks_file
from harness.report import JobResult, RankResult, tail
from harness.rooms import TEST_FOLDER
from harness.spec import JobSpec, command

_START_S = 90.0
_CLOSE_S = 20.0
# How long the other ranks may take once one has failed or died: they often wait for it until the deadline.
_AFTER_FAILURE_S = 8.0
_STACKS_S = 3.0


class JobError(Exception):
    """The job could not be started or did not end as it should; the message says what was seen."""


class Job:
    """Owns the processes, the sockets, the simulated hosts and a folder for the files of one job."""

    def __init__(self, spec: JobSpec):
        """Start the job. Raises JobError, MpiNotFound, and HostsUnavailable where hosts cannot be simulated."""
        self.spec = spec
        self._connections: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._owned = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self._owned.close)
            self._start()
            self._connect()
            undo.pop_all()

    def run(self, task: Task, timeout_s: float) -> JobResult:
        """Run one test on all ranks, for at most `timeout_s` seconds."""
        offsets = {rank: _size_of(self._output(rank)) for rank in self._connections}
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # a dead rank shows below
                connection.send(task)
        answers, died = self._collect(timeout_s)
        launcher = self._describe_launcher() if died else ""
        hung = {rank: pid for rank, pid in self._pids.items() if rank not in answers and rank not in died}
        stacks = self._ask_for_stacks(hung)
        results = []
        for rank in range(self.spec.size):
            output = _read_from(self._output(rank), offsets[rank])
            if rank in answers:
                results.append(RankResult(*answers[rank], output))
            elif rank in died:
                results.append(RankResult("died", died[rank], output))
            else:
                results.append(RankResult("hung", f"it was still in the test; {stacks[rank]}", output))
        return JobResult(results, launcher)

    def close(self) -> None:
        """Makes the ranks shut down and end. Raises JobError if they do not, or not with exit status 0."""
        with contextlib.ExitStack() as always:
            always.callback(self.kill)
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.send(None)
            try:
                returncode = self._process.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                stacks = self._ask_for_stacks(self._pids)
                text = "\n\n".join(f"rank {rank}: {text}" for rank, text in stacks.items())
                raise JobError(f"the job did not end in {_CLOSE_S:g} s after its last test\n\n{text}") from None
            if returncode != 0:
                status = processes.describe_status(returncode)
                raise JobError(f"the job ended with {status} after its last test\n\n{self._outputs()}")

    def kill(self) -> None:
        """End the job at once."""
        self._owned.close()

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._owned.callback(shutil.rmtree, self._folder, ignore_errors=True)
        hosts = None
        if self.spec.hosts:
            hosts = self._owned.enter_context(simulated_hosts(len(self.spec.hosts), self.spec.rate or None))
        self._listener = self._owned.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(str(socket_file(self._folder)))
        self._listener.listen(self.spec.size)
        self._listener.settimeout(0.1)
        self._owned.callback(self._close_connections)
        start = command(self.spec, self._folder, hosts)
        with open(launcher_file(self._folder), "wb") as output:
            self._process = subprocess.Popen(
                start.line,
                env=processes.mark(start.environment, str(self._folder)),
                cwd=TEST_FOLDER,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for pytest, which then ends the job
                start_new_session=True,
            )
        self._owned.callback(processes.end, self._process, str(self._folder))

    def _connect(self) -> None:
        deadline = time.monotonic() + _START_S
        while len(self._connections) < self.spec.size:
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                self._require_starting(deadline)
                continue
            connection = Connection(accepted.detach())
            hello: Hello = connection.recv()
            if hello.rank in self._connections:
                connection.close()
                raise JobError(f"two processes say that they are rank {hello.rank}\n\n{self._outputs()}")
            self._connections[hello.rank] = connection
            self._pids[hello.rank] = hello.pid

    def _require_starting(self, deadline: float) -> None:
        returncode = self._process.poll()
        if returncode is None and time.monotonic() < deadline:
            return
        seen = processes.describe_status(returncode) if returncode is not None else f"no answer after {_START_S:g} s"
        here = f"{len(self._connections)} of {self.spec.size} ranks have started"
        raise JobError(f"the job does not start: {seen}; {here}\n\n{self._outputs()}")

    def _collect(self, timeout_s: float) -> tuple[dict[int, Answer], dict[int, str]]:
        """Answers, and how the ranks died that did; ranks in neither had not answered when the time was over."""
        answers: dict[int, Answer] = {}
        died: dict[int, str] = {}
        waiting = {connection: rank for rank, connection in self._connections.items()}
        deadline = time.monotonic() + timeout_s
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            order = f"after rank {', '.join(map(str, died))}" if died else "first"
            for connection in cast(list[Connection], wait(list(waiting), remaining)):
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    died[rank] = f"its process ended during the test, {order}"
                if rank in died or answers[rank].outcome == "failed":
                    deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
        return answers, died

    def _ask_for_stacks(self, pids: dict[int, int]) -> dict[int, str]:
        """The Python stacks of each process, by rank; a process that does not answer is told by its state."""
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        return {rank: self._read_stacks(rank, pid) for rank, pid in pids.items()}

    def _read_stacks(self, rank: int, pid: int) -> str:
        path = stacks_file(self._folder, rank)
        deadline = time.monotonic() + _STACKS_S
        size = 0
        while time.monotonic() < deadline:
            time.sleep(0.1)
            previous, size = size, _size_of(path)
            if size and size == previous:
                return f"its stacks:\n{_read_from(path, 0)}"
        return f"it writes no stacks; the state of process {pid} is {processes.state(pid)}"

    def _describe_launcher(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STACKS_S)
        status = processes.describe_status(self._process.poll())
        return f"the job: {status}\n{tail(_read_from(launcher_file(self._folder), 0))}"

    def _outputs(self) -> str:
        paths = [launcher_file(self._folder), *(self._output(rank) for rank in range(self.spec.size))]
        texts = [(path.stem, tail(_read_from(path, 0))) for path in paths if _size_of(path)]
        return "\n\n".join(f"{name} printed:\n{text}" for name, text in texts)

    def _output(self, rank: int) -> Path:
        return output_file(self._folder, rank)

    def _close_connections(self) -> None:
        for connection in self._connections.values():
            connection.close()


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read_from(path: Path, offset: int) -> str:
    return path.read_bytes()[offset:].decode(errors="replace") if path.exists() else ""
