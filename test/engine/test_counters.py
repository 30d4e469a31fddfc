"""hvd.metrics(), and the same for Prometheus."""

import contextlib
import re
import socket
import time
import urllib.request

import numpy as np
import pytest
from harness.exact import require_equal
from harness.logged import messages

import ringtrain as hvd
from ringtrain.job import launched_by


@pytest.mark.ranks(1, 2, 3)
def test_operations_and_bytes_are_counted_by_kind():
    before = hvd.metrics()
    for _ in range(5):
        hvd.allreduce(np.ones(100, np.float32), name="counted")
    hvd.allgather(np.ones((2, 3)))
    after = hvd.metrics()

    def counted(kind, key):
        return after[kind][key] - before.get(kind, {}).get(key, 0)

    assert counted("allreduce", "operations") == 5 and counted("allreduce", "bytes") == 5 * 400
    assert counted("allgather", "operations") == 1 and counted("allgather", "bytes") == 48
    assert counted("allreduce", "failed") == 0 and counted("allreduce", "working_s") > 0
    assert after["cache_hits"] - before["cache_hits"] >= 4
    assert after["cache_misses"] > before["cache_misses"] and after["rounds"] > before["rounds"]


@pytest.mark.ranks(2)
def test_failures_are_counted():
    before = hvd.metrics().get("allreduce", {}).get("failed", 0)
    with pytest.raises(hvd.MismatchError):
        hvd.allreduce(np.ones(2 + hvd.rank()), name="different")
    assert hvd.metrics()["allreduce"]["failed"] == before + 1


@pytest.mark.ranks(2, 3)
def test_the_time_in_which_the_script_waits_is_counted():
    hvd.barrier()
    before = hvd.metrics()["exposed_s"]
    handle = hvd.allreduce_async(np.ones(4), name="exposed") if hvd.rank() == 0 else None
    time.sleep(0.2)
    between = hvd.metrics()["exposed_s"]
    hvd.synchronize(handle or hvd.allreduce_async(np.ones(4), name="exposed"))
    hvd.barrier()
    if hvd.rank() == 0:
        time.sleep(0.2)
    hvd.barrier()
    assert between == before  # nobody waits for what is only under way
    assert hvd.rank() == 0 or hvd.metrics()["exposed_s"] - before > 0.15


@pytest.mark.ranks(2, 3)
def test_the_straggler_counts_how_often_it_came_last():
    for _ in range(3):
        hvd.allreduce(np.ones(4), name="uneven")
    hvd.barrier()
    before = hvd.metrics()["came_last"]
    for _ in range(10):
        time.sleep(0.02 * (hvd.rank() == 1))
        hvd.allreduce(np.ones(4), name="uneven")
    came_last = hvd.allgather(np.array([hvd.metrics()["came_last"] - before])).tolist()
    assert came_last[1] > sum(came_last) - came_last[1]


def test_there_are_none_before_init():
    with pytest.raises(hvd.NotInitializedError):
        hvd.metrics()


@pytest.mark.ranks(2, initialised=False)
def test_prometheus_reads_them():
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    hvd.init(metrics_port=29471)
    hvd.allreduce(np.ones(100, np.float32), name="counted")
    with urllib.request.urlopen(f"http://localhost:{29471 + hvd.local_rank()}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    rank = hvd.rank()
    assert f'ringtrain_bytes_total{{kind="allreduce",rank="{rank}"}} 400.0' in lines
    assert f'ringtrain_operations_total{{kind="allreduce",rank="{rank}"}} 1.0' in lines
    hvd.barrier()
    hvd.shutdown()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://localhost:{29471 + rank}/metrics", timeout=1)


@pytest.mark.ranks(1, initialised=False)
@pytest.mark.parametrize(
    ("options", "reachable"), [({}, ["127.0.0.1"]), ({"metrics_address": "0.0.0.0"}, ["127.0.0.1", "127.0.0.2"])]
)
def test_only_this_host_reads_them_unless_asked_for(options, reachable):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    hvd.init(metrics_port=29511, **options)
    answering = []
    for address in ("127.0.0.1", "127.0.0.2"):
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((address, 29511), timeout=10):
            answering.append(address)
    assert answering == reachable


@pytest.mark.ranks(1, 2, initialised=False)
def test_a_rank_whose_metrics_cannot_be_served_says_so_and_goes_on(tmp_path):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    launch = launched_by.detect()
    rank = 0 if launch is None else launch.rank
    with messages() as said:
        hvd.init(metrics_port=29521, metrics_address="192.0.2.1")
        told = rf"rank {rank} .* port {29521 + rank} of 192\.0\.2\.1 on .*: Cannot assign.* metrics_address\."
        assert len(said) == 1 and re.search(rf"{told} .*goes on without", said.pop())
        hvd.barrier()
        hvd.shutdown()
        with socket.create_server(("", 29491)) if rank == 0 else contextlib.nullcontext():
            hvd.init(metrics_port=29491)
            require_equal(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, float(hvd.size())))
        assert len(said) == (rank == 0) and all("port 29491 of 127.0.0.1" in one for one in said)
        hvd.barrier()
        hvd.shutdown()
