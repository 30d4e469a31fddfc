"""`ringtrain.spark.run(function)`: a function on ranks that are tasks of Spark. Mirrors `horovod.spark`.

Needs `pip install "ringtrain[spark]"` here, and ringtrain on the executors.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pyspark import RDD, SparkContext
from pyspark.sql import DataFrame

from ringtrain.runner import horovod_flags
from ringtrain.runner.function import (
    check_args,
    check_elastic,
    check_env,
    check_function,
    check_interfaces,
    check_num_proc,
    check_start_timeout,
    pickled_call,
)
from ringtrain.runner.job import ElasticTerms
from ringtrain.runner.supervise.output import PythonStreams, Screen
from ringtrain.spark.elastic_job import ElasticJob
from ringtrain.spark.job import Asked, Job, grows
from ringtrain.spark.task import Call, Outcome, get_available_devices as get_available_devices, run_rank

Result = TypeVar("Result")

# As of Horovod: executors that are started on demand may take minutes.
_TIMEOUT_S = 600.0
_OUTCOME = "outcome"


def run(
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Result]:
    """Call `fn(*args, **kwargs)` on tasks of Spark, each of which is one rank, and return the results of the ranks.

    Mirrors `horovod.spark.run`, with its arguments in its order. The function itself calls `ringtrain.init()`. It runs
    in the Python worker of its task, in one barrier stage, which Spark does not repeat. Where executors come on demand
    (`spark.dynamicAllocation.enabled`) it is an ordinary stage, since Spark has no barrier stages there. Ranks on one
    host follow each other and share memory.

    Args:
        fn: pickled by cloudpickle; so are the arguments and the results.
        num_proc: number of ranks; None is `spark.default.parallelism`.
        start_timeout: how long the ranks may take to come together, in seconds; None is HOROVOD_SPARK_START_TIMEOUT if
            that is set, else 600; 0 waits for ever.
        use_mpi, use_gloo, extra_mpi_args, executable: without effect, as a warning says. Ranks talk over sockets and
            shared memory, in the Python of `spark.pyspark.python`.
        env: variables for the ranks, while they are ranks.
        stdout: a stream of text or bytes that gets what the ranks print, each line with its rank before it; None is
            sys.stdout. The logs of the executors have it, too.
        stderr: the same for standard error.
        verbose: 2 also says in which process each rank is.
        nics: what the hosts talk through, such as ["eth0", "eth1"].
        prefix_output_with_timestamp: puts the time before each line.

    Returns:
        The results of the ranks, in their order.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, or out of its range.
        StalledError: Spark had too few slots for so many tasks for `start_timeout`; says how many there are.
        PeerLostError: a task or its executor was lost.
        RuntimeError: there is no SparkContext, Spark has ended the job, or the function called sys.exit().
        Exception: what the function raised on the rank that failed first. A note says which one it was, and on which
            executor.
    """
    context = _context()
    asked = _asked(
        "ringtrain.spark.run", start_timeout, env, stdout, stderr, verbose, nics, prefix_output_with_timestamp
    )
    _warn_of(use_mpi=use_mpi, use_gloo=use_gloo, extra_mpi_args=extra_mpi_args, executable=executable)
    size = context.defaultParallelism if num_proc is None else check_num_proc(num_proc)
    slots = context.parallelize(range(size), size)
    return Job(context, asked).run(_pickled(fn, args, kwargs), False, lambda call: _stage(context, slots, call))


def run_elastic(
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Result]:
    """Call `fn(*args, **kwargs)` on ranks that come and go with the tasks of Spark, and return the ranks' results.

    Mirrors `horovod.spark.run_elastic`, with its arguments in its order. The function calls `ringtrain.init()` and
    trains in a function decorated with `hvd.elastic.run`. Each slot is a task of a Spark job of its own, and each rank
    a new process beside it. The job goes on from the last commit in the same processes when a task or an executor is
    lost; a failed process is started again in its slot; Spark is asked for `max_num_proc` slots all the time, and the
    job grows when it gets one.

    Args:
        fn, args, kwargs, env, stdout, stderr, nics, prefix_output_with_timestamp: as of `run`. Lines begin with the
            number of the process, which is not its rank.
        num_proc: the number of ranks to begin with; None is `spark.default.parallelism`.
        min_num_proc: with fewer ranks the job waits, `elastic_timeout` at most; None is `num_proc`; `min_np` is the
            same.
        max_num_proc: so many ranks at most; None is the larger of `num_proc` and `spark.default.parallelism`; `max_np`
            is the same.
        start_timeout: how long `num_proc` tasks may take to come, in seconds, as of `run`. After that the job begins
            with those that have come, if these are `min_num_proc`.
        elastic_timeout: in seconds; None is HOROVOD_ELASTIC_TIMEOUT if that is set, else 600.
        reset_limit: how often the ranks may meet anew; None is no limit.
        verbose: without effect; the events of the job are always reported.

    Returns:
        The results of the processes that were ranks at the end, in the order of the ranks.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, or out of its range.
        StalledError: Spark had less than `min_num_proc` slots for `start_timeout`.
        RuntimeError: there is no SparkContext, or the job could not go on; says why.
        Exception: what the function raised on a rank, where the job could not go on.
    """
    context = _context()
    asked = _asked(
        "ringtrain.spark.run_elastic", start_timeout, env, stdout, stderr, verbose, nics, prefix_output_with_timestamp
    )
    first = context.defaultParallelism if num_proc is None else check_num_proc(num_proc)
    least = min_np if min_num_proc is None else min_num_proc
    most = max_np if max_num_proc is None else max_num_proc
    if elastic_timeout is None:
        elastic_timeout = _seconds_of("HOROVOD_ELASTIC_TIMEOUT")
    given = check_elastic(first, least, most, None, None, elastic_timeout, reset_limit, None)
    terms = ElasticTerms(
        given.min_np or first,
        given.max_np or max(first, context.defaultParallelism),
        timeout_s=float(elastic_timeout),
        reset_limit=given.reset_limit,
    )
    if not terms.least <= first <= (terms.most or first):
        raise ValueError(f"num_proc={first} must be between min_num_proc={terms.least} and max_num_proc={terms.most}")
    return ElasticJob(context, first, terms, asked).run(_pickled(fn, args, kwargs))


def run_on(
    data: DataFrame | RDD[Any],
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    batches: bool = False,
    start_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> list[Result]:
    """Call `fn(partition, *args, **kwargs)` on a rank for each partition of `data`, and return the ranks' results.

    As `run`, with a task that reads its partition. `data.repartition(4)` makes four ranks with about as many rows each.
    Partitions whose numbers of rows differ give the ranks different numbers of steps: see `ringtrain.join`.

    Args:
        data: a DataFrame or an RDD of a classic session.
        fn: its first argument is an iterator over the partition: over the rows of a DataFrame (`pyspark.sql.Row`), the
            elements of an RDD, or with `batches` over Arrow record batches.
        batches: of a DataFrame the partition is an iterator over `pyarrow.RecordBatch`, at most
            `spark.sql.execution.arrow.maxRecordsPerBatch` rows each. Needs pyarrow and pandas.
        args, kwargs, start_timeout, env, stdout, stderr, verbose, nics, prefix_output_with_timestamp: as of `run`.

    Returns:
        The results of the ranks, in their order. Rank 0 has the first partition. Ranks on one host follow each other,
        so the others have any partition.

    Raises:
        TypeError: `data` is not one of these, or `batches` is asked for of an RDD.
        Exception: as `run`.
    """
    context = _context()
    asked = _asked(
        "ringtrain.spark.run_on", start_timeout, env, stdout, stderr, verbose, nics, prefix_output_with_timestamp
    )
    function = _pickled(fn, args, kwargs)
    if not isinstance(data, (DataFrame, RDD)):
        raise TypeError(f"data must be a DataFrame or an RDD, not {type(data).__name__}")
    if batches and not isinstance(data, DataFrame):
        raise TypeError("batches=True needs a DataFrame: an RDD has no columns")

    def make_stage(call: Call) -> RDD[Outcome]:
        if isinstance(data, DataFrame):
            return _stage_of_batches(context, data, call) if batches else _stage(context, data.rdd, call)
        return _stage(context, data, call)

    return Job(context, asked).run(function, True, make_stage)


def _stage_of_batches(context: SparkContext, data: DataFrame, call: Call) -> RDD[Outcome]:
    """Spark gives record batches only to a function of a DataFrame, which gives some back."""

    def of_batches(partition: Iterator[Any]) -> Iterator[Any]:
        import pyarrow

        yield pyarrow.RecordBatch.from_arrays([[pickle.dumps(run_rank(call, partition))]], [_OUTCOME])

    with_outcomes = data.mapInArrow(of_batches, f"{_OUTCOME} binary", barrier=not grows(context))
    return with_outcomes.rdd.map(lambda row: pickle.loads(row[0]))


def _stage(context: SparkContext, rows: RDD[Any], call: Call) -> RDD[Outcome]:
    """The RDD of one outcome for each partition of `rows`."""

    def of_partition(partition: Iterable[Any]) -> list[Outcome]:
        return [run_rank(call, iter(partition))]

    return rows.mapPartitions(of_partition) if grows(context) else rows.barrier().mapPartitions(of_partition)


def _context() -> SparkContext:
    context = SparkContext._active_spark_context
    if context is None:
        raise RuntimeError(
            "there is no SparkContext in this process: make a session first, with SparkSession.builder.getOrCreate(). "
            "A session of Spark Connect has none; run this in the process of the driver"
        )
    return context


def _asked(
    name: str,
    start_timeout: float | None,
    env: Mapping[str, str] | None,
    stdout: Any,
    stderr: Any,
    verbose: int,
    nics: Iterable[str] | None,
    has_time: bool,
) -> Asked:
    if start_timeout is None:
        start_timeout = _seconds_of("HOROVOD_SPARK_START_TIMEOUT")
    timeout_s = check_start_timeout(start_timeout)
    interfaces = check_interfaces(nics)
    variables = {"RINGTRAIN_SOCKET_INTERFACES": interfaces} if interfaces else {}
    variables |= {"RINGTRAIN_START_TIMEOUT_S": str(timeout_s), **check_env(env)}
    screen = Screen(PythonStreams(stdout, stderr, name).print, speaker=name)
    return Asked(name, timeout_s, variables, screen, bool(has_time), is_verbose=verbose >= 2)


def _seconds_of(variable: str) -> float:
    text = os.environ.get(variable)
    try:
        return float(text) if text else _TIMEOUT_S
    except ValueError:
        raise ValueError(f"{variable}={text} is not a number of seconds") from None


def _pickled(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    check_function(fn)
    return pickled_call(fn, check_args(args), dict(kwargs or {}))


def _warn_of(use_mpi: bool | None, use_gloo: bool | None, extra_mpi_args: str | None, executable: str | None) -> None:
    sentences = horovod_flags.sentences_of_arguments({"use_gloo": use_gloo})
    for given, sentence in (
        (use_mpi, "use_mpi=True has no effect: tasks of Spark talk over sockets and shared memory"),
        (extra_mpi_args, "extra_mpi_args has no effect: tasks of Spark talk over sockets and shared memory"),
        (
            executable,
            "executable has no effect: ranks are in Python workers of Spark, whose Python is spark.pyspark.python",
        ),
    ):
        sentences += [sentence] if given else []
    for sentence in sentences:
        warnings.warn(sentence, stacklevel=3)
