"""The program of each rank: `python -m harness.worker FOLDER` runs test after test, as pytest asks for them."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import pickle
import select
import shutil
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import ModuleType

import pytest
from _pytest.assertion import install_importhook
from _pytest.assertion.rewrite import AssertionRewritingHook
from _pytest.config import get_config

import ringtrain
from harness import frameworks
from harness.protocol import Answer, Hello, Task, output_file, socket_file, stacks_file
from ringtrain.job import launched_by


def main(folder: Path) -> None:
    """Serve until pytest says that it was the last test."""
    launch = launched_by.detect()
    rank = launch.rank if launch else 0
    _redirect_output(output_file(folder, rank))
    _dump_stacks_on_signal(stacks_file(folder, rank))
    connection = Client(str(socket_file(folder)), "AF_UNIX")
    threading.Thread(target=_die_with_pytest, args=(connection.fileno(), folder), name="harness", daemon=True).start()
    hook = install_importhook(get_config([]))
    frameworks.become_rank()
    connection.send(Hello(rank, os.getpid()))
    _serve(connection, hook)


class _World:
    """Initialises between tests: for those that leave it to us, once for as many as need the same options.

    The ranks are in step: pytest has heard of all of them how a test ended before it sends the next one.
    """

    def __init__(self) -> None:
        self._options: tuple[tuple[str, str], ...] = ()
        self._is_shared = False

    def prepare(self, options: tuple[tuple[str, str], ...], initialise: bool) -> None:
        if initialise and self._is_shared and options == self._options:
            return
        self._is_shared = False
        ringtrain.shutdown()
        for name, _ in self._options:
            os.environ.pop(name, None)
        self._options = options
        os.environ.update(options)
        if initialise:
            ringtrain.init()
            self._is_shared = True

    def require_clean(self) -> None:
        """Raises AssertionError where the test leaves process sets: the next tests would meet them."""
        if self._is_shared and ringtrain.is_initialized():
            left = {number: ranks for number, ranks in ringtrain.get_process_set_ids_and_ranks().items() if number}
            self._is_shared = not left
            assert not left, f"the test leaves process sets: {left}"

    def end(self) -> None:
        if self._is_shared:
            ringtrain.shutdown()


def _serve(connection: Connection, hook: AssertionRewritingHook) -> None:
    world = _World()
    while True:
        task: Task | None = connection.recv()
        if task is None:
            break
        answer = _run(task, hook, world)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(answer)
    world.end()


def _run(task: Task, hook: AssertionRewritingHook, world: _World) -> Answer:
    try:
        body = getattr(_module(task, hook), task.function)
        world.prepare(task.options, task.initialise)
        body(**pickle.loads(task.pickled_arguments))
        world.require_clean()
    except pytest.skip.Exception as skip:
        return Answer("skipped", str(skip))
    except BaseException as error:
        # without this function's own frame
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        return Answer("failed", "".join(traceback.format_exception(type(error), error, frames)))
    return Answer("passed")


def _module(task: Task, hook: AssertionRewritingHook) -> ModuleType:
    """The test module under the name that pytest gave it, its asserts rewritten as pytest does it."""
    if task.module not in sys.modules:
        hook.mark_rewrite(task.module)
        spec = hook.find_spec(task.module, [str(task.path.parent)])
        if spec is None or spec.loader is None:
            raise ImportError(f"{task.path} cannot be imported as {task.module}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[task.module] = module
        spec.loader.exec_module(module)
    return sys.modules[task.module]


def _redirect_output(path: Path) -> None:
    """Files outlive a killed rank, and they take what C and C++ print, too."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _dump_stacks_on_signal(path: Path) -> None:
    faulthandler.enable()
    # never closed: the signal may come at any time
    faulthandler.register(signal.SIGUSR2, file=os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), all_threads=True)


def _die_with_pytest(descriptor: int, folder: Path) -> None:
    poller = select.poll()
    poller.register(descriptor, 0)  # no event but the hang-up, which poll always reports
    poller.poll()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
