"""Processes that are forked after the imports of what they run, which take longer than most programs of tests.

    forks = forks_of("torch", "ringtrain.torch")  # a fixture of the module

    def test_a_program_ends(forks, tmp_path):
        process = forks.start(["-c", "print('here')"], dict(os.environ), tmp_path / "output")
        assert "here" in process.ends(60) and process.returncode == 0

Such a process has an environment and arguments of its own, may be killed, and ends as Python ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.rooms import TEST_FOLDER

END_S = 60.0
LOOKS_EVERY_S = 0.005


class Program(NamedTuple):
    """The message that asks for a process: `words` are ["-c", code] or a file and its arguments."""

    words: Sequence[str]
    environment: dict[str, str]
    output: Path

    def run(self) -> None:
        """In the new process: what Python does with these words."""
        descriptor = os.open(self.output, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        os.environ.clear()
        os.environ.update(self.environment)
        is_code = self.words[0] == "-c"
        code, name = (self.words[1], "<string>") if is_code else (Path(self.words[0]).read_text(), self.words[0])
        sys.argv = ["-c", *self.words[2:]] if is_code else list(self.words)
        sys.path[0] = "" if is_code else str(Path(name).parent)
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(code, name, "exec"), main.__dict__)


class Forked:
    """One of the processes. poll(), wait() and send_signal() are those of subprocess.Popen."""

    def __init__(self, pid: int, control: Connection, output: Path):
        self.pid = pid
        self.returncode: int | None = None
        self._control = control
        self._output = output

    def poll(self) -> int | None:
        """Returns the exit code, the negative number of a signal that ended the process, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._status_within(0)
        return self.returncode

    def wait(self, timeout: float = END_S) -> int:
        """Returns the exit code. Raises TimeoutExpired."""
        if self.returncode is None:
            self.returncode = self._status_within(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends it to a process that has not been waited for."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def ends(self, timeout: float) -> str:
        """Waits for its end; returns all that it has printed."""
        self.wait(timeout)
        return self._output.read_text()

    def wait_for(self, pattern: str | re.Pattern[str], timeout: float) -> None:
        """Waits until it has printed this."""
        deadline = time.monotonic() + timeout
        while not re.search(pattern, text := self._output.read_text()):
            assert self.poll() is None and time.monotonic() < deadline, f"no {pattern} in:\n{text}"
            time.sleep(LOOKS_EVERY_S)

    def _status_within(self, timeout: float) -> int | None:
        self._control.send((self.pid, timeout))
        status: int | None = self._control.recv()
        return status


class Forks:
    """Owns the process that has imported these modules; it is started when a test first needs it."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._owned = contextlib.ExitStack()
        self._control: Connection | None = None

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self._owned.close()

    def start(self, words: Sequence[str], environment: dict[str, str], output: Path) -> Forked:
        """Returns the process; what it prints is added to the file."""
        if self._control is None:
            self._control = self._parent()
        output.touch()
        self._control.send(Program(words, environment, output))
        return Forked(self._control.recv(), self._control, output)

    def _parent(self) -> Connection:
        """Starts it; returns the connection to it, at whose end it ends, too."""
        control, its_end = Pipe()
        path = os.pathsep.join([str(TEST_FOLDER), *(os.path.abspath(folder) for folder in sys.path)])
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()", str(its_end.fileno()), *self._modules],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            pass_fds=[its_end.fileno()],
        )
        its_end.close()
        self._owned.callback(process.wait, END_S)
        self._owned.callback(control.close)
        return control


def forks_of(*modules: str) -> Any:
    """Returns a fixture for a module: Forks for all of its tests."""

    @pytest.fixture(scope="module")
    def forks() -> Iterator[Forks]:
        with Forks(*modules) as those:
            yield those

    return forks


def main() -> None:
    """In the parent: forks and waits as it is asked to. In a child: runs its program."""
    control = Connection(int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    while True:
        try:
            request = control.recv()
        except EOFError:
            return
        if not isinstance(request, Program):
            control.send(_status_within(*request))
        elif child := os.fork():
            control.send(child)
        else:
            control.close()
            return request.run()


def _status_within(pid: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(LOOKS_EVERY_S)
