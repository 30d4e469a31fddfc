"""Jobs on a real cluster of Ray, whose nodes are on this host. `make ray` has Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray.cloudpickle", reason="Ray is not installed in this environment: see `make ray`")

import ray
from harness.socket_ranks import free_port
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

import ringtrain as hvd
from ringtrain.ray import ElasticRayExecutor, RayExecutor, RayHostDiscovery
from ringtrain.ray.actors import Call, Resources
from ringtrain.ray.elastic_job import ActorPlacement, Nodes

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
pytestmark = pytest.mark.xdist_group("ray")
CPUS = 3
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster():
    """One node; a test that needs another one adds it."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": CPUS, "object_store_memory": 10**8, "include_dashboard": False},
    )
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def everything_is_given_back(cluster):
    shared = set(os.listdir("/dev/shm"))
    yield
    for _ in range(100):
        left = [one for one in set(os.listdir("/dev/shm")) - shared if "ringtrain" in one]
        if ray.available_resources().get("CPU") == CPUS and not left:
            return
        time.sleep(0.1)
    raise AssertionError((ray.available_resources(), left))


@pytest.fixture
def executor(everything_is_given_back):
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
    executor.start(extra_env_vars={"OF_THE_JOB": 7})
    yield executor
    executor.shutdown()


def rank_and_sum(shift):
    hvd.init()
    total = hvd.allreduce(np.full(4, hvd.rank() + shift), op=hvd.Sum)
    return hvd.rank(), hvd.size(), hvd.local_rank(), total.tolist(), os.environ["OF_THE_JOB"]


def size_of_job():
    hvd.init()
    return hvd.size()


def fail_on_rank_1(leave, is_before_init=False):
    if not is_before_init:
        hvd.init()
        hvd.barrier()
    elif os.environ["RINGTRAIN_RANK"] == "1":
        leave()
    hvd.init()
    if hvd.rank() == 1:
        leave()
    return hvd.allreduce(np.ones(3))


def raise_key_error():
    raise KeyError("mine")


def kill_own_process():
    os.kill(os.getpid(), signal.SIGKILL)


def leave_with_3():
    sys.exit(3)


# --- the same ranks from start to shutdown ----------------------------------------------------------------------------


def test_actors_are_ranks_as_long_as_the_executor(executor):
    expected = [(rank, 2, rank, [2.0 * 1 + 1] * 4, "7") for rank in range(2)]
    assert executor.run(rank_and_sum, args=[1.0]) == expected
    assert executor.run(rank_and_sum, kwargs={"shift": 1.0}) == expected
    assert ray.get(executor.run_remote(rank_and_sum, [1.0])) == expected
    pids = [executor.execute(lambda _: os.getpid()) for _ in range(2)]
    assert pids[0] == pids[1] and executor.execute_single(lambda _: os.getpid()) == pids[0][0]
    assert executor.execute(lambda _: [os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK")]) == [
        [str(rank), "2", str(rank)] for rank in range(2)
    ]


def test_an_exception_of_a_rank_is_raised_in_the_driver_and_the_next_function_runs(executor):
    with pytest.raises(KeyError, match="mine") as seen:
        executor.run(fail_on_rank_1, [raise_key_error])
    if sys.version_info >= (3, 11):
        assert seen.value.__notes__ == ["ringtrain: on rank 1"]
    with pytest.raises(KeyError, match="mine"):
        executor.run(fail_on_rank_1, [raise_key_error, True])
    with pytest.raises(RuntimeError, match=r"rank 1 has left the function by sys.exit\(3\)"):
        executor.run(fail_on_rank_1, [leave_with_3])
    assert [result[3] for result in executor.run(rank_and_sum, [0.0])] == [[1.0] * 4] * 2


@pytest.mark.parametrize("is_before_init", [False, True], ids=["in a step", "before init"])
def test_a_killed_actor_is_a_lost_peer(executor, is_before_init):
    begin = time.monotonic()
    with pytest.raises(
        hvd.PeerLostError, match="rank 1 is lost: The actor is dead because its worker process has died"
    ):
        executor.run(fail_on_rank_1, [kill_own_process, is_before_init])
    assert time.monotonic() - begin < 40  # of 60 seconds for which a rank waits in init()
    with pytest.raises(hvd.PeerLostError, match=r"rank 1 is lost: .* call shutdown\(\) and start\(\) of RayExecutor"):
        executor.run(rank_and_sum, [0])
    executor.shutdown()
    executor.start(extra_env_vars={"OF_THE_JOB": 7})
    assert len(executor.run(rank_and_sum, [0])) == 2


def test_an_actor_that_ray_kills_is_a_lost_peer(executor):
    references = executor.run_remote(train_for_ever)
    time.sleep(1)
    ray.kill(executor._job._actors[1])
    with pytest.raises(hvd.PeerLostError):
        ray.get(references[0], timeout=60)
    with pytest.raises(ray.exceptions.RayActorError, match=r"killed by `ray.kill`"):
        ray.get(references[1], timeout=60)


def train_for_ever():
    hvd.init()
    while True:
        hvd.allreduce(np.ones(1000), name="on and on")


def test_too_few_resources_are_told_with_what_is_free(cluster):
    executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), num_workers=CPUS + 1)
    with pytest.raises(TimeoutError) as seen:
        executor.start()
    text = r"waited 1 s \(placement_group_timeout_s\) for 4 workers with 1 CPU each; free are 3 CPU on [\d.]+"
    assert re.search(text, str(seen.value)), seen.value
    executor = RayExecutor(
        RayExecutor.create_settings(placement_group_timeout_s=1), num_hosts=2, cpus_per_worker=1, use_gpu=True
    )
    with pytest.raises(TimeoutError, match=r"2 workers \(1 on each of 2 nodes\) with 1 CPU and 1 GPU each"):
        executor.start()
    executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), min_workers=CPUS + 1)
    with pytest.raises(TimeoutError, match=r"for 4 workers \(min_workers\) with 1 CPU each; free are 3 CPU"):
        executor.start()


def test_arguments_are_checked(cluster):
    for wrong, error, text in [
        ({}, ValueError, "give num_workers, or num_hosts"),
        ({"num_workers": 0}, ValueError, "num_workers must be at least 1"),
        ({"num_workers": 1, "num_hosts": 1}, ValueError, "give num_workers, or num_hosts"),
        ({"num_workers": 1, "gpus_per_worker": 1}, ValueError, "use_gpu is False"),
        ({"num_workers": 1, "min_workers": 1}, ValueError, "not both"),
        ({"max_workers": 1}, ValueError, "set min_workers, too"),
        ({"min_workers": 2, "max_workers": 1}, ValueError, "must be at least"),
        ({"num_workers": 1.5}, TypeError, "whole number"),
        ({"min_workers": 1, "override_discovery": False}, ValueError, "settings.discovery"),
    ]:
        with pytest.raises(error, match=text):
            RayExecutor(RayExecutor.create_settings(), **wrong)
    executor = RayExecutor(num_workers=1)
    with pytest.raises(RuntimeError, match=r"call start\(\) before"):
        executor.run(rank_and_sum)
    executor.shutdown()


# --- elastic jobs -----------------------------------------------------------------------------------------------------


def count(steps, folder, victims, kill):
    """Returns what each step summed. `kill` is called on the last rank before the steps in `victims`, once for each."""
    hvd.init()
    state = hvd.elastic.ObjectState(step=0, sums=[], pids=[])

    @hvd.elastic.run
    def train(state):
        while state.step < steps:
            mark = Path(folder, f"killed-{state.step}")
            if state.step in victims and hvd.rank() == hvd.size() - 1 and not mark.exists():
                mark.touch()
                kill()
            total = hvd.allreduce(np.full(4, state.step * hvd.size() + 1), op=hvd.Average)[0]
            state.sums = [*state.sums, total - state.step * hvd.size()]
            state.step += 1
            state.commit()
            time.sleep(0.02)
        return hvd.rank(), hvd.size(), state.sums, os.getpid(), hvd.elastic.generation()

    return train(state)


def test_killed_actors_are_replaced_and_no_step_is_lost(everything_is_given_back, tmp_path):
    executor = RayExecutor(RayExecutor.create_settings(), min_workers=1, max_workers=2)
    executor.start()
    results = executor.run(count, [150, str(tmp_path), (10, 40, 70), kill_own_process])
    executor.shutdown()
    assert len(os.listdir(tmp_path)) == 3
    assert [result[0] for result in results] == list(range(len(results)))
    assert all(result[2] == [1] * 150 for result in results)
    assert results[0][4] >= 4


def test_nodes_are_those_of_a_discovery_of_the_user(everything_is_given_back, tmp_path):
    class OneSlot(RayHostDiscovery):
        def find_available_hosts_and_slots(self):
            return dict.fromkeys(super().find_available_hosts_and_slots(), 1)

    assert list(RayHostDiscovery().find_available_hosts_and_slots().values()) == [CPUS]
    settings = ElasticRayExecutor.create_settings(max_np=CPUS, verbose=2)
    settings.discovery = OneSlot()
    executor = ElasticRayExecutor(settings, env_vars={"OF_THE_JOB": "7"}, override_discovery=False)
    executor.start()
    assert executor.run(lambda: rank_and_sum(1.0)) == [(0, 1, 0, [1.0] * 4, "7")]


def test_an_exception_of_an_elastic_function_is_raised_in_the_driver(everything_is_given_back):
    executor = RayExecutor(RayExecutor.create_settings(), min_workers=1, max_workers=1)
    executor.start()
    with pytest.raises(KeyError, match="mine"):
        executor.run(raise_key_error)
    with pytest.raises(NotImplementedError, match="run_remote needs ranks that stay"):
        executor.run_remote(raise_key_error)


def test_the_start_of_an_elastic_job_asks_for_nodes_and_waits_for_them(cluster, everything_is_given_back):
    """As an autoscaler does, which adds nodes for placement groups that are pending."""
    executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=60), min_workers=CPUS + 1)
    starting = threading.Thread(target=executor.start)
    starting.start()
    for _ in range(300):
        pending = [one for one in placement_group_table().values() if one["state"] == "PENDING"]
        if pending:
            break
        time.sleep(0.1)
    (asked,) = pending
    assert list(asked["bundles"].values()) == [{"CPU": 1.0}] * (CPUS + 1)
    assert starting.is_alive()
    node = cluster.add_node(num_cpus=1, object_store_memory=10**8)
    try:
        starting.join(60)
        assert executor.run(size_of_job) == [CPUS + 1] * (CPUS + 1)
    finally:
        cluster.remove_node(node)
    executor.shutdown()


class NodesThatAreLost(Nodes):
    """Of each node it is known too late that it is no longer there."""

    def id_of(self, name):
        return "1" * len(super().id_of(name))


def test_a_node_that_is_lost_before_its_actor_begins_is_no_failure_of_the_function(everything_is_given_back):
    placement = ActorPlacement(NodesThatAreLost(Resources(1, 0), None), Call(rank_and_sum, None, (), {}), {}, b"x" * 32)
    link = placement.open_agent(placement.hosts()[0].name)
    link.order({"start": 0})
    ((descriptor, take),) = link.streams()
    take(os.read(descriptor, 1 << 16))
    assert link.take_reports() == [{"ended": [0, 128 + signal.SIGKILL]}]
    assert placement.failure() is None and placement.may_grow
    placement.close()


def test_an_elastic_job_outlives_a_node(cluster, tmp_path):
    node = cluster.add_node(num_cpus=1, object_store_memory=10**8)
    try:
        executor = RayExecutor(RayExecutor.create_settings(), min_workers=CPUS + 1, max_workers=CPUS + 1)
        executor.start()
        executor = RayExecutor(RayExecutor.create_settings(), min_workers=2, max_workers=CPUS + 1)
        executor.start()
        run = ray.remote(num_cpus=0)(in_another_process)
        there = run.remote(executor, tmp_path)
        wait_for(tmp_path / "all")
        cluster.remove_node(node, allow_graceful=False)
        (tmp_path / "removed").touch()
        results = ray.get(there, timeout=90)
    finally:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)
    assert all(size <= CPUS and generation >= 2 for size, generation in results), results


def in_another_process(executor, folder):
    return executor.run(until_a_node_is_removed, [str(folder)])


def until_a_node_is_removed(folder):
    hvd.init()
    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def train(state):
        while True:
            if hvd.size() == CPUS + 1:
                Path(folder, "all").touch()
            is_over = Path(folder, "removed").exists() and hvd.size() <= CPUS
            if hvd.allreduce(np.array([float(is_over)]), op=hvd.Sum)[0] == hvd.size():
                return hvd.size(), hvd.elastic.generation()
            state.step += 1
            state.commit()
            time.sleep(0.05)

    return train(state)


def wait_for(file: Path):
    for _ in range(900):
        if file.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{file} has not come")


# --- scripts that users have ------------------------------------------------------------------------------------------

# As horovod.ray's documentation has them.
STATEFUL = """
import ray
import torch
IMPORT

class MyModel:
    def __init__(self, learning_rate):
        hvd.init()
        self.model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate)
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters())
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def get_weights(self):
        return dict(self.model.named_parameters())

    def train(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 3)).square().mean().backward()
        self.optimizer.step()

def simple_fn():
    hvd.init()
    print("hvd rank", hvd.rank())
    return hvd.rank()

def training_fn():
    hvd.init()
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 3):
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
            state.commit()

    state = hvd.elastic.TorchState(model, optimizer, batch=0, epoch=0)
    train(state)
    return state.epoch

if __name__ == "__main__":
    ray.init()
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
    executor.start(executable_cls=MyModel, executable_args=[0.1])
    for i in range(5):
        executor.execute(lambda worker: worker.train())
    result = executor.execute(lambda worker: worker.get_weights())
    assert all(isinstance(res, dict) for res in result)
    assert torch.equal(result[0]["weight"], result[1]["weight"])
    assert executor.run(simple_fn) == [0, 1]
    executor.shutdown()
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), min_workers=2, max_workers=2)
    executor.start()
    assert executor.run(training_fn) == [2, 2]
    executor.shutdown()
    print("done")
"""


def test_a_script_of_horovod_runs_unchanged_by_the_alias(cluster, tmp_path):
    imports = "import horovod.torch as hvd\nfrom horovod.ray import RayExecutor"
    (tmp_path / "script.py").write_text(STATEFUL.replace("IMPORT", imports))
    printed = output_of(["-m", "ringtrain.horovod", "script.py"], tmp_path, cluster)
    assert "\ndone\n" in printed
    assert "hvd rank" in printed  # as Ray's users see the output of actors


def output_of(words, folder, cluster):
    environ = {**os.environ, "RAY_ADDRESS": cluster.address}
    run = [sys.executable, *map(str, words)]
    done = subprocess.run(run, cwd=folder, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# A driver that reaches the cluster by Ray Client.
REMOTE = """
import sys
import ray
import ringtrain as hvd
from ringtrain.ray import RayExecutor

def rank_and_size():
    hvd.init()
    return hvd.rank(), hvd.size()

def run_all():
    executor = RayExecutor(num_workers=2)
    executor.start()
    results = executor.run(rank_and_size)
    executor.shutdown()
    return results

ray.init(sys.argv[1])
try:
    RayExecutor(num_workers=2).start()
except RuntimeError as error:
    print(error)
print(ray.get(ray.remote(num_cpus=0)(run_all).remote()))
"""


def test_a_driver_of_ray_client_hears_to_call_the_executor_in_a_task(cluster, tmp_path):
    pytest.importorskip("grpc")
    (tmp_path / "script.py").write_text(REMOTE)
    port = free_port()
    words = ["--address", cluster.address, "--host", "localhost", "--port", str(port), "--mode", "legacy"]
    server = subprocess.Popen([sys.executable, "-m", "ray.util.client.server", *words])
    try:
        printed = output_of(["script.py", f"ray://localhost:{port}"], tmp_path, cluster)
    finally:
        server.kill()
        server.wait()
    refusal, results = printed.splitlines()[-2:]
    assert "not run through Ray Client (ray://)" in refusal
    assert refusal.endswith("ray.get(ray.remote(num_cpus=0)(function).remote())")
    assert results == "[(0, 2), (1, 2)]"


def test_the_script_of_the_page_trains(cluster, tmp_path):
    page = (ROOT / "docs" / "engines.md").read_text().partition("\n## Ray\n")[2]
    (tmp_path / "train.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    printed = output_of(["train.py"], tmp_path, cluster)
    loss = re.search(r"loss of each rank: \[(\d\S*), \1\]\n", printed)
    assert loss and float(loss[1]) < 1e-6, printed


def test_the_example_learns_the_digits_though_actors_die(cluster, tmp_path):
    pytest.importorskip("sklearn")
    example = ROOT / "examples" / "ray_digits.py"
    printed = output_of([example, "--workers", 2, "--elastic", "--kill", 2], tmp_path, cluster)
    found = re.findall(r"rank \d \(pid \d+\): test accuracy (\S+) after (\d+) generation", printed)
    assert len(found) == 2 and all(float(accuracy) > 0.9 and int(number) == 3 for accuracy, number in found), printed


# --- Ray Train --------------------------------------------------------------------------------------------------------


def train_with_checkpoints(config):
    from ray import train

    hvd.init()
    context = train.get_context()
    assert (hvd.rank(), hvd.size()) == (context.get_world_rank(), context.get_world_size())
    assert hvd.local_rank() == context.get_local_rank()
    begin = 0
    if train.get_checkpoint():
        with train.get_checkpoint().as_directory() as folder:
            begin = json.loads(Path(folder, "epoch").read_text()) + 1
    shard = train.get_dataset_shard("train")
    for epoch in range(begin, 3):
        own = sum(int(batch["id"].sum()) for batch in shard.iter_batches(batch_size=16))
        total = int(hvd.allreduce(np.array([own]), op=hvd.Sum)[0])
        if epoch == 2 and hvd.rank() == 1 and not Path(config["mark"]).exists():
            Path(config["mark"]).touch()
            time.sleep(1)  # Ray Train looks now and then whether there is a report
            kill_own_process()
        folder = Path(config["folder"], f"{epoch}-{begin}")
        folder.mkdir(exist_ok=True)
        (folder / "epoch").write_text(str(epoch))
        report = {"total": total, "epoch": epoch, "begin": begin}
        train.report(report, checkpoint=train.Checkpoint(folder) if hvd.rank() == 0 else None)


def test_ray_train_reports_and_goes_on_from_a_checkpoint(everything_is_given_back, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from ringtrain.ray import RingtrainConfig

    trainer = DataParallelTrainer(
        train_with_checkpoints,
        train_loop_config={"folder": str(tmp_path), "mark": str(tmp_path / "mark")},
        backend_config=RingtrainConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        datasets={"train": ray.data.range(100, override_num_blocks=4)},
        run_config=RunConfig(storage_path=str(tmp_path), name="run", failure_config=FailureConfig(max_failures=1)),
    )
    result = trainer.fit()
    assert result.metrics == {"total": 4950, "epoch": 2, "begin": 2}
    with result.checkpoint.as_directory() as folder:
        assert Path(folder, "epoch").read_text() == "2"
