"""A job whose ranks are the tasks of one Spark stage, as the driver knows it; `task.py` is their side."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from pyspark import RDD, SparkContext

from ringtrain.errors import PeerLostError, StalledError
from ringtrain.job import engine_process
from ringtrain.job.rendezvous.listener import Hub, Line, bound
from ringtrain.job.rendezvous.protocol import MOST_BYTES
from ringtrain.job.rendezvous.server import Place
from ringtrain.runner.function import unpickled_error
from ringtrain.runner.supervise.frames import Written
from ringtrain.runner.supervise.output import Output, Screen
from ringtrain.spark.task import GPUS_VARIABLE, Call, Outcome

_LOOK_S = 0.2
# How long ranks may take to end after another one has failed or is lost, and Spark after it was told to end the job.
_END_S = 10.0
# How long the connections of the tasks and Spark may take to tell the same thing.
_REASON_S = 1.0
_SILENT_S = 10.0
_TICK_S = 1.0

_POOL = "spark.scheduler.pool"

_numbers = itertools.count()


class Asked(NamedTuple):
    """The arguments of a job that do not depend on where its tasks come from."""

    name: str  # of the call, for messages
    timeout_s: float  # for the ranks to come together; 0: for ever
    env: dict[str, str]
    screen: Screen
    has_time: bool  # before each line that a rank writes
    is_verbose: bool


class _Task(NamedTuple):
    """A task that has come. `process` is for messages."""

    line: Line
    node: str
    process: str
    gpus: list[str]


class _Heard(NamedTuple):
    line: Line
    message: dict[str, Any]


class _Lost(NamedTuple):
    line: Line
    text: str


class _Ended(NamedTuple):
    """Spark's job has ended, with `outcomes` or of `error`."""

    outcomes: list[Outcome]
    error: Exception | None


class _Mail:
    """Messages for the thread of the caller: of the connections of the tasks, and of the thread of Spark's job."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[_Heard | _Lost | _Ended] = queue.SimpleQueue()

    def hear(self, line: Line, message: dict[str, Any]) -> None:
        self.events.put(_Heard(line, message))

    def lose(self, line: Line, text: str) -> None:
        self.events.put(_Lost(line, text))

    def tick(self) -> None:
        """Nothing is due."""


def slots_of(context: SparkContext) -> int | None:
    """Returns how many tasks can run at the same time, or None where Spark starts executors when tasks wait."""
    if grows(context):
        return None
    scala: Any = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def executors_in_words(context: SparkContext) -> str:
    """Returns the executors, and how busy they are."""
    scala: Any = context._jsc.sc()
    executors = [
        f"executor {one.host()}:{one.port()} runs {one.numRunningTasks()} tasks"
        for one in scala.statusTracker().getExecutorInfos()
    ]
    return ", ".join(executors) or "there are no executors"


def grows(context: SparkContext) -> bool:
    """Returns whether executors come when tasks wait: such a session refuses barrier stages."""
    is_dynamic = context.getConf().get("spark.dynamicAllocation.enabled", "false")
    has_executors = not context.master.startswith("local[") and context.master != "local"
    return str(is_dynamic).lower() == "true" and has_executors


class Job:
    """One job; runs in the thread of the caller."""

    def __init__(self, context: SparkContext, asked: Asked):
        self._context = context
        self._asked = asked
        self._size = 0
        self._deadline = float("inf")
        self._group = f"{asked.name} {os.getpid()}-{next(_numbers)}"
        self._mail = _Mail()
        self._tasks: dict[int, _Task] = {}  # by partition
        self._ranks: list[int] = []  # the partition of each, when all have come
        self._open: set[int] = set()  # partitions whose rank has not ended
        self._failures: list[tuple[int, BaseException]] = []  # by partition
        self._ended: _Ended | None = None
        self._output = Output(asked.screen, has_prefix=True, are_several=True, has_time=asked.has_time)

    def run(self, function: bytes, takes_partition: bool, make_stage: Callable[[Call], RDD[Outcome]]) -> list[Any]:
        """Returns the results of the ranks, in their order.

        Args:
            function: pickled with its arguments.
            make_stage: returns the RDD whose partitions are the tasks, each of which has one outcome.

        Raises what `ringtrain.spark.run` raises.
        """
        secret = secrets.token_bytes(32)
        self._hub = Hub(bound("", 0), secret, self._mail, _SILENT_S, _TICK_S, MOST_BYTES)
        self._meeting = engine_process.open_meeting(secret)
        self._hub.start()
        self._host = str(self._context.getConf().get("spark.driver.host"))
        place = Place(self._host, [self._hub.port])
        call = Call(place, secret, function, takes_partition, finds_horovod="ringtrain.horovod" in sys.modules)
        spark = None
        try:
            stage = make_stage(call)
            self._size = stage.getNumPartitions()
            self._deadline = time.monotonic() + self._asked.timeout_s if self._asked.timeout_s else float("inf")
            self._wait_for_slots()
            pool = self._context.getLocalProperty(_POOL)
            spark = threading.Thread(target=self._collect, args=(stage, pool), name="ringtrain spark job", daemon=True)
            spark.start()
            self._gather()
            self._begin()
            self._follow()
        except BaseException as error:
            self._give_up(f"the call of {self._asked.name} has ended: {type(error).__name__}: {error}")
            raise
        finally:
            if spark is not None and self._ended is None:
                self._context.cancelJobGroup(self._group)
                spark.join(_END_S)
            self._hub.close()
            engine_process.close_meeting(self._meeting)
            self._output.close()
        return self._results()

    def _collect(self, stage: RDD[Outcome], pool: str | None) -> None:
        """In a thread of its own. Spark keeps the group and the pool of each thread."""
        try:
            if pool is not None:
                self._context.setLocalProperty(_POOL, pool)
            self._context.setJobGroup(self._group, f"{self._asked.name}: {self._size} ranks")
            self._mail.events.put(_Ended(stage.collect(), None))
        except Exception as error:
            self._mail.events.put(_Ended([], error))

    # --- until the ranks begin ----------------------------------------------------------------------------------------

    def _wait_for_slots(self) -> None:
        """Spark would look for them for ten minutes, with messages in its log."""
        while (slots := slots_of(self._context)) is not None and slots < self._size:
            if time.monotonic() > self._deadline:
                raise StalledError(self._too_late(f"{slots} can run at the same time"))
            time.sleep(_LOOK_S)

    def _gather(self) -> None:
        """Until a task for each rank has come."""
        while len(self._tasks) < self._size:
            self._read_mail()
            if self._failures or self._ended is not None:
                raise self._reason()
            if time.monotonic() > self._deadline:
                raise StalledError(self._too_late(f"{len(self._tasks)} of them have a slot"))

    def _too_late(self, how_far: str) -> str:
        several = "s" if self._size > 1 else ""
        return (
            f"{self._asked.name} has waited {self._asked.timeout_s:g} s (start_timeout) for {self._size} "
            f"task{several} of Spark, one for each rank: {how_far}; {executors_in_words(self._context)}"
        )

    def _begin(self) -> None:
        """Ranks on one node follow each other; those of the first task's node come first."""
        nodes = {self._tasks[partition].node: None for partition in sorted(self._tasks)}
        self._ranks = [
            partition for node in nodes for partition in sorted(self._tasks) if self._tasks[partition].node == node
        ]
        tasks = [self._tasks[partition] for partition in self._ranks]
        place = f"{self._host}:{self._meeting}"
        variables = engine_process.variables_of_ranks([task.node for task in tasks], place, self._asked.env)
        for rank, task in enumerate(tasks):
            gpus = {GPUS_VARIABLE: ",".join(task.gpus)} if task.gpus else {}
            self._send(task.line, {"kind": "begin", "variables": {**gpus, **variables[rank]}})
            if self._asked.is_verbose:
                self._asked.screen.say(f"rank {rank} is in {task.process}")

    # --- from then on -------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Until Spark's job has ended, or a while after the first failure."""
        while self._ended is None and not self._failures:
            self._read_mail()
        if self._failures:
            engine_process.fail_meeting(self._meeting, self._in_words())
            self._read_until(lambda: self._ended is not None or not self._open, _END_S)
            self._give_up(self._in_words())
            # what has not ended by then is Spark's to end: a stage of which it has lost a task, a rank that computes
            self._read_until(lambda: self._ended is not None, _REASON_S)
        elif self._ended is not None and self._ended.error is not None:
            self._read_until(lambda: not self._open, _REASON_S)

    def _read_until(self, is_over: Callable[[], bool], longest_s: float) -> None:
        end = time.monotonic() + longest_s
        while not is_over() and time.monotonic() < end:
            self._read_mail()

    def _give_up(self, reason: str) -> None:
        engine_process.fail_meeting(self._meeting, reason)
        for partition in self._open:
            self._send(self._tasks[partition].line, {"kind": "give_up", "reason": reason})

    def _results(self) -> list[Any]:
        if self._failures or self._ended is None or self._ended.error is not None:
            raise self._reason()
        results = {outcome.rank: outcome.result for outcome in self._ended.outcomes}
        return [pickle.loads(results[rank] or b"") for rank in range(self._size)]

    def _reason(self) -> BaseException:
        """The exception that is not a consequence of another rank's, with a note that names the rank."""
        of_spark = None if self._ended is None else self._ended.error
        if not self._failures:
            return error_of_spark(self._asked.name, of_spark)
        partition, error = engine_process.first_failure(self._failures)
        error.__cause__ = error.__cause__ or of_spark
        return engine_process.with_note(error, f"{self._name(partition)}, {self._tasks[partition].process}")

    def _in_words(self) -> str:
        partition, error = self._failures[0]
        return f"{self._name(partition)} has failed: {type(error).__name__}: {error}"

    def _name(self, partition: int) -> str:
        return f"rank {self._ranks.index(partition)}" if self._ranks else f"the task of partition {partition}"

    # --- what the tasks say -------------------------------------------------------------------------------------------

    def _read_mail(self) -> None:
        """All that is there, or what comes within a moment."""
        with contextlib.suppress(queue.Empty):
            event = self._mail.events.get(timeout=_LOOK_S)
            while True:
                self._take(event)
                event = self._mail.events.get_nowait()
        self._output.refresh()

    def _take(self, event: _Heard | _Lost | _Ended) -> None:
        if isinstance(event, _Ended):
            self._ended = event
        elif isinstance(event, _Heard) and event.message["kind"] == "come":
            self._let_in(event.line, event.message)
        elif (partition := self._partition_of(event.line)) is None:
            return  # it was refused
        elif isinstance(event, _Lost):
            if partition in self._open:
                self._open.discard(partition)
                text = f"{self._name(partition)} is lost, {self._tasks[partition].process}: {event.text}"
                self._failures.append((partition, PeerLostError(text)))
        elif event.message["kind"] == "output":
            data = event.message["data"].encode("latin-1")
            self._output.add(Written(self._ranks.index(partition), bool(event.message["is_error"]), data))
        else:
            self._open.discard(partition)
            if event.message["kind"] == "failed":
                data = event.message["error"].encode("latin-1")
                self._failures.append((partition, unpickled_error(data, self._ranks.index(partition))))

    def _let_in(self, line: Line, message: dict[str, Any]) -> None:
        """Spark repeats a task that has failed, but not in a barrier stage. The job has failed then."""
        partition = int(message["partition"])
        if partition in self._tasks and not self._failures:
            self._open.discard(partition)
            text = f"Spark has lost {self._name(partition)}, {self._tasks[partition].process}, and begins it again"
            self._failures.append((partition, PeerLostError(text)))
        if self._failures:
            text = f"{self._asked.name} does not repeat a job that has failed: call it again, with a checkpoint"
            self._send(line, {"kind": "refuse", "reason": text})
            return
        line.name = str(partition)
        self._open.add(partition)
        self._tasks[partition] = _Task(line, str(message["node"]), str(message["process"]), list(message["gpus"]))

    def _partition_of(self, line: Line) -> int | None:
        return int(line.name) if line.name else None

    def _send(self, line: Line, message: dict[str, Any]) -> None:
        self._hub.call(lambda: self._hub.send(line, message))


# Of the text of Spark's exception, where a task ended without a word of its own.
_LOSSES = ("ExecutorLostFailure", "barrier task", "exited unexpectedly")


def error_of_spark(name: str, error: Exception | None) -> Exception:
    """Spark's own exception, which is the cause, has the log of a Java stack in its text."""
    text = str(error)
    reason = f"{name}: Spark has ended the job: {_first_reason(text)}"
    failure: Exception
    if "No module named 'ringtrain" in text:
        failure = RuntimeError(f'{reason}. Install "ringtrain[spark]" for the Python of the executors (PYSPARK_PYTHON)')
    elif any(loss in text for loss in _LOSSES):
        failure = PeerLostError(reason)
    else:
        failure = RuntimeError(reason)
    failure.__cause__ = error
    return failure


def _first_reason(text: str) -> str:
    lines = [line.strip(": ") for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Exception: " in line or "Error: " in line]
    return (named or lines or ["it does not say why"])[0]
