"""A job whose tasks come and go: the starter of elastic jobs, on tasks of Spark instead of hosts.

Each slot is a Spark job of one task, so the loss of a task fails no other one. The task runs an agent, which starts
processes of the job as on a host, and again after their failures. A slot that Spark has no core for stays in Spark's
queue: new cores make the job grow.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pyspark import SparkContext

from ringtrain.errors import RingtrainError, StalledError
from ringtrain.job.rendezvous.generations import Failed
from ringtrain.job.rendezvous.listener import ANSWER_S, Listener, bound
from ringtrain.job.rendezvous.protocol import Connection, StrangerError
from ringtrain.job.rendezvous.server import Place, connect
from ringtrain.runner import installed
from ringtrain.runner.function import CALL_FILE, error_file, result_file, unpickled_error, worker_command
from ringtrain.runner.hosts import Host
from ringtrain.runner.job import ElasticTerms
from ringtrain.runner.start import agent
from ringtrain.runner.start.agent import Order
from ringtrain.runner.start.elastic_starter import RESTARTS, Driver, starter_of
from ringtrain.runner.start.links import ContainerLink, Link, Share
from ringtrain.runner.start.placement import Placement
from ringtrain.runner.supervise import rank_wrapper
from ringtrain.runner.supervise.frames import FrameReader, LauncherSaid, Written
from ringtrain.runner.supervise.guard import command_of_guard
from ringtrain.runner.supervise.output import Output
from ringtrain.runner.supervise.supervisor import command_of_wrappers
from ringtrain.spark.job import Asked, error_of_spark, executors_in_words
from ringtrain.spark.task import GPUS_VARIABLE, executor_of_this_task, get_available_devices

_CONNECT_S = 10.0
_HELLO_BYTES = 1 << 16
# A host that has vanished is found out in three seconds.
_SILENCE_S = 3.0
_LOOK_S = 0.2
_GRACE_S = 5.0
# How long the results of a task may take, and how long a task may take to return whose connection was lost.
_RESULTS_S = 60.0
_LOST_S = 3.0
# After a Spark job of a slot that has failed, before the next one.
_PAUSE_S = 1.0

_numbers = itertools.count()


class Outcome(NamedTuple):
    """The end of a process with this number: its pickled result, or exception with the text of its traceback."""

    number: int
    is_result: bool
    data: bytes


# --- in the task ------------------------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """The work of a task, and the place of the driver."""

    place: Place
    secret: bytes
    function: bytes  # pickled with its arguments
    finds_horovod: bool
    number: int = 0


def serve(slot: Slot) -> list[Outcome]:
    """Runs an agent of the driver's starter until that lets it end. Returns the outcomes of its processes."""
    # Spark removes its own folder also where this process is killed
    of_spark = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0] or None
    with tempfile.TemporaryDirectory(prefix="ringtrain-spark-", dir=of_spark) as folder:
        Path(folder, CALL_FILE).write_bytes(slot.function)
        if slot.finds_horovod and installed.HOROVOD_FOLDER not in sys.path:
            sys.path.append(installed.HOROVOD_FOLDER)
        command = command_of_wrappers(worker_command(folder))
        whom = f"a task of ringtrain.spark has waited for the driver at {slot.place}"
        connection = connect(slot.place, slot.place.ports, slot.secret, _CONNECT_S, whom)
        name = f"{socket.gethostname()} executor {executor_of_this_task()}"
        hello = {"slot": slot.number, "name": name, "command": command, "folder": os.getcwd()}
        connection.send(hello, time.monotonic() + _CONNECT_S)
        way = connection.take_socket()
        way.setblocking(True)
        words = command_of_guard(os.getpid(), signal.SIGKILL, [sys.executable, "-I", "-S", agent.__file__])
        gpus = get_available_devices()
        environment = {**os.environ, GPUS_VARIABLE: ",".join(gpus)} if gpus else None
        process = subprocess.Popen(words, env=environment, stdin=way.fileno(), stdout=way.fileno(), stderr=way.fileno())
        way.close()
        process.wait()
        return list(_outcomes(Path(folder)))


def _outcomes(folder: Path) -> list[Outcome]:
    found = []
    for file in sorted(folder.iterdir()):
        kind, _, number = file.name.partition(".")
        if number.isdigit() and file in (result_file(folder, int(number)), error_file(folder, int(number))):
            found.append(Outcome(int(number), kind == "result", file.read_bytes()))
    return found


# --- in the driver ----------------------------------------------------------------------------------------------------


class ElasticJob:
    """One job; runs in the thread of the caller."""

    def __init__(self, context: SparkContext, first: int, terms: ElasticTerms, asked: Asked):
        """`first`: how many ranks it begins with. The terms say how many there are at most."""
        self._context = context
        self._first = first
        self._terms = terms
        self._asked = asked

    def run(self, function: bytes) -> list[Any]:
        """Returns the results of the processes that were ranks at the end, in the order of the ranks.

        Raises what `ringtrain.spark.run_elastic` raises.
        """
        most, secret = self._terms.most, secrets.token_bytes(32)
        assert most is not None
        output = Output(self._asked.screen, has_prefix=True, are_several=True, has_time=self._asked.has_time)
        placement = TaskPlacement(self._context, most, secret, function, self._asked, output)
        starter, driver = None, Driver(self._asked.screen.say, "min_num_proc")
        try:
            placement.start()
            first = self._await_slots(placement)
            listener = bound("", 0)
            placement.meeting_port = listener.getsockname()[1]
            starter = starter_of(first, self._terms, listener, secret, placement, _GRACE_S, driver)
            code = starter.run()
        finally:
            placement.close()
            if starter is not None:
                starter.close()
            output.close()
        return _results(code, placement.outcomes(), driver)

    def _await_slots(self, placement: TaskPlacement) -> int:
        """Returns with how many processes the job begins. Raises StalledError, and what Spark's jobs have failed of."""
        least, timeout_s = self._terms.least, self._asked.timeout_s
        end = time.monotonic() + timeout_s if timeout_s else float("inf")
        while (slots := len(placement.hosts())) < self._first:
            if placement.error is not None:
                raise error_of_spark(self._asked.name, placement.error)
            if time.monotonic() > end and slots >= least:
                break
            if time.monotonic() > end:
                raise StalledError(
                    f"{self._asked.name} has waited {timeout_s:g} s (start_timeout) for {least} tasks of Spark "
                    f"(min_num_proc), one for each rank: {slots} of them have a slot; "
                    f"{executors_in_words(self._context)}"
                )
            time.sleep(_LOOK_S)
        return min(self._first, slots)


def _results(code: int, outcomes: Sequence[Outcome], driver: Driver) -> list[Any]:
    results = {outcome.number: outcome.data for outcome in outcomes if outcome.is_result}
    numbers = [number for number in driver.generation if number in results]
    if code == 0 and numbers:
        return [pickle.loads(results[number]) for number in numbers]
    errors = [unpickled_error(outcome.data, outcome.number) for outcome in outcomes if not outcome.is_result]
    for error in sorted(errors, key=lambda error: isinstance(error, RingtrainError)):
        raise error
    raise RuntimeError("\n".join(driver.last_lines) or "no process of the elastic job ended with a result")


class _Arrival(NamedTuple):
    """A task that has come, and the command of its processes."""

    number: int  # of its slot
    way: socket.socket
    command: list[str]
    folder: str


class TaskPlacement(Placement):
    """One slot in each task that has come. A slot has the name of its executor and a number, which is never reused.

    Args:
        most: the number of tasks that Spark is asked for, all the time.
        secret: that of the job.
    """

    def __init__(
        self, context: SparkContext, most: int, secret: bytes, function: bytes, asked: Asked, output: Output
    ) -> None:
        self.meeting_port = 0  # of the rendezvous, before the first agent
        self.error: Exception | None = None  # of Spark, which gives no slots any more
        self._context = context
        self._most = most
        self._secret = secret
        self._environment = {
            "PYTHONUNBUFFERED": "1",
            "RINGTRAIN_NETWORK": "sockets",
            rank_wrapper.JOB_VARIABLE: secrets.token_hex(8),
            rank_wrapper.SPEAKER_VARIABLE: asked.name,
            **asked.env,
        }
        self._asked = asked
        self._output = output
        self._host = str(context.getConf().get("spark.driver.host"))
        self._group = f"{asked.name} {os.getpid()}-{next(_numbers)}"
        self._deliver: Callable[[Any], None] = lambda hosts: None
        self._lock = threading.Lock()  # of all below
        self._names = itertools.count()
        self._arrivals: dict[str, _Arrival] = {}  # by the name of the slot
        self._outcomes: list[Outcome] = []
        self._failures = 0  # of the function
        self._failures_of_spark = 0  # since a task has come
        self._waiting: set[int] = set()  # numbers of the slots whose task has not come yet
        self._lost_s: dict[int, float] = {}  # since when a slot has a task whose connection was lost, by its number
        self._has_ended = threading.Event()
        listener = bound("", 0)
        place = Place(self._host, [int(listener.getsockname()[1])])
        self._slot = Slot(place, secret, function, finds_horovod="ringtrain.horovod" in sys.modules)
        self._listener = Listener(listener, secret, self._let_in)
        self._threads = [
            threading.Thread(target=self._keep_slot, args=(number,), name="ringtrain spark slot", daemon=True)
            for number in range(most)
        ]

    def start(self) -> None:
        """Asks Spark for the tasks."""
        for thread in self._threads:
            thread.start()

    def hosts(self) -> list[Host]:
        with self._lock:
            return [Host(name, 1) for name in self._arrivals]

    def open_agent(self, host: str) -> Link:
        with self._lock:
            arrival = self._arrivals.get(host)
        if arrival is None:
            raise OSError(errno.ENOTCONN, "its task has ended", host)
        link = _TaskLink(
            Share(host, 0, 0, True),
            arrival.way,
            self._output,
            self._asked.screen.say,
            self._forget,
            self._note_code,
        )
        place, secret = f"{self._host}:{self.meeting_port}", self._secret.hex()
        order = Order(arrival.command, self._environment, arrival.folder, place, secret, host)
        link.order(order._asdict())
        return link

    @property
    def may_grow(self) -> bool:
        """Whether Spark may give other slots. They would not help a function that raises an exception of its own."""
        with self._lock:
            return self._failures <= RESTARTS

    def watch(self, deliver: Callable[[Any], None]) -> None:
        """`deliver` also gets Failed, where Spark gives no slots any more."""
        self._deliver = deliver
        deliver(self.hosts())  # one may have come just before
        if self.error is not None:
            self._give_up(self.error)

    def close(self) -> None:
        """Lets the tasks end: an agent ends where its connection ends. Spark ends what is left."""
        self._has_ended.set()
        self._listener.close()
        with self._lock:
            ways, waiting = [arrival.way for arrival in self._arrivals.values()], list(self._waiting)
            self._arrivals = {}
        for way in ways:
            with contextlib.suppress(OSError):  # its link has closed it
                way.shutdown(socket.SHUT_RDWR)
            way.close()
        for number in waiting:
            self._context.cancelJobGroup(self._group_of(number))
        end = time.monotonic() + _RESULTS_S
        for number, thread in enumerate(self._threads):
            until = self._lost_s[number] + _LOST_S if number in self._lost_s else end
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                self._context.cancelJobGroup(self._group_of(number))

    def outcomes(self) -> list[Outcome]:
        with self._lock:
            return list(self._outcomes)

    def _group_of(self, number: int) -> str:
        return f"{self._group} slot {number}"

    def _keep_slot(self, number: int) -> None:
        """A thread of its own: has one task in Spark all the time."""
        slot = self._slot._replace(number=number)
        while not self._has_ended.is_set():
            with self._lock:
                self._waiting.add(number)
            try:
                self._context.setJobGroup(self._group_of(number), f"{self._asked.name}: a slot")
                (outcomes,) = self._context.parallelize([0], 1).map(lambda _: serve(slot)).collect()
                with self._lock:
                    self._outcomes += outcomes
                    self._lost_s.pop(number, None)
            except Exception as error:
                self._note_failure_of_spark(error)
            self._has_ended.wait(_PAUSE_S)

    def _note_failure_of_spark(self, error: Exception) -> None:
        """The loss of a task is one. Tasks that never come are another matter."""
        with self._lock:
            self._failures_of_spark += 1
            is_over = self._failures_of_spark > RESTARTS * self._most
        if is_over and not self._has_ended.is_set():
            self.error = error
            self._give_up(error)
            self._has_ended.set()

    def _give_up(self, error: Exception) -> None:
        self._deliver(Failed(str(error_of_spark(self._asked.name, error))))

    def _let_in(self, connection: Connection) -> None:
        try:
            hello = connection.receive(_HELLO_BYTES, time.monotonic() + ANSWER_S)
            command = [str(word) for word in hello["command"]]
            name, number = str(hello["name"]), int(hello["slot"])
            arrival = _Arrival(number, connection.take_socket(), command, str(hello["folder"]))
        except (OSError, StrangerError, TypeError, KeyError, ValueError):
            connection.close()
            return
        connection.notice_silence(_SILENCE_S)
        with self._lock:
            self._arrivals[f"{name} slot {next(self._names)}"] = arrival
            self._failures_of_spark = 0
            self._waiting.discard(number)
            self._lost_s.pop(number, None)
        self._deliver(self.hosts())

    def _forget(self, host: str, is_lost: bool) -> None:
        """The link to the task is closed. Spark may begin a lost task again by itself."""
        with self._lock:
            arrival = self._arrivals.pop(host, None)
            if arrival is not None and is_lost:
                self._lost_s[arrival.number] = time.monotonic()
        if arrival is not None and not self._has_ended.is_set():
            self._deliver(self.hosts())

    def _note_code(self, code: int) -> None:
        """A process has ended with this exit code, as a shell gives it."""
        with self._lock:
            self._failures += 0 < code < 128


class _TaskLink(ContainerLink):
    """The link to the agent in a task. Its lines are reports, and frames of the wrappers of its processes."""

    def __init__(
        self,
        share: Share,
        way: socket.socket,
        output: Output,
        say: Callable[[str], None],
        on_close: Callable[[str, bool], None],
        on_code: Callable[[int], None],
    ):
        super().__init__(share, way, "of Spark")
        self._of_processes = output
        self._say = say
        self._on_close = on_close
        self._on_code = on_code
        self._is_told_to_end = False

    def order(self, order: Mapping[str, object]) -> None:
        super().order(order)
        self._is_told_to_end |= "finish" in order or ("end" in order and "rank" not in order)

    def end_in_words(self) -> str:
        return f"the task of {self._share.host} has ended"

    def close(self) -> None:
        super().close()
        self._on_close(self._share.host, not self._is_told_to_end)

    def _take_line(self, line: bytes, to: int) -> None:
        known = len(self._reports)
        super()._take_line(line, to)
        for report in self._reports[known:]:
            self._on_code(int(report["ended"][1]))

    def _pass_on(self, line: bytes, to: int) -> None:
        for event in FrameReader().feed(line + b"\n"):
            if isinstance(event, Written):
                self._of_processes.add(event)
            elif isinstance(event, LauncherSaid):
                self._say(event.data.decode(errors="replace").rstrip())
        self._of_processes.refresh()
