"""Jobs on a real Dask cluster, whose workers are processes of this host. `make dask` has Dask."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

# A folder of the tests is called distributed, too.
pytest.importorskip("distributed.client", reason="Dask is not installed in this environment: see `make dask`")

import distributed

import ringtrain as hvd
import ringtrain.dask
from ringtrain.optim import SGD

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
pytestmark = pytest.mark.xdist_group("dask")


@contextmanager
def cluster_of_three():
    with (
        distributed.LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client():
    """Of workers that no test kills."""
    with cluster_of_three() as client:
        yield client


def rank_and_sum(shift):
    hvd.init()
    total = hvd.allreduce(np.full(4, hvd.rank() + shift), op=hvd.Sum)
    return hvd.rank(), hvd.size(), hvd.local_rank(), total.tolist(), os.environ.get("OF_THE_JOB")


def test_results_are_in_the_order_of_the_ranks_and_nothing_of_the_job_stays(client):
    for _ in range(2):
        results = ringtrain.dask.run(client, rank_and_sum, (1.0,), env={"OF_THE_JOB": "yes"})
        assert results == [(rank, 3, rank, [6.0] * 4, "yes") for rank in range(3)]
    assert len(ringtrain.dask.run(client, rank_and_sum, kwargs={"shift": 0}, num_workers=2)) == 2
    names = ("OF_THE_JOB", "RINGTRAIN_RANK", "RINGTRAIN_RENDEZVOUS", "RINGTRAIN_SECRET_FILE")
    left = client.run(lambda: ([os.environ.get(name) for name in names], hvd.is_initialized()))
    assert list(left.values()) == [([None] * len(names), False)] * 3


def train(data, labels, steps):
    hvd.init()
    weights = np.zeros(3) if hvd.rank() == 0 else np.ones(3)
    weights = hvd.broadcast(weights, root_rank=0)
    optimizer = hvd.DistributedOptimizer(SGD(lr=0.5))
    own, of_own = data[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]
    for _ in range(steps):
        optimizer.step([weights], [own.T @ (own @ weights - of_own) / len(own)])
    return weights


def test_ranks_train_as_one_process_with_data_of_the_cluster(client):
    data = np.random.default_rng(0).integers(-2, 3, (32, 3)).astype(float)
    labels = data @ np.array([1.0, 2.0, -1.0])
    futures = client.scatter([data, labels])
    of_ranks = ringtrain.dask.run(client, train, (*futures, 20), num_workers=2)
    alone = np.zeros(3)
    for _ in range(20):
        alone = alone - 0.5 * (data.T @ (data @ alone - labels) / len(data))
    assert np.array_equal(of_ranks[0], of_ranks[1])
    np.testing.assert_allclose(of_ranks[0], alone, rtol=1e-12)


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


def test_an_exception_of_a_rank_is_raised_in_the_driver_and_ends_the_others(client):
    with pytest.raises(KeyError, match="mine") as seen:
        ringtrain.dask.run(client, fail_on_rank_1, (raise_key_error,))
    if sys.version_info >= (3, 11):
        assert "ringtrain: on rank 1, the Dask worker tcp://" in seen.value.__notes__[0]
    with pytest.raises(RuntimeError, match=r"rank 1 has left the function by sys.exit\(3\)"):
        ringtrain.dask.run(client, fail_on_rank_1, (lambda: sys.exit(3),))
    assert len(ringtrain.dask.run(client, rank_and_sum, (0,))) == 3


def test_a_killed_worker_is_a_lost_peer_and_the_others_take_the_next_job():
    with cluster_of_three() as client:
        with pytest.raises(hvd.PeerLostError, match="rank 1"):
            ringtrain.dask.run(client, fail_on_rank_1, (kill_own_process,))
        assert len(ringtrain.dask.run(client, rank_and_sum, (0,), num_workers=2)) == 2


def die_before_init():
    if os.environ["RINGTRAIN_RANK"] == "2":
        kill_own_process()
    hvd.init()


def test_a_worker_that_dies_before_init_fails_the_ranks_that_wait_for_it():
    with cluster_of_three() as client:
        with pytest.raises(hvd.PeerLostError, match=r"rank 2 is lost: the Dask worker tcp://.* has died"):
            ringtrain.dask.run(client, die_before_init)
        begin = time.monotonic()
        assert len(ringtrain.dask.run(client, rank_and_sum, (0,), num_workers=2)) == 2
        assert time.monotonic() - begin < 110  # of 120 seconds for which ranks may wait in init()


def wait_alone():
    hvd.init()
    hvd.allreduce(np.ones(3), name="first")
    if hvd.rank() == 0:
        hvd.allreduce(np.ones(3), name="never")
    raise_key_error()


def test_a_rank_that_waits_for_a_failed_one_does_not_keep_its_worker(client):
    with pytest.raises(KeyError, match="mine"):
        ringtrain.dask.run(client, wait_alone)
    assert len(ringtrain.dask.run(client, rank_and_sum, (0,))) == 3


def test_too_few_workers_are_told_with_what_there_is(client):
    with pytest.raises(hvd.StalledError) as seen:
        ringtrain.dask.run(client, rank_and_sum, (0,), num_workers=4, start_timeout=1)
    assert "has waited 1 s (start_timeout) for 4 workers; the cluster has 3, of which 3 fit: tcp://" in str(seen.value)
    with pytest.raises(hvd.StalledError, match="for 1 worker with GPU=1; the cluster has 3, of which 0 fit"):
        ringtrain.dask.run(client, rank_and_sum, (0,), resources={"GPU": 1}, start_timeout=1)


def test_busy_workers_are_told(client):
    address = min(client.scheduler_info(n_workers=-1)["workers"])
    busy = client.submit(time.sleep, 8, workers=[address], pure=False)
    try:
        with pytest.raises(hvd.StalledError, match=f"for a free thread on the workers {address}"):
            ringtrain.dask.run(client, rank_and_sum, (0,), start_timeout=1)
        results = ringtrain.dask.run(client, rank_and_sum, (0,), start_timeout=100)
        assert len(results) == 3
    finally:
        busy.cancel()


def test_jobs_at_the_same_time_take_turns(client):
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(ringtrain.dask.run, client, rank_and_sum, (shift,)) for shift in range(4)]
    assert [job.result()[2][3] for job in jobs] == [[3.0 + 3 * shift] * 4 for shift in range(4)]


def test_a_process_that_is_a_rank_already_is_refused(client):
    client.submit(hvd.init, workers=[min(client.scheduler_info(n_workers=-1)["workers"])], pure=False).result()
    try:
        with pytest.raises(RuntimeError, match=r"has called ringtrain.init\(\) before: call shutdown\(\) there"):
            ringtrain.dask.run(client, rank_and_sum, (0,))
    finally:
        client.run(hvd.shutdown)
    assert len(ringtrain.dask.run(client, rank_and_sum, (0,))) == 3


def test_workers_that_are_threads_are_refused():
    with (
        distributed.LocalCluster(n_workers=2, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
        pytest.raises(RuntimeError, match=r"LocalCluster\(processes=True\)"),
    ):
        ringtrain.dask.run(client, rank_and_sum, (0,))


def test_arguments_are_checked(client):
    with pytest.raises(TypeError, match="the first argument must be a function"):
        ringtrain.dask.run(client, 3)
    with pytest.raises(TypeError, match=r"client must be a distributed\.Client"):
        ringtrain.dask.run("tcp://scheduler", rank_and_sum)
    with pytest.raises(ValueError, match="num_workers"):
        ringtrain.dask.run(client, rank_and_sum, num_workers=0)
    with pytest.raises(TypeError, match="args must be a tuple"):
        ringtrain.dask.run(client, rank_and_sum, "x")


DRIVER = """
import sys
import distributed, numpy as np, ringtrain as hvd, ringtrain.dask

def endless(file):
    hvd.init()
    hvd.barrier()
    open(file, "w").close()
    while True:
        hvd.allreduce(np.ones(1000), name="on and on")

if __name__ == "__main__":
    ringtrain.dask.run(distributed.Client(sys.argv[1]), endless, (sys.argv[2],))
"""


def test_an_interrupted_driver_ends_its_ranks(client, tmp_path):
    begun, script = tmp_path / "begun", tmp_path / "driver.py"
    script.write_text(DRIVER)
    with subprocess.Popen(
        [sys.executable, str(script), client.scheduler.address, str(begun)], stderr=subprocess.PIPE, text=True
    ) as driver:
        wait_for(begun, driver)
        driver.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in driver.communicate(timeout=60)[1]
    assert len(ringtrain.dask.run(client, rank_and_sum, (0,), start_timeout=60)) == 3


def wait_for(file: Path, driver):
    for _ in range(600):
        if file.exists():
            return
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.1)
    raise AssertionError("the ranks have not begun")


def test_no_thread_and_no_descriptor_of_a_job_stays(client):
    def count():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for _ in range(3):
        ringtrain.dask.run(client, rank_and_sum, (0,))
    before = client.run(count)
    for _ in range(10):
        ringtrain.dask.run(client, rank_and_sum, (0,))
    after = client.run(count)
    for worker, (descriptors, threads) in before.items():
        assert after[worker][0] <= descriptors + 5, worker
        assert after[worker][1] <= threads + 3, worker


def test_the_script_of_the_page_trains(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "engines.md"
    (tmp_path / "train.py").write_text(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[0])
    run = [sys.executable, "train.py"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert re.search(r"loss of each rank: \[(\d\S*), \1\]\n", done.stdout), done.stdout + done.stderr
    assert float(done.stdout.split("[")[1].split(",")[0]) < 1e-6
