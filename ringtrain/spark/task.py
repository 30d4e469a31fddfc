"""A task of Spark that is a rank: what runs in a Python worker of an executor.

It connects to the driver (`ringtrain/spark/job.py`). Then they say:

    task                                             driver
    come: its partition and process             ->
                                                <-   begin: the variables of the rank; or refuse: why
    output: what the rank has written           ->
                                                <-   give_up: why
    failed: the exception; or ended             ->

The result of the rank is a result of the task.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pyspark import TaskContext

from ringtrain.job import engine_process
from ringtrain.job.rendezvous.lasting import GivenUpError, LastingConnection
from ringtrain.job.rendezvous.protocol import StrangerError
from ringtrain.job.rendezvous.server import Place, connect
from ringtrain.runner import installed
from ringtrain.runner.function import pickled_error, pickled_result

_CONNECT_S = 10.0
# How long the last word of a rank waits for a connection; and after how long without an answer another one is made.
_FAREWELL_S, _SILENT_S = 5.0, 3.0
# How long a task tries to reach its driver again, and how often it looks whether that is over.
_PATIENCE_S, _LOOK_S = 30.0, 1.0
_END_OF_OUTPUT_S = 1.0
_PART = 1 << 16

_DRIVER = "driver"  # the executor of a session without a cluster
_GPU = "gpu"
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"


class Call(NamedTuple):
    """The work of all ranks of a job, and the place of the driver."""

    place: Place
    secret: bytes
    function: bytes  # pickled with its arguments
    takes_partition: bool  # as its first argument
    finds_horovod: bool  # `import horovod` finds ringtrain in the driver, and so it does in the ranks


class Outcome(NamedTuple):
    """The result of a task; `result` is None if the rank has failed."""

    rank: int
    result: bytes | None


def get_available_devices() -> list[str]:
    """Return the addresses of the GPUs that Spark has given to this task. Mirrors `horovod.spark.task`.

    A rank that has some finds them in CUDA_VISIBLE_DEVICES, unless the job sets this variable. A process of
    `run_elastic` is beside its task, and gets what is in this variable.
    """
    context = TaskContext.get()
    if context is None:
        return [device for device in os.environ.get(GPUS_VARIABLE, "").split(",") if device]
    resources = context.resources()
    return list(resources[_GPU].addresses) if _GPU in resources else []


def run_rank(call: Call, partition: Iterator[Any]) -> Outcome:
    """Returns when the rank has ended, also after its exception, which the driver gets by another way.

    Spark repeats a task that fails, and all others of a barrier stage with it.

    Raises RuntimeError if the driver refuses this task.
    """
    with _Line(call) as line:
        variables = line.come()
        with _forwarded(line, keeps=executor_of_this_task() != _DRIVER):
            result, failure = _call(call, variables, partition)
        line.send({"kind": "ended"} if failure is None else {"kind": "failed", "error": failure.decode("latin-1")})
    return Outcome(int(variables["RINGTRAIN_RANK"]), result)


def _call(call: Call, variables: dict[str, str], partition: Iterator[Any]) -> tuple[bytes | None, bytes | None]:
    """Returns the result of the function, or the exception, pickled."""
    try:
        if call.finds_horovod and installed.HOROVOD_FOLDER not in sys.path:
            sys.path.append(installed.HOROVOD_FOLDER)
        function, args, kwargs = pickle.loads(call.function)
        of_partition = [partition] if call.takes_partition else []
        result = engine_process.call_as_rank(variables, call.secret, function, [*of_partition, *args], kwargs)
        return pickled_result(result, int(variables["RINGTRAIN_RANK"])), None
    except BaseException as error:
        traceback.print_exc()
        return None, pickled_error(error)


def executor_of_this_task() -> str:
    """Returns the name that Spark has for the executor of this process: it is on the command line of its Java."""
    parent = os.getppid()  # the daemon that forks Spark's Python workers, or Java itself
    for process in (parent, _parent_of(parent)):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
            return words[words.index("--executor-id") + 1]
    return _DRIVER


def _parent_of(process: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        # the name of the process, in brackets, may have spaces
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


class _Line:
    """The connection to the driver, as a context. Any thread may send."""

    def __init__(self, call: Call):
        whom = f"a task of ringtrain.spark has waited for the driver at {call.place}"
        connection = connect(call.place, call.place.ports, call.secret, _CONNECT_S, whom)
        self._talk = LastingConnection(connection, call.secret, _SILENT_S)
        self._has_ended = False

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *exception: object) -> None:
        self._has_ended = True
        self._talk.await_sent(_FAREWELL_S)
        self._talk.shut()
        self._talk.close()

    def come(self) -> dict[str, str]:
        """Returns the variables of this rank, when all tasks have come. Raises RuntimeError if it is refused."""
        context = TaskContext.get()
        assert context is not None
        process = engine_process.own_process()
        self._talk.send(
            {
                "kind": "come",
                "partition": context.partitionId(),
                "node": process.node,
                "process": f"executor {executor_of_this_task()} ({process.host}, pid {process.pid})",
                "gpus": get_available_devices(),
            }
        )
        try:
            answer = self._hear()
        except (OSError, StrangerError, GivenUpError) as error:
            raise RuntimeError(f"the driver of this job of ringtrain.spark has ended it: {error}") from None
        if answer["kind"] != "begin":
            raise RuntimeError(answer["reason"])
        threading.Thread(target=self._listen, name="ringtrain spark", daemon=True).start()
        variables: dict[str, str] = answer["variables"]
        return variables

    def send(self, message: dict[str, Any]) -> None:
        """A driver that is gone gets nothing; `_listen` notices that it is gone."""
        self._talk.send(message)

    def _listen(self) -> None:
        try:
            reason = str(self._hear()["reason"])
        except (OSError, StrangerError, GivenUpError) as error:
            reason = f"the driver is gone: {error}"
        if not self._has_ended:
            engine_process.give_up(reason)

    def _hear(self) -> Any:
        while self._talk.broken_for_s() < _PATIENCE_S:
            with contextlib.suppress(TimeoutError):
                for message in self._talk.hear(time.monotonic() + _LOOK_S):
                    return message
        raise TimeoutError(f"there was no connection to it for {_PATIENCE_S:g} s")


# --- what the rank writes ---------------------------------------------------------------------------------------------


@contextmanager
def _forwarded(line: _Line, keeps: bool) -> Iterator[None]:
    """A context in which the driver gets what this process and its children write.

    Args:
        keeps: it is also written where it would have been, which is the log of the executor.
    """

    def send(is_error: bool, data: bytes) -> None:
        line.send({"kind": "output", "is_error": is_error, "data": data.decode("latin-1")})

    streams = [_Redirected(1, sys.stdout), _Redirected(2, sys.stderr)]
    thread = threading.Thread(target=_copy, args=(streams, send, keeps), name="ringtrain output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        for stream in streams:
            stream.restore()
        thread.join(_END_OF_OUTPUT_S)  # a process that the rank has left behind may still hold a pipe


class _Redirected:
    """A descriptor of this process that is a pipe, until `restore`."""

    def __init__(self, descriptor: int, stream: Any):
        self._descriptor = descriptor
        self._stream = stream
        self._was_buffered = not getattr(stream, "line_buffering", True)
        stream.flush()
        self.before = os.dup(descriptor)
        self.pipe, end = os.pipe()
        os.dup2(end, descriptor)
        os.close(end)
        if self._was_buffered:
            stream.reconfigure(line_buffering=True)

    def restore(self) -> None:
        self._stream.flush()
        os.dup2(self.before, self._descriptor)
        if self._was_buffered:
            self._stream.reconfigure(line_buffering=False)


def _copy(streams: list[_Redirected], send: Callable[[bool, bytes], None], keeps: bool) -> None:
    with selectors.DefaultSelector() as selector:
        for is_error, stream in zip((False, True), streams, strict=True):
            selector.register(stream.pipe, selectors.EVENT_READ, (is_error, stream))
        while selector.get_map():
            for key, _ in selector.select():
                is_error, stream = key.data
                data = os.read(stream.pipe, _PART)
                if data:
                    send(is_error, data)
                    if keeps:
                        os.write(stream.before, data)
                else:
                    selector.unregister(stream.pipe)
    for stream in streams:
        os.close(stream.pipe)
        os.close(stream.before)
