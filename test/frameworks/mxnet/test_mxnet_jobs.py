"""Whole jobs of MXNet's scripts: ranks that die or raise, and scripts that know nothing of ringtrain."""

import os
import subprocess
import sys

import pytest
from kvstore_jobs import job

mx = pytest.importorskip("mxnet", reason="MXNet is not installed in this environment: see `make test-mxnet`")

TRAIN = """
import os, signal, sys, time
import mxnet as mx
import ringtrain.mxnet as hvd
from mxnet import autograd, gluon

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # mpirun's, which comes as soon as one has died
hvd.init()
net = gluon.nn.Dense(1000, in_units=1000)
net.initialize()
hvd.broadcast_parameters(net.collect_params())
trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1e-6})
step = 0
try:
    while True:
        with autograd.record():
            loss = net(mx.nd.ones((4, 1000))).sum()
        loss.backward()
        trainer.step(4)
        if sys.argv[1] == "reads":
            loss.asscalar()
        step += 1
        if step == 10 and hvd.rank() == 1:
            mx.nd.waitall()
            open("ended", "w").write(repr(time.time()))
            if sys.argv[2] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("out of luck")
except hvd.RingtrainError as error:
    open("met.new", "w").write(f"{type(error).__name__} {time.time()!r}")
    os.rename("met.new", "met")
    raise
"""


def run(*words, folder, variables=None):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **(variables or {})}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def ringrun(ranks, *words, folder, network="auto"):
    start = (sys.executable, "-m", "ringtrain.run", "-np", str(ranks), "--no-prefix-output", "--network", network)
    return run(*start, sys.executable, *words, folder=folder)


@pytest.mark.parametrize(("how", "error"), [("dies", "PeerLostError"), ("raises", "RemoteError")])
@pytest.mark.parametrize("reads", ["reads", "goes on"])
def test_a_rank_that_ends_is_an_exception_on_the_others_within_two_seconds(tmp_path, reads, how, error):
    (tmp_path / "train.py").write_text(TRAIN)
    # ringrun itself gives the other rank time, and the launcher of an MPI none
    done = ringrun(2, "train.py", reads, how, folder=tmp_path, network="sockets")
    assert done.returncode != 0
    assert (tmp_path / "met").exists(), f"{done.stdout}\n{done.stderr}"
    met, met_s = (tmp_path / "met").read_text().split()
    assert met == error
    assert float(met_s) - float((tmp_path / "ended").read_text()) < 2


HOROVOD = """
import sys
import mxnet as mx
import horovod
import horovod.mxnet as hvd

hvd.init()
total = hvd.allreduce(mx.nd.ones((2,)), average=False)
kv = mx.kv.create("dist_sync")
print("rank", hvd.rank(), hvd.size(), total.asnumpy().tolist(), type(kv).__module__, kv.num_workers, sys.argv[1:])
"""


def test_a_script_of_horovod_runs_as_it_is(tmp_path):
    (tmp_path / "train.py").write_text(HOROVOD)
    done = ringrun(2, "-m", "ringtrain.mxnet", "train.py", "--epochs", "3", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} 2 [2.0, 2.0] ringtrain.mxnet.stores 2 ['--epochs', '3']" for rank in (0, 1)]


def test_the_runner_says_what_it_takes(tmp_path):
    done = run(sys.executable, "-m", "ringtrain.mxnet", "--help", folder=tmp_path)
    assert done.returncode == 0 and "usage: python -m ringtrain.mxnet" in done.stdout
    assert run(sys.executable, "-m", "ringtrain.mxnet", folder=tmp_path).returncode == 2


OF_MXNET = """
import mxnet as mx

kv = mx.kv.create("dist_sync")
kv.set_optimizer(mx.optimizer.create("test", rescale_grad=2.0))
kv.init("w", mx.nd.ones((4, 3)))
kv.push("w", mx.nd.ones((4, 3)) * (kv.rank + 1))
out = mx.nd.zeros((4, 3))
kv.pull("w", out=out)
print("worker", kv.rank, "of", kv.num_workers, "has", out.asnumpy()[0, 0], "from", type(kv).__module__)
"""


def test_a_script_of_mxnet_runs_as_it_is_with_servers(tmp_path):
    (tmp_path / "train.py").write_text(OF_MXNET)
    with job(tmp_path, 2, 1) as of_roles:
        words = ["-m", "ringtrain.mxnet", str(tmp_path / "train.py")]
        of_roles.start("scheduler", words)
        of_roles.start("server", words)
        workers = [of_roles.start("worker", words) for _ in range(2)]
        said = [worker.end() for worker in workers]
    assert all("has 7.0 from ringtrain.mxnet.stores" in one for one in said), said


def test_nothing_of_mxnet_is_imported_without_being_asked_for(tmp_path):
    code = "import sys, ringtrain; print([name for name in sys.modules if 'mxnet' in name])"
    done = run(sys.executable, "-c", code, folder=tmp_path)
    assert done.stdout.strip() == "[]", done.stderr
