"""Stores with servers in jobs of ranks: in each of them, or in ranks that are set aside (kv_servers)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness.ringrun_job import needs_mpi, on_each_network, ringrun

import ringtrain as hvd
from ringtrain import kvstore
from ringtrain.kvstore.servers.server_ranks import choose_servers

TRAIN = """
import numpy as np
import ringtrain as hvd
from ringtrain import kvstore

hvd.init()
total = hvd.allreduce(np.ones(3), op=hvd.Sum)
for kind, sum_of_all in (("dist_sync", 5 * hvd.size()), ("dist_async", 5 * hvd.size())):
    kv = kvstore.create(kind)
    kv.set_optimizer("test")
    kv.init("w", np.zeros((300, 500), np.float32))
    for _ in range(5):
        kv.push("w", np.ones((300, 500), np.float32))
    kv.wait()
    kv.barrier()
    assert (kv.pull("w") == sum_of_all).all()
servers = {server for server, _, _ in kv.placement()["w"]}
print("ranks", kv.rank, hvd.rank(), kv.num_workers, hvd.size(), total[0], sorted(servers))
"""


def test_servers_are_the_last_ranks_of_the_hosts_in_turn():
    assert choose_servers(["a", "a", "b", "b"], 1) == [3]
    assert choose_servers(["a", "a", "b", "b"], 2) == [1, 3]
    assert choose_servers(["a", "b", "a", "b"], 3) == [1, 2, 3]
    assert choose_servers(["a", "b"], 1) == [1]
    with pytest.raises(ValueError, match="kv_servers=2 of 2 ranks leaves no worker"):
        choose_servers(["a", "b"], 2)


@needs_mpi
@on_each_network
def test_ranks_that_are_set_aside_serve_and_end(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(TRAIN)
    said = ringrun("-np", "4", "--kv-servers", "2", "python", str(script))
    assert said.returncode == 0, said.stderr
    assert sorted(said.stdout.splitlines()) == [
        "[0] ranks 0 0 2 2 2.0 [0, 1]",
        "[1] ranks 1 1 2 2 2.0 [0, 1]",
    ]


@needs_mpi
def test_servers_end_if_nobody_makes_a_store() -> None:
    said = ringrun("-np", "2", "--kv-servers", "1", "python", "-c", "import ringtrain as hvd; hvd.init()")
    assert said.returncode == 0, said.stderr


@pytest.mark.fast
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["dist_async", "dist_async_device"])
def test_every_worker_has_a_server(kind):
    kv = kvstore.create(kind)
    assert (kv.rank, kv.num_workers, kv.local_rank) == (hvd.rank(), hvd.size(), hvd.local_rank())
    kv.set_optimizer("test")
    kv.init("w", np.zeros((300, 300), np.float32))
    for _ in range(5):
        kv.push("w", np.ones((300, 300), np.float32))
    kv.wait()
    kv.barrier()
    assert (kv.pull("w") == 5 * kv.num_workers).all()


@pytest.mark.ranks(3)
def test_the_workers_may_be_some_of_the_ranks():
    some = hvd.add_process_set([0, 2])
    if hvd.rank() != 1:
        kv = kvstore.create("dist_async", process_set=some)
        assert (kv.rank, kv.num_workers) == (hvd.rank() // 2, 2)
        kv.set_optimizer("test")
        kv.init("w", np.zeros(10, np.float32))
        kv.push("w", np.ones(10, np.float32))
        kv.wait()
        kv.barrier()
        assert (kv.pull("w") == 2).all()
    hvd.remove_process_set(some)


@pytest.mark.ranks(2, initialised=False)
def test_a_store_belongs_to_the_ranks_that_have_made_it():
    kv = kvstore.create("dist_async")
    kv.set_optimizer("test")
    kv.init("w", np.zeros(10, np.float32))
    hvd.shutdown()
    hvd.init()
    for call in (lambda: kv.push("w", np.ones(10, np.float32)), lambda: kv.pull("w"), kv.wait, kv.barrier):
        with pytest.raises(hvd.NotInitializedError, match="this store was made before the last init"):
            call()
    again = kvstore.create("dist_async")
    again.set_optimizer("test")
    again.init("w", np.zeros(10, np.float32))
    again.push("w", np.ones(10, np.float32))
    again.wait()
    again.barrier()
    assert (again.pull("w") == 2).all()
