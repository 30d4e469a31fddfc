"""Jobs on a real Spark, in a session of threads and in one of executors on this host. `make spark` has Spark."""

from __future__ import annotations

import importlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest

pytest.importorskip("pyspark", reason="Spark is not installed in this environment: see `make spark`")

from pyspark.sql import SparkSession

import ringtrain as hvd
import ringtrain.horovod
import ringtrain.spark
from ringtrain.job.rendezvous.listener import bound
from ringtrain.optim import SGD
from ringtrain.spark import job, task

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import it
pytestmark = pytest.mark.xdist_group("spark")

# A JVM of a test lives too short for what the second compiler and several threads of the collector would gain.
OF_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "600m",
    "spark.executor.memory": "500m",
    "spark.log.level": "OFF",
    **{f"spark.{side}.extraJavaOptions": OF_JAVA for side in ("driver", "executor")},
}


def session_on(master, more=None):
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(master)
    for name, value in {**SETTINGS, **(more or {})}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


@pytest.fixture(scope="module")
def spark():
    """Three slots, in one Java."""
    session = session_on("local[3]")
    yield session
    session.stop()


@pytest.fixture(scope="module")
def cluster(spark):
    """Two executors of one slot. One process has one session, so that of `spark` ends."""
    spark.stop()
    session = session_on("local-cluster[2,1,600]")
    yield session
    session.stop()


def rank_and_sum(shift):
    hvd.init()
    total = hvd.allreduce(np.full(4, hvd.rank() + shift), op=hvd.Sum)
    return hvd.rank(), hvd.size(), hvd.local_rank(), total.tolist(), os.environ.get("OF_THE_JOB")


def test_results_are_in_the_order_of_the_ranks_and_nothing_of_the_job_stays(spark):
    for _ in range(2):
        results = ringtrain.spark.run(rank_and_sum, (1.0,), env={"OF_THE_JOB": "yes"})
        assert results == [(rank, 3, rank, [6.0] * 4, "yes") for rank in range(3)]
    assert len(ringtrain.spark.run(rank_and_sum, kwargs={"shift": 0}, num_proc=2)) == 2

    def left(_):
        names = ("OF_THE_JOB", "RINGTRAIN_RANK", "RINGTRAIN_RENDEZVOUS", "RINGTRAIN_SECRET_FILE")
        return [[os.environ.get(name) for name in names], hvd.is_initialized()]

    assert spark.sparkContext.range(3, numSlices=3).map(left).collect() == [[[None] * 4, False]] * 3


def hello(magic_number):
    import horovod.torch as hvd

    hvd.init()
    numbers = (hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size(), magic_number)
    print("Hello, rank = {}, local_rank = {}, size = {}, local_size = {}, magic_number = {}".format(*numbers))
    return hvd.rank()


def test_the_session_of_horovods_documentation_prints_and_returns_the_same(spark, capsys):
    import horovod.spark

    assert horovod.spark.run is ringtrain.spark.run
    assert horovod.spark.run(hello, args=(42,)) == [0, 1, 2]
    printed = capsys.readouterr().out.splitlines()
    hellos = [f"[{rank}] Hello, rank = {rank}, local_rank = {rank}, size = 3, local_size = 3" for rank in range(3)]
    assert sorted(printed) == [f"{line}, magic_number = 42" for line in hellos]


def test_estimators_say_the_way(spark):
    with pytest.raises(ImportError, match=r"estimators .* do not come; ringtrain.spark.run_on\(data_frame, function\)"):
        importlib.import_module("horovod.spark.keras")
    with pytest.raises(ImportError, match="estimators and stores do not come"):
        importlib.import_module("horovod.spark.common.store")


def write_on_both(words):
    hvd.init()
    if hvd.rank() == 1:
        print(words)
        os.system("echo of a child >&2")


def test_given_streams_get_what_ranks_and_their_children_write(spark):
    out, err = io.StringIO(), io.BytesIO()
    ringtrain.spark.run(write_on_both, ("größer",), num_proc=2, stdout=out, stderr=err)
    assert (out.getvalue(), err.getvalue()) == ("[1] größer\n", b"[1] of a child\n")
    ringtrain.spark.run(write_on_both, ("late",), num_proc=2, stdout=out, stderr=err, prefix_output_with_timestamp=True)
    assert re.search(r"\n.*\d\d:\d\d:\d\d.*\[1\] late\n$", out.getvalue())


DATA = np.random.default_rng(0).integers(-2, 3, (32, 3)).astype(float)
LABELS = DATA @ np.array([1.0, 2.0, -1.0])


def train(rows, steps):
    """As one process on all rows, however they are dealt."""
    hvd.init()
    table = np.array([list(row) for row in rows])
    inputs, targets = table[:, :-1], table[:, -1]
    weights = hvd.broadcast(np.full(3, float(hvd.rank())), root_rank=0)
    optimizer = hvd.DistributedOptimizer(SGD(lr=0.25), op=hvd.Sum)
    for _ in range(steps):
        optimizer.step([weights], [inputs.T @ (inputs @ weights - targets) / 32])
    return hvd.rank(), len(table), weights


def rows_of_batches(batches, steps):
    import pyarrow

    table = pyarrow.Table.from_batches(list(batches))
    return train(zip(*(column.to_pylist() for column in table.columns), strict=True), steps)


@pytest.mark.parametrize("kind", ["rows", "batches", "rdd"])
def test_ranks_train_on_their_partitions_as_one_process_on_all(spark, kind):
    rows = [(*map(float, row), float(label)) for row, label in zip(DATA, LABELS, strict=True)]
    frame = spark.createDataFrame(rows, "a double, b double, c double, label double").repartition(2)
    if kind == "batches":
        results = ringtrain.spark.run_on(frame, rows_of_batches, (20,), batches=True)
    else:
        results = ringtrain.spark.run_on(frame.rdd.map(tuple) if kind == "rdd" else frame, train, (20,))
    alone = np.zeros(3)
    for _ in range(20):
        alone = alone - 0.25 * (DATA.T @ (DATA @ alone - LABELS) / 32)
    assert [rank for rank, _, _ in results] == [0, 1] and sum(count for _, count, _ in results) == 32
    assert np.array_equal(results[0][2], results[1][2])
    np.testing.assert_allclose(results[0][2], alone, rtol=1e-12)


def leave_rows_unread(rows):
    hvd.init()
    return next(rows), float(hvd.allreduce(np.ones(()), op=hvd.Sum))


def test_a_rank_may_leave_a_part_of_its_partition(spark):
    for _ in range(2):
        results = ringtrain.spark.run_on(spark.sparkContext.range(100_000, numSlices=2), leave_rows_unread)
        assert results == [(0, 2.0), (50_000, 2.0)]


def train_torch(learning_rate):
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 1)
    inputs = torch.randn(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item(), model.weight.tolist()


def test_torch_trains_by_the_names_of_horovod(spark):
    (loss, weights), (_, same) = ringtrain.spark.run(train_torch, (0.05,), num_proc=2)
    assert weights == same and loss < 1e-2


def fail_on_rank_1(leave):
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        leave()
    return hvd.allreduce(np.ones(3))


def raise_key_error():
    raise KeyError("mine")


def kill_own_process():
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_exception_of_a_rank_is_raised_in_the_driver_and_ends_the_others(spark, capsys):
    with pytest.raises(KeyError, match="mine") as seen:
        ringtrain.spark.run(fail_on_rank_1, (raise_key_error,))
    if sys.version_info >= (3, 11):
        assert re.match(r"ringtrain: rank 1, executor driver \(\S+, pid \d+\)", seen.value.__notes__[0])
    assert "raise_key_error" in str(seen.value.__cause__)
    with pytest.raises(RuntimeError, match=r"rank 1 has left the function by sys.exit\(3\)"):
        ringtrain.spark.run(fail_on_rank_1, (lambda: sys.exit(3),))
    assert "[1] KeyError: 'mine'" in capsys.readouterr().err.splitlines()
    assert len(ringtrain.spark.run(rank_and_sum, (0,))) == 3


def count_and_die(folder):
    with open(f"{folder}/begun", "a") as file:
        file.write(".")
    fail_on_rank_1(kill_own_process)


def test_a_killed_task_is_a_lost_peer_within_seconds_and_spark_does_not_begin_it_again(spark, tmp_path):
    begin = time.monotonic()
    with pytest.raises(hvd.PeerLostError, match=r"rank 1 .*"):
        ringtrain.spark.run(count_and_die, (str(tmp_path),))
    assert time.monotonic() - begin < 30
    assert len(ringtrain.spark.run(rank_and_sum, (0,))) == 3
    assert (tmp_path / "begun").read_text() == "..."


def sum_for_a_while(begun):
    hvd.init()
    for step in range(100):
        np.testing.assert_array_equal(hvd.allreduce(np.full(3, float(step))), np.full(3, float(step)))
        time.sleep(0.02)
        if step == 5:
            Path(begun).touch()
    return hvd.rank()


def test_connections_to_the_driver_that_are_reset_cost_no_rank(spark, tmp_path, monkeypatch):
    ports, reset = [], []

    def remembered(host, port):
        sock = bound(host, port)
        ports.append(sock.getsockname()[1])
        return sock

    def reset_connections():
        words = ["ss", "-K", "-H", "-t", "state", "established", f"( sport = :{ports[0]} or dport = :{ports[0]} )"]
        reset.extend(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines())

    monkeypatch.setattr(job, "bound", remembered)
    after(tmp_path / "begun", reset_connections)
    assert ringtrain.spark.run(sum_for_a_while, (str(tmp_path / "begun"),)) == [0, 1, 2]
    assert len(reset) >= 3  # one side of each at least


def test_a_task_gives_up_a_driver_that_it_has_not_reached_for_long():
    """Its connection is broken for so many seconds, one look after the other."""
    looks = iter([0.0, 1.0, task._PATIENCE_S - 1, task._PATIENCE_S])

    def hear(deadline):
        raise TimeoutError

    line = object.__new__(task._Line)
    line._talk = SimpleNamespace(broken_for_s=lambda: next(looks), hear=hear)
    with pytest.raises(TimeoutError, match="there was no connection to it for 30 s"):
        line._hear()
    assert next(looks, None) is None


def die_before_init():
    if os.environ["RINGTRAIN_RANK"] == "2":
        kill_own_process()
    hvd.init()


def test_a_task_that_dies_before_init_fails_the_ranks_that_wait_for_it(spark):
    begin = time.monotonic()
    with pytest.raises(hvd.PeerLostError, match=r"rank 2 is lost, executor driver .*: its process has ended"):
        ringtrain.spark.run(die_before_init)
    assert time.monotonic() - begin < 60  # of 600 seconds for which ranks may wait in init()
    assert len(ringtrain.spark.run(rank_and_sum, (0,))) == 3


def compute_while_another_fails():
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 0:
        raise_key_error()
    while True:
        time.sleep(0.1)


def test_a_rank_that_computes_after_another_has_failed_keeps_no_slot(spark, monkeypatch):
    monkeypatch.setattr(ringtrain.spark.job, "_END_S", 2.0)
    with pytest.raises(KeyError, match="mine"):
        ringtrain.spark.run(compute_while_another_fails)
    assert len(ringtrain.spark.run(rank_and_sum, (0,), start_timeout=60)) == 3


def test_rows_that_cannot_be_read_are_told_with_their_reason(spark):
    def fails(number):
        raise LookupError(f"no row {number}")

    def read(rows):
        hvd.init()
        return len(list(rows))

    with pytest.raises((LookupError, RuntimeError, hvd.RingtrainError)) as seen:
        ringtrain.spark.run_on(spark.sparkContext.range(4, numSlices=2).map(fails), read)
    assert "no row" in f"{seen.value} {seen.value.__cause__}"


def test_too_few_slots_are_told_with_what_there_is(spark):
    with pytest.raises(hvd.StalledError) as seen:
        ringtrain.spark.run(rank_and_sum, (0,), num_proc=4, start_timeout=1)
    expected = r"waited 1 s \(start_timeout\) for 4 tasks of Spark, .*: 3 can run at the same time; executor \S+ runs 0"
    assert re.search(expected, str(seen.value))


def running_tasks(context):
    return sum(one.numRunningTasks() for one in context._jsc.sc().statusTracker().getExecutorInfos())


@contextmanager
def busy_slot(context, folder):
    """A slot that has a task until the file "over" exists in the folder."""

    def keep(_):
        (folder / "busy").touch()
        while not (folder / "over").exists():
            time.sleep(0.05)

    thread = threading.Thread(target=lambda: context.range(1, numSlices=1).map(keep).collect())
    thread.start()
    try:
        # Spark counts it a little after it has begun.
        while not (folder / "busy").exists() or running_tasks(context) == 0:
            time.sleep(0.05)
        yield
    finally:
        (folder / "over").touch()
        thread.join()


def test_busy_slots_are_told_and_waited_for(spark, tmp_path):
    with busy_slot(spark.sparkContext, tmp_path):
        with pytest.raises(
            hvd.StalledError, match=r"for 3 tasks of Spark, .*: 0 of them have a slot; executor \S+ runs 1"
        ):
            ringtrain.spark.run(rank_and_sum, (0,), start_timeout=2)
        threading.Timer(1, (tmp_path / "over").touch).start()
        assert len(ringtrain.spark.run(rank_and_sum, (0,), start_timeout=60)) == 3


def endless(file):
    hvd.init()
    hvd.barrier()
    open(file, "w").close()
    while True:
        hvd.allreduce(np.ones(1000), name="on and on")


def after(begun, function):
    def wait():
        while not begun.exists():
            time.sleep(0.05)
        function()

    threading.Thread(target=wait, daemon=True).start()


def test_ctrl_c_in_the_driver_ends_the_ranks(spark, tmp_path):
    after(tmp_path / "begun", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        ringtrain.spark.run(endless, (str(tmp_path / "begun"),))
    assert len(ringtrain.spark.run(rank_and_sum, (0,), start_timeout=60)) == 3


def test_a_job_that_spark_cancels_ends(spark, tmp_path):
    after(tmp_path / "begun", spark.sparkContext.cancelAllJobs)
    with pytest.raises((RuntimeError, hvd.RingtrainError)):
        ringtrain.spark.run(endless, (str(tmp_path / "begun"),))
    assert len(ringtrain.spark.run(rank_and_sum, (0,), start_timeout=60)) == 3


def test_arguments_are_checked(spark):
    with pytest.raises(TypeError, match="the first argument must be a function"):
        ringtrain.spark.run(3)
    with pytest.raises(ValueError, match="num_proc"):
        ringtrain.spark.run(rank_and_sum, num_proc=0)
    with pytest.raises(TypeError, match="args must be a tuple"):
        ringtrain.spark.run(rank_and_sum, "x")
    with pytest.raises(TypeError, match="data must be a DataFrame or an RDD, not list"):
        ringtrain.spark.run_on([1, 2], rank_and_sum)
    with pytest.raises(TypeError, match="batches=True needs a DataFrame"):
        ringtrain.spark.run_on(spark.sparkContext.range(2), rank_and_sum, batches=True)
    with pytest.warns(UserWarning, match="executable has no effect"):
        ringtrain.spark.run(rank_and_sum, (0,), num_proc=1, executable="python3")


def test_no_thread_and_no_descriptor_of_a_job_stays(spark):
    def count(_):
        return os.getpid(), len(os.listdir("/proc/self/fd")), threading.active_count()

    def counts():
        return {
            pid: (files, threads)
            for pid, files, threads in spark.sparkContext.range(3, numSlices=3).map(count).collect()
        }

    for _ in range(2):
        ringtrain.spark.run(rank_and_sum, (0,))
    before, driver = counts(), (len(os.listdir("/proc/self/fd")), threading.active_count())
    for _ in range(10):
        ringtrain.spark.run(rank_and_sum, (0,))
    after = counts()
    for pid in before.keys() & after.keys():
        assert after[pid][0] <= before[pid][0] + 3 and after[pid][1] <= before[pid][1] + 2, (before, after)
    assert len(os.listdir("/proc/self/fd")) <= driver[0] + 5 and threading.active_count() <= driver[1] + 3


# --- tasks that come and go -------------------------------------------------------------------------------------------


def train_elastically(steps, at_step_5, file):
    """Returns the process, the sum of the steps, which no loss may change, and the sizes of the job that they had."""
    hvd.init()
    state = hvd.elastic.ObjectState(step=0, total=0.0, sizes=[])

    @hvd.elastic.run
    def go(state):
        while state.step < steps:
            if state.step == 5 and hvd.rank() == 1 and not os.path.exists(file):
                open(file, "w").close()
                at_step_5()
            state.total += float(hvd.allreduce(np.full((), float(state.step)), op=hvd.Average))
            state.sizes = [*state.sizes, hvd.size()]
            state.step += 1
            state.commit()
            time.sleep(0.02)
        return os.getpid(), state.total, state.sizes

    return go(state)


def require_all_steps(results, steps):
    (_, total, sizes), *others = results
    assert total == sum(range(steps)) and len(sizes) == steps
    assert all(other[1:] == (total, sizes) for other in others)
    return sizes


def kill_the_agent():
    wrapper = os.getppid()
    os.kill(int(Path(f"/proc/{wrapper}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.parametrize("strike", [kill_own_process, kill_the_agent, raise_key_error])
def test_an_elastic_job_goes_on_without_a_lost_step(spark, tmp_path, strike):
    results = ringtrain.spark.run_elastic(
        train_elastically, (60, strike, str(tmp_path / "struck")), num_proc=2, min_num_proc=1, max_num_proc=2
    )
    sizes = require_all_steps(results, 60)
    assert (tmp_path / "struck").exists() and sizes[0] == 2 and 1 in sizes
    assert len(ringtrain.spark.run(rank_and_sum, (0,), start_timeout=60)) == 3


def train_until_grown(size, over):
    """As `train_elastically`, until ten steps with so many ranks. Frees the busy slot after ten steps."""
    hvd.init()
    state = hvd.elastic.ObjectState(step=0, total=0.0, sizes=[])

    @hvd.elastic.run
    def go(state):
        while state.sizes.count(size) < 10:
            if state.step == 10:
                open(over, "w").close()
            state.total += float(hvd.allreduce(np.full((), float(state.step)), op=hvd.Average))
            state.sizes = [*state.sizes, hvd.size()]
            state.step += 1
            state.commit()
            time.sleep(0.02)
        return os.getpid(), state.total, state.sizes

    return go(state)


def test_an_elastic_job_grows_when_spark_has_a_slot(spark, tmp_path):
    with busy_slot(spark.sparkContext, tmp_path):
        results = ringtrain.spark.run_elastic(
            train_until_grown, (3, str(tmp_path / "over")), num_proc=2, min_num_proc=2, max_num_proc=3
        )
    sizes = require_all_steps(results, len(results[0][2]))
    assert (sizes[0], sizes[-1], len(results)) == (2, 3, 3)


def fail_always():
    hvd.init()
    raise_key_error()


def test_an_elastic_job_whose_function_fails_everywhere_ends_with_its_exception(spark):
    with pytest.raises(KeyError, match="mine") as seen:
        ringtrain.spark.run_elastic(fail_always, num_proc=1, max_num_proc=1)
    assert "fail_always" in str(seen.value.__cause__)


def test_an_elastic_job_with_too_few_slots_begins_with_fewer_or_says_so(spark):
    with pytest.raises(hvd.StalledError, match=r"for 4 tasks of Spark \(min_num_proc\), one for each rank: 3 of them"):
        ringtrain.spark.run_elastic(rank_and_sum, (0,), num_proc=4, start_timeout=4)
    results = ringtrain.spark.run_elastic(rank_and_sum, (0,), num_proc=4, min_num_proc=3, start_timeout=6)
    assert [rank for rank, *_ in results] == [0, 1, 2]


def test_ctrl_c_ends_an_elastic_job_and_leaves_no_process(spark, tmp_path):
    after(tmp_path / "begun", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        ringtrain.spark.run_elastic(endless, (str(tmp_path / "begun"),), num_proc=2)
    assert len(ringtrain.spark.run(rank_and_sum, (0,), start_timeout=60)) == 3
    for _ in range(100):
        commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
        left = [command for command in commands if b"ringtrain-spark-" in command]
        if not left:
            return
        time.sleep(0.1)
    raise AssertionError(left)


# --- two executors ----------------------------------------------------------------------------------------------------


def java_of_this_executor():
    daemon = os.getppid()
    return int(Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[1])


def print_and_tell_java():
    hvd.init()
    print(f"rank {hvd.rank()} in its log")
    return hvd.local_rank(), java_of_this_executor(), os.getcwd()


def test_ranks_on_executors_of_one_host_share_it_and_write_to_their_logs(cluster, capsys):
    results = ringtrain.spark.run(print_and_tell_java, num_proc=2)
    assert [local for local, _, _ in results] == [0, 1] and len({java for _, java, _ in results}) == 2
    for rank, (_, _, folder) in enumerate(results):
        assert f"rank {rank} in its log" in Path(folder, "stderr").read_text()
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[{rank}] rank {rank} in its log" for rank in range(2)]


def kill_the_executor():
    os.kill(java_of_this_executor(), signal.SIGKILL)
    time.sleep(60)


def test_a_lost_executor_is_a_lost_peer_and_its_successor_takes_the_next_job(cluster):
    begin = time.monotonic()
    with pytest.raises(hvd.PeerLostError):
        ringtrain.spark.run(fail_on_rank_1, (kill_the_executor,), num_proc=2)
    assert time.monotonic() - begin < 30
    assert len(ringtrain.spark.run(rank_and_sum, (0,), num_proc=2, start_timeout=60)) == 2


def kill_the_executor_of_the_agent():
    process = os.getpid()
    while b"java" not in Path(f"/proc/{process}/cmdline").read_bytes().partition(b"\0")[0]:
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(process, signal.SIGKILL)
    time.sleep(60)


def test_an_elastic_job_survives_the_loss_of_an_executor(cluster, tmp_path):
    results = ringtrain.spark.run_elastic(
        train_elastically,
        (150, kill_the_executor_of_the_agent, str(tmp_path / "struck")),
        num_proc=2,
        min_num_proc=1,
        max_num_proc=2,
        start_timeout=60,
    )
    sizes = require_all_steps(results, 150)
    assert (tmp_path / "struck").exists() and sizes[0] == 2 and 1 in sizes


@pytest.fixture(scope="module")
def growing(cluster):
    """A session without executors, which starts them for tasks that wait. Spark has no barrier stages there."""
    cluster.stop()
    names = ("enabled", "shuffleTracking.enabled")
    dynamic = {f"spark.dynamicAllocation.{name}": "true" for name in names}
    session = session_on("local-cluster[2,1,600]", {**dynamic, "spark.dynamicAllocation.initialExecutors": "0"})
    yield session
    session.stop()


def test_executors_that_come_on_demand_get_ranks_and_a_lost_one_is_not_begun_again(growing, tmp_path):
    assert len(ringtrain.spark.run(rank_and_sum, (0,), num_proc=2, start_timeout=60)) == 2
    with pytest.raises(hvd.PeerLostError, match="rank 1 "):
        ringtrain.spark.run(count_and_die, (str(tmp_path),), num_proc=2, start_timeout=60)
    assert (tmp_path / "begun").read_text() == ".."
    assert len(ringtrain.spark.run(rank_and_sum, (0,), num_proc=2, start_timeout=60)) == 2  # two executors run again
    with pytest.raises(hvd.StalledError, match="for 3 tasks of Spark, one for each rank: 2 of them have a slot"):
        ringtrain.spark.run(rank_and_sum, (0,), num_proc=3, start_timeout=10)


def test_the_script_of_the_page_trains(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text().partition("\n## Spark\n")[2]
    (tmp_path / "train.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    run = [sys.executable, "train.py"]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "JAVA_TOOL_OPTIONS": OF_JAVA}
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert re.search(r"loss of each rank: \[(\d\S*), \1\]\n", done.stdout), done.stdout + done.stderr
    assert float(done.stdout.split("each rank: [")[1].split(",")[0]) < 1e-6
