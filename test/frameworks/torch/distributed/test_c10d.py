"""The backend "ringtrain" of torch.distributed: every call, trainings beside gloo, ways to start, and errors."""

import _thread
import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
from harness.forked import forks_of
from harness.frameworks import need_torch_of_backend, on_demand
from harness.socket_ranks import free_port

from ringtrain.job import launched_by

need_torch_of_backend()

torch = on_demand("torch")
dist = on_demand("torch.distributed")
hvd = on_demand("ringtrain.torch")
_core = on_demand("ringtrain._core")
flight = on_demand("ringtrain.flight")
flight_recorder = on_demand("ringtrain.record.flight_recorder")
naming = on_demand("ringtrain.torch.distributed.naming")
c10d_calls = on_demand("c10d_calls")
c10d_trainings = on_demand("c10d_trainings")

forks = forks_of("torch", "ringtrain.torch.distributed")

HERE = Path(__file__).resolve().parent
LIMIT_S = 240
LIMIT_OF_TORCHS_TESTS_S = 900


@contextlib.contextmanager
def default_group(timeout_s=60):
    """Of all ranks of the job that the test has joined; as its value the rank."""
    import ringtrain.torch.distributed  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("ringtrain", init_method="ringtrain://", timeout=timedelta(seconds=timeout_s))
    try:
        yield dist.get_rank()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # Cycles keep a group and its store, which have threads: a forked child that collected them would abort.
        gc.collect()


def run(launcher, script, *arguments, limit_s=LIMIT_S, **variables):
    """Returns the output of a job of ranks."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore", **variables}
    command = [*launcher, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, timeout=limit_s, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def ringrun(ranks, *flags):
    words = ["-m", "ringtrain.run", "--no-prefix-output", "-np", str(ranks), *flags]
    return [sys.executable, *words, sys.executable, "-W", "ignore"]


def torchrun(ranks):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]


# --------------------------------------------------------------------------------------------------------- names


def names_of(names, signatures):
    return [names.next("all_reduce", signature).name for signature in signatures]


def test_a_repeated_step_has_the_same_names_again():
    step = ["a", "b", "a", "c", "a", "a"]
    names = naming.Names(0)
    of_steps = [names_of(names, step) for _ in range(20)]
    assert len({name for of_step in of_steps for name in of_step}) <= 8 * (len(step) + 4)
    last = dict(zip(of_steps[-1], step, strict=True))
    for of_step in of_steps[2:]:
        assert all(last.get(name, signature) == signature for name, signature in zip(of_step, step, strict=True))


def test_ranks_that_have_agreed_so_far_have_one_name_for_what_they_disagree_about():
    one, other = naming.Names(0), naming.Names(0)
    assert names_of(one, "abcab") == names_of(other, "abcab")
    assert one.next("all_reduce", "c").name == other.next("broadcast", "d").name


# ------------------------------------------------------------------------------------------------ what it can do


@pytest.mark.slow
@pytest.mark.ranks(1, 2, 3, 4, timeout=120)
@pytest.mark.ranks(2, initialised=False, timeout=120, way="begins with the group")
def test_every_call_gives_exact_results_in_every_group():
    c10d_calls.check("ringtrain", "ringtrain://")


@pytest.mark.ranks(3, slow=[3], timeout=120)
def test_every_call_that_is_checked_is_right_with_gloo(tmp_path):
    c10d_calls.check("gloo", f"file://{tmp_path}/meeting", rank=hvd.rank(), world_size=3)


@pytest.mark.ranks(2, initialised=False, slow=[2], timeout=240)
def test_trainings_have_the_loss_that_they_have_with_gloo(tmp_path):
    place = launched_by.detect()
    losses = c10d_trainings.losses(tmp_path, "gloo", f"file://{tmp_path}/meeting", rank=place.rank, world_size=2)
    for _ in range(2):  # the second time all is made anew
        assert c10d_trainings.losses(tmp_path, "ringtrain", "ringtrain://") == losses


@pytest.mark.slow
def test_torchs_own_tests_of_a_backend_pass_on_three_ranks():
    printed = run([sys.executable], "tests_of_torch.py", "ringtrain", 3, limit_s=LIMIT_OF_TORCHS_TESTS_S)
    assert printed.count("\npassed ") > 80, printed


@pytest.mark.slow
def test_the_examples_learn():
    examples = HERE.parents[3] / "examples"
    epoch = r"^epoch  \d: loss [\d.]+ of the last batch, .*[\d,]+ (?:points|samples)/s$"
    printed = run(torchrun(2), examples / "torch_ddp.py")
    assert len(re.findall(epoch.replace("last batch, ", "last batch, accuracy "), printed, re.MULTILINE)) == 5, printed
    assert float(re.findall(r"accuracy ([\d.]+)", printed)[-1]) > 0.95, printed
    printed = run(ringrun(2), examples / "torch_fsdp.py", "--init-method", "ringtrain://")
    assert len(re.findall(epoch, printed, re.MULTILINE)) == 3, printed
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 3 and losses[-1] < losses[0] / 2, printed
    assert re.search(r"this rank has (\d+) of \d+ parameters", printed), printed


@pytest.mark.slow
def test_the_example_of_tensor_parallelism_learns_and_writes_as_with_gloo_and_as_on_one_rank():
    script = HERE.parents[3] / "examples" / "torch_tensor_parallel.py"

    def learn_and_write(launcher, *arguments):
        """Returns what the example prints, but for how fast it was, which differs from run to run."""
        printed = run(launcher, script, "--epochs", 3, "--steps", 20, *arguments)
        return re.sub(r"[\d,]+ characters/s", "", printed)

    def losses_of(printed):
        found = re.findall(r"^epoch  \d: loss ([\d.]+) on average, $", printed, re.MULTILINE)
        return [float(loss) for loss in found]

    printed = learn_and_write(torchrun(2))
    losses = losses_of(printed)
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.5, printed
    own, whole = map(int, re.search(r"this rank has (\d+) of (\d+) parameters", printed).groups())
    assert whole / 2 < own < 0.55 * whole, printed
    assert re.search(r"^wrote :\nThe [ -~\n]{60}\n$", printed, re.MULTILINE), printed
    assert learn_and_write(torchrun(2), "--backend", "gloo") == printed
    assert learn_and_write(ringrun(2), "--init-method", "ringtrain://") == printed
    # One rank sums in another order.
    assert losses_of(learn_and_write(torchrun(1))) == pytest.approx(losses, abs=0.002)


# -------------------------------------------------------------------------------------------- how the ranks meet


_SPAWNED = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing
import ringtrain.torch.distributed

def work(rank, address):
    dist.init_process_group("ringtrain", init_method=address, rank=rank, world_size=2)
    dist.all_reduce(tensor := torch.ones(3))
    assert tensor.tolist() == [2.0] * 3
    dist.destroy_process_group()
    print("summed", flush=True)

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=2)
"""


def test_spawned_processes_meet_at_the_address_of_the_script(tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text(_SPAWNED)
    assert run([sys.executable], script, f"tcp://127.0.0.1:{free_port()}").count("summed") == 2


_IMPORTS = """
import sys, torch
slow = [name for name in ("ringtrain._core", "ringtrain.torch") if name in sys.modules]
print("backends:", torch.distributed.Backend.backend_list, "loaded:", slow)
"""


def test_the_import_of_torch_registers_the_backend_without_loading_it(tmp_path):
    script = tmp_path / "imports.py"
    script.write_text(_IMPORTS)
    printed = run([sys.executable], script)
    assert "'ringtrain'" in printed and "loaded: []" in printed
    assert "'ringtrain'" not in run([sys.executable], script, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_a_pytorch_that_does_not_take_the_backend_is_imported_all_the_same(monkeypatch):
    from ringtrain.runner import installed

    def refuse():
        raise AttributeError("no Backend")

    monkeypatch.setattr(installed, "offer_torch_backend", refuse)
    with pytest.warns(UserWarning, match="import ringtrain.torch.distributed"):
        __import__("ringtrain").load_torch_backend()


@pytest.mark.slow
def test_a_program_that_asks_for_gloo_gets_ringtrain():
    printed = run(torchrun(3), "c10d_calls.py", "gloo", RINGTRAIN_AS_GLOO="1")
    assert printed.count("every call is right") == 3


@pytest.mark.ranks(2)
def test_the_job_that_init_has_joined_is_used_and_stays():
    for _ in range(2):
        with default_group():
            dist.all_reduce(tensor := torch.ones(3))
            assert tensor.tolist() == [2.0] * 3
            assert hvd.allreduce(torch.ones(3), name="beside").tolist() == [1.0] * 3
        assert hvd.is_initialized()


@pytest.mark.ranks(2, initialised=False)
def test_a_job_that_began_with_the_group_ends_with_it():
    for _ in range(2):
        assert not hvd.is_initialized()
        with default_group():
            dist.all_reduce(tensor := torch.ones(3))
            assert tensor.tolist() == [2.0] * 3
        assert not hvd.is_initialized()


def belongings():
    """How many threads, descriptors and shared memory mappings this process has."""
    gc.collect()
    mappings = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(mappings)


def has_torchs_store():
    """Whether this process has a store of torch whose server, a thread, closes connections of ranks when they end."""
    for file in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            if "pt_tcpstore" in file.read_text():
                return True
    return False


@pytest.mark.ranks(3, initialised=False, isolated=True, timeout=120)
def test_groups_that_come_and_go_leave_nothing_behind():
    from ringtrain.torch.distributed import meeting

    def use(group):
        dist.all_reduce(tensor := torch.ones(1000), group=group)
        work = dist.all_reduce(tensor, async_op=True, group=group)
        work.get_future().wait()
        assert tensor[0] == dist.get_world_size(group) ** 2

    def make_and_end_a_pair(rank):
        pair = dist.new_group([0, 1])
        if rank < 2:
            use(pair)
            dist.destroy_process_group(pair)

    seen = []
    for _ in range(5):
        with default_group() as rank:
            of_groups = []
            for _ in range(4):
                make_and_end_a_pair(rank)
                use(None)
                dist.barrier()
                of_groups.append(belongings())
            # Threads of the lookout come when they are needed, one for each of the two groups, with what they sleep on.
            most = [count + may_come for count, may_come in zip(of_groups[1], (2, 2, 0), strict=True)]
            assert all(count <= limit for count, limit in zip(of_groups[3], most, strict=True)), of_groups
        assert not hvd.is_initialized() and not meeting.current_job()
        assert not has_torchs_store()  # as long as somebody keeps a group of the job
        seen.append(belongings())
    assert all(after <= before for before, after in zip(seen[2], seen[-1], strict=True)), seen


def begin_what_no_other_rank_calls():
    return [
        dist.all_reduce(torch.ones(3), async_op=True),
        dist.all_gather_into_tensor(torch.empty(2 * dist.get_world_size()), torch.ones(2), async_op=True),
        dist.barrier(async_op=True),
        *(dist.isend(torch.ones(2), 1, tag=tag) for tag in range(2)),
        dist.irecv(torch.ones(2), 1),
        *(dist.all_reduce(torch.ones(3), async_op=True) for _ in range(40)),  # more than there are names
    ]


@pytest.mark.ranks(2, 3)
def test_operations_that_one_rank_alone_has_called_end_with_the_group():
    for _ in range(3):
        works = []
        with default_group() as rank:
            dist.all_reduce(torch.ones(3))
            if rank == 0:
                works = begin_what_no_other_rank_calls()
                future = works[0].get_future()
        for work in works:
            with pytest.raises(hvd.ShutDownError, match=r'of group "\w+".* was removed by all its ranks before'):
                work.wait()
        if works:
            with pytest.raises(RuntimeError, match=r"ShutDownError: all_reduce #2 of group"):
                future.wait()
        with default_group() as rank:
            for count in (3, 2, 1031):
                dist.all_reduce(tensor := torch.full((count,), rank + 1.0))
                size = dist.get_world_size()
                assert torch.equal(tensor, torch.full((count,), size * (size + 1) / 2))
            if rank < 2:
                received = torch.empty(2)
                other = dist.irecv(received, 1 - rank)
                dist.send(torch.full((2,), 5.0 + rank), 1 - rank)
                other.wait()
                assert received.tolist() == [6.0 - rank] * 2
        pending = [one["name"] for one in _core.last_operations() if not one["ended_s"]]
        assert not [name for name in pending if name.startswith("group")], pending


@pytest.mark.ranks(2, initialised=False)
def test_operations_that_one_rank_alone_has_called_end_with_the_job_of_the_group():
    for _ in range(2):
        works = []
        with default_group() as rank:
            if rank == 0:
                works = begin_what_no_other_rank_calls()
        for work in works:
            with pytest.raises(hvd.ShutDownError):
                work.wait()
        with default_group():
            dist.all_reduce(tensor := torch.ones(3))
            assert tensor.tolist() == [2.0] * 3


@pytest.mark.ranks(2)
def test_operations_under_way_when_all_ranks_destroy_the_group_end_on_all_ranks_alike():
    for _ in range(5):
        tensors = [torch.full((1000,), hvd.rank() + 1.0) for _ in range(20)]
        with default_group():
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        ends = []
        for work, tensor in zip(works, tensors, strict=True):
            try:
                work.wait()
                assert torch.equal(tensor, torch.full((1000,), 3.0))
                ends.append(True)
            except hvd.ShutDownError:
                ends.append(False)
        of_ranks = hvd.allgather_object(ends)
        assert of_ranks[0] == of_ranks[1], of_ranks


@pytest.mark.ranks(2)
def test_another_rank_than_that_of_the_job_is_refused():
    import ringtrain.torch.distributed  # noqa: F401

    with pytest.raises(
        ValueError, match=r"rank \d of 2, but in the job that hvd.init\(\) has joined it is rank \d of 2"
    ):
        dist.init_process_group("ringtrain", store=dist.HashStore(), rank=1 - hvd.rank(), world_size=2)


# --------------------------------------------------------------------------------------------- repeated allreduces


def summed(values, op=None, **options):
    """The result of all_reduce, of a tensor that is made of the values."""
    tensor = torch.tensor(values, **options)
    dist.all_reduce(tensor, op=op or dist.ReduceOp.SUM)
    return tensor


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
def test_a_repeated_allreduce_may_change_in_every_way():
    with default_group() as rank:
        size = dist.get_world_size()
        rising = sum(range(size))
        for step in range(40):
            assert summed([rank, step]).tolist() == [rising, size * step]
            assert summed([[rank], [step]]).tolist() == [[rising], [size * step]]
            assert summed([rank, 0.5], op=dist.ReduceOp.MAX if step % 3 else None)[0] == (
                size - 1 if step % 3 else rising
            )
            assert summed([rank, step], dtype=torch.float64 if step % 5 else torch.float32)[0] == rising
            assert summed([rank] * (1 + step % 2)).tolist() == [rising] * (1 + step % 2)
            parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
            dist.all_reduce(parameter.data if step % 4 == 0 else parameter.detach())
            assert parameter.tolist() == [rising] * 3
            # One rank alone leaves the way of what is repeated.
            rows = torch.full((2, 2), float(rank))
            tensor = rows.t()[:, :1] if step % 7 == 0 and rank == 0 else torch.full((2, 1), float(rank))
            dist.all_reduce(tensor)
            assert tensor.tolist() == [[rising]] * 2
            work = dist.all_reduce(tensor := torch.full((4,), rank), async_op=True)
            assert work.get_future().wait()[0].tolist() == [rising] * 4
            assert tensor.tolist() == [rising] * 4 and work.is_success()


@pytest.mark.ranks(2)
def test_threads_repeat_allreduces_in_groups_of_their_own():
    with default_group() as rank:
        groups = [dist.new_group() for _ in range(3)]
        failures = []

        def work(group, count):
            for _ in range(100):
                dist.all_reduce(tensor := torch.full((count,), float(rank)), group=group)
                if tensor.tolist() != [1.0] * count:
                    failures.append(tensor)

        threads = [threading.Thread(target=work, args=(group, 1 + i)) for i, group in enumerate(groups)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


@pytest.mark.ranks(2)
def test_a_repeated_allreduce_fails_as_the_first_does():
    with default_group() as rank:
        for _ in range(40):
            dist.all_reduce(torch.ones(2))
        with pytest.raises(
            hvd.MismatchError, match=r'^all_reduce #41 of group "\d+" \(default_pg\): rank 0 sent float32\[2\], rank 1'
        ):
            dist.all_reduce(torch.ones(2 + rank))
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.all_reduce(torch.ones(2))
    with default_group(timeout_s=1) as rank:
        group = dist.group.WORLD
        for _ in range(40):
            dist.all_reduce(torch.ones(2))
        if rank == 0:
            with pytest.raises(hvd.StalledError, match=r"all_reduce #41 of group .* within the timeout of 1 s"):
                dist.all_reduce(torch.ones(2))
        else:
            time.sleep(2)
            dist.all_reduce(torch.ones(2), async_op=True).wait(timedelta(seconds=60))
        hvd.barrier()
    with pytest.raises(hvd.ShutDownError, match=r"the group is gone"):
        group.allreduce([torch.ones(2)], dist.AllreduceOptions()).wait()


# ------------------------------------------------------------------------------------------------------- errors


@pytest.mark.ranks(2)
def test_a_disagreement_is_named_and_the_next_group_works():
    with default_group() as rank:
        for _ in range(3):
            dist.all_reduce(torch.ones(2))
        title = r'^all_reduce #4 of group "\d+" \(default_pg\): rank 0 sent float32\[4\], rank 1 sent float32\[5\]'
        with pytest.raises(hvd.MismatchError, match=title):
            dist.all_reduce(torch.ones(4 + rank))
    with default_group(), pytest.raises(hvd.MismatchError, match=r"rank 0 called broadcast, rank 1 called allreduce"):
        if rank:
            dist.all_reduce(torch.ones(2))
        else:
            dist.broadcast(torch.ones(2), 0)
    with default_group(), pytest.raises(hvd.MismatchError, match=r"rank 0 used root_rank=0, rank 1 used root_rank=1"):
        dist.reduce(torch.ones(2), rank)
    dtype = torch.float32 if rank else torch.float64
    with default_group(), pytest.raises(hvd.MismatchError, match=r"rank 0 sent float64\[2\], rank 1 sent float32\[2\]"):
        dist.all_reduce(torch.ones(2, dtype=dtype))
    with default_group(), pytest.raises(hvd.MismatchError, match=r"rank 0 sent float32\[2\], rank 1 sent float32\[3\]"):
        if rank:
            dist.recv(torch.ones(3), 0)
        else:
            dist.send(torch.ones(2), 1)


@pytest.mark.ranks(2)
def test_a_future_has_the_error_too():
    with default_group() as rank:
        future = dist.all_reduce(torch.ones(4 + rank), async_op=True).get_future()
        with pytest.raises(RuntimeError, match=r"MismatchError: all_reduce #1 of group .*: rank 0 sent"):
            future.wait()


@pytest.mark.ranks(2)
def test_a_timeout_is_that_of_the_call_or_of_the_group():
    with default_group(timeout_s=1) as rank:
        if rank == 0:
            with pytest.raises(hvd.StalledError, match=r"all_reduce #1 of group .* within the timeout of 0\.2 s"):
                dist.all_reduce(torch.ones(2), async_op=True).wait(timedelta(seconds=0.2))
            with pytest.raises(hvd.StalledError, match=r"all_reduce #2 .* within the timeout of 1 s"):
                dist.all_reduce(torch.ones(3))
        else:
            time.sleep(2)
            works = [dist.all_reduce(torch.ones(count), async_op=True) for count in (2, 3)]
            for work in works:
                work.wait(timedelta(seconds=60))
        hvd.barrier()


@pytest.mark.ranks(2)
def test_a_monitored_barrier_names_who_does_not_come():
    with default_group() as rank:
        if rank:
            time.sleep(2)
        with pytest.raises(hvd.StalledError, match="Rank 1 failed to pass monitoredBarrier in 300 ms"):
            dist.monitored_barrier(timeout=timedelta(seconds=0.3))
        hvd.barrier()
        if rank == 0:
            with pytest.raises(hvd.StalledError, match=r"Rank 0 timed out in monitoredBarrier after 0 ms\. No ranks"):
                dist.monitored_barrier(timeout=timedelta(0))
        hvd.barrier()


@pytest.mark.ranks(2)
def test_a_mistake_that_one_rank_can_see_is_refused_by_the_call():
    with default_group() as rank:
        group = dist.group.WORLD
        with pytest.raises(ValueError, match=r"the tensor is on meta; a ringtrain group takes tensors in host memory"):
            dist.all_reduce(torch.ones(2, device="meta"))
        with pytest.raises(ValueError, match=r"3 elements, which is not 2 times the 2 of the input"):
            group.all_gather_single(torch.ones(3), torch.ones(2))
        with pytest.raises(TypeError, match=r"the output is torch\.float32, the input torch\.float64"):
            group.all_gather_single(torch.ones(4), torch.ones(2, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"no PREMUL_SUM"):
            dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0))
        with pytest.raises(TypeError, match=r"BAND is for integers and bool, not for torch\.float32"):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
        with pytest.raises(ValueError, match=r"the group has no rank 7: it has ranks 0 to 1"):
            group.send([torch.ones(2)], 7, 0)
        with pytest.raises(ValueError, match=r"a rank cannot send to itself"):
            group.send([torch.ones(2)], rank, 0)
        with pytest.raises(ValueError, match=r"splits .* must be 2 numbers that add up to its 4 rows"):
            group.all_to_all_single(torch.ones(4), torch.ones(4), [], [1, 1])
        dist.all_reduce(tensor := torch.ones(2))
        assert tensor.tolist() == [2.0, 2.0]
    with pytest.raises(hvd.ShutDownError, match=r"the group is gone, by destroy_process_group"):
        group.allreduce([torch.ones(2)])


@pytest.mark.ranks(2)
def test_a_rank_without_room_for_what_comes_is_told():
    with default_group() as rank:
        if rank == 0:
            with pytest.raises(ValueError, match=r"the ranks sent \[3, 2\] elements, but .* room for \[2, 2\]"):
                dist.all_to_all_single(torch.empty(4), torch.ones(6), [2, 2], [3, 3])
        else:
            dist.all_to_all_single(torch.empty(5), torch.ones(4), [3, 2], [2, 2])


def ddp(**options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0002, **options)


@pytest.mark.ranks(2)
def test_backward_of_ddp_raises_the_class_of_the_error():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    for hook in (None, default_hooks.fp16_compress_hook):
        with default_group() as rank:
            model = ddp()
            if hook is not None:
                model.register_comm_hook(None, hook)
            for _ in range(2):
                model(torch.ones(2, 8)).sum().backward()
            if rank == 0:
                with pytest.raises(hvd.MismatchError, match=r"rank 0 sent float(32|16).*rank 1 sent float32"):
                    model(torch.ones(2, 8)).sum().backward()
            else:
                with pytest.raises(hvd.MismatchError, match=r"rank 0 sent float(32|16).*rank 1 sent float32"):
                    dist.all_reduce(torch.ones(3))
            del model


@pytest.mark.ranks(2, initialised=False)
def test_the_flight_recorder_names_operations_as_torch_does(tmp_path):
    hvd.init(flight_dir=str(tmp_path))
    with default_group():
        for _ in range(12):
            dist.all_reduce(torch.ones(2))
        dist.barrier()
        path = flight_recorder.write("as the test asked for")
        operations = json.loads(path.read_text())["operations"]
        titles = [one["title"] for one in operations if one["name"].startswith("group ")]
        group = 'of group "0" (default_pg)'
        assert titles == [*(f"all_reduce #{number} {group}" for number in range(1, 13)), f"barrier #13 {group}"]
        hvd.barrier()
        assert f"done     all_reduce #12 {group}" in "\n".join(flight.report(flight.read_folder(tmp_path)))
    hvd.shutdown()


@pytest.mark.ranks(2)
def test_a_repeated_allreduce_has_the_line_of_each_of_its_calls():
    def sum_deeper(depth):
        if depth > 0:
            return sum_deeper(depth - 1)
        dist.all_reduce(torch.ones(2))  # the deep line
        return sys._getframe().f_lineno - 1

    with default_group():
        lines = []
        for step in range(60):  # the engine repeats every eighth
            if step % 7 == 0:
                lines.append(sum_deeper(step % 3))
            elif step % 3:
                dist.all_reduce(torch.ones(2))
                lines.append(sys._getframe().f_lineno - 1)
            else:
                dist.all_reduce(torch.ones(2))
                lines.append(sys._getframe().f_lineno - 1)
        own = f"{dist.group.WORLD._names.group} "  # others may have left operations that never end
        sites = [one["site"] for one in _core.last_operations() if one["name"].startswith(own)]
        assert [int(site.rpartition(":")[2]) for site in sites[-60:]] == lines


@pytest.mark.ranks(2)
def test_waiting_for_a_repeated_allreduce_gives_each_caller_a_work_of_its_own():
    with default_group():
        options = dist.AllreduceOptions()
        options.asyncOp = False
        kept = []
        for step in range(30):
            dist.all_reduce(torch.full((2,), float(step)))
            kept.append(dist.group.WORLD.allreduce([torch.full((2,), float(step))], options))
        assert [work.result()[0].tolist() for work in kept] == [[2.0 * step] * 2 for step in range(30)]


@pytest.mark.ranks(2)
def test_each_call_in_a_timeline_has_the_name_that_torch_knows(tmp_path):
    with default_group() as rank:
        hvd.start_timeline(str(tmp_path / "timeline.json"))
        for _ in range(12):
            dist.all_reduce(torch.ones(2))
        if rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.ones(2), 0)
        hvd.stop_timeline()
        events = json.loads((tmp_path / "timeline.json").read_text())
        own = [event.get("args", {}) for event in events if event["pid"] == rank]
        titles = [arguments["title"] for arguments in own if "title" in arguments]
        group = f'of group "{dist.group.WORLD.group_name}" (default_pg)'
        transfer = f"{'recv' if rank else 'send'} (from rank 0 to 1, tag 0, #1 {group})"
        assert titles == [*(f"all_reduce #{number} {group}" for number in range(1, 13)), transfer]


@pytest.mark.ranks(2)
def test_metrics_count_operations_by_the_kinds_that_torch_knows():
    with default_group() as rank:
        before = hvd.metrics()
        for _ in range(12):
            dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2, dtype=torch.int32), op=dist.ReduceOp.BXOR)
        dist.reduce_scatter_single(torch.empty(2), torch.ones(4))
        if rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.empty(2))
        dist.barrier()
        after = hvd.metrics()

        def grown(kind):
            return after[kind]["operations"] - before.get(kind, {"operations": 0})["operations"]

        found = {kind: grown(kind) for kind, value in after.items() if isinstance(value, dict) and grown(kind)}
        own = {"recv": 1} if rank else {"send": 1}
        assert found == {"all_reduce": 13, "reduce_scatter_tensor": 1, "barrier": 1, **own}


def events_of(group, prefix):
    """Returns name, shapes and "is asynchronous" of each event that torch.profiler shows of operations."""
    rank, values = dist.get_rank(), torch.ones(2, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        dist.all_reduce(values, group=group)
        dist.all_reduce(values, group=group, async_op=True).wait()
        dist.broadcast(values, 1, group=group)
        dist.reduce(values, 0, group=group)
        dist.all_gather([torch.empty(2, 3) for _ in range(2)], values, group=group)
        dist.gather(values, [torch.empty(2, 3) for _ in range(2)] if rank == 0 else None, group=group)
        dist.all_to_all_single(torch.empty(2, 3), values, group=group)
        if rank == 0:
            dist.send(torch.ones(4), 1, group=group)
            dist.send(torch.ones(5), 1, group=group)
        else:
            dist.recv(torch.empty(4), 0, group=group)
            dist.recv(torch.empty(5), group=group)
        with torch.profiler.record_function("rest"):
            time.sleep(0.001)
    (rest,) = (event for event in profile.events() if event.name == "rest")
    events = [event for event in profile.events() if event.name.startswith(prefix)]
    assert all(event.time_range.end <= rest.time_range.start for event in events)
    assert not [event.name for event in profile.events() if event.name.startswith("profiler::_call")]
    return sorted((event.name.removeprefix(prefix), event.input_shapes, event.is_async) for event in events)


@pytest.mark.ranks(2)
def test_the_profiler_shows_operations_as_those_of_gloo():
    with default_group() as rank:
        of_gloo = dist.new_group(backend="gloo")
        expected = events_of(of_gloo, "gloo:")
        assert ("all_reduce", [[2, 3]], True) in expected
        assert ("send" if rank == 0 else "recvAnySource") in [name for name, _, _ in expected]
        assert events_of(None, "ringtrain:") == expected
        with dist.record_comm("last step"), torch.profiler.profile() as profile:
            dist.all_reduce(torch.ones(2))
        assert "last step" in [event.name for event in profile.events()]
        with torch.profiler.profile(), pytest.raises(hvd.MismatchError):
            dist.all_reduce(torch.ones(4 + rank))
        dist.destroy_process_group(of_gloo)


@pytest.mark.ranks(2)
def test_an_error_that_was_handled_keeps_no_tensor():
    def fail(rank):
        tensor = torch.ones(4 + rank)
        with pytest.raises(hvd.MismatchError):
            dist.all_reduce(tensor)
        return weakref.ref(tensor)

    with default_group() as rank:
        tensor = fail(rank)
        gc.collect()
        assert tensor() is None


@pytest.mark.ranks(1)
def test_backward_raises_errors_of_others_as_they_are():
    with default_group():
        loss = torch.ones(2, requires_grad=True).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
            torch.ones(1).backward()


_BEGIN = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist
import ringtrain.torch as hvd, ringtrain.torch.distributed
torch.set_num_threads(1)
"""


@contextlib.contextmanager
def ranks_of(forks, folder, program, size, *arguments):
    """The processes of a job that meets at MASTER_ADDR, of a program behind _BEGIN. They are killed in the end."""
    script = folder / "script.py"
    script.write_text(_BEGIN + program)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    words = [str(script), *map(str, arguments)]
    ranks = []
    try:
        for rank in range(size):
            environment = {**os.environ, **place, "RANK": str(rank)}
            ranks.append(forks.start(words, environment, folder / f"output-{rank}"))
        yield ranks
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL)


@pytest.mark.ranks(2)
def test_an_operation_on_a_thread_without_a_function_of_python():
    """As gradients on a GPU are reduced, which torch computes on a thread of its own."""
    with default_group() as rank:
        tensor = torch.empty(3)
        for begins, total in ((rank + 1.0, 3.0), (3.0, 6.0), (6.0, 12.0)):  # repeated ones take a shorter way
            tensor.fill_(begins)
            _thread.start_new_thread(dist.group.WORLD.allreduce, ([tensor],))
            end = time.monotonic() + LIMIT_S
            while not torch.equal(tensor, torch.full((3,), total)):
                assert time.monotonic() < end, tensor
                time.sleep(0.01)


_LATE = """
dist.init_process_group("ringtrain")
pair = dist.new_group([0, 1], group_desc="pair")
layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
model = torch.nn.parallel.DistributedDataParallel(layers, process_group=pair, bucket_cap_mb=0.0002)
for _ in range(12):  # from then on the allreduces are prepared
    model(torch.ones(2, 8)).sum().backward()
dist.barrier()
while dist.get_rank() == 1 and not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
loss = model(torch.ones(2, 8)).sum()
loss.backward()
dist.barrier()
dist.destroy_process_group()
"""


def test_a_stall_warning_says_which_group_call_and_bucket_waits_and_where_in_the_script(forks, tmp_path, monkeypatch):
    monkeypatch.setenv("RINGTRAIN_STALL_WARNING_TIME_S", "0.5")
    monkeypatch.setenv("RINGTRAIN_STALL_SHUTDOWN_TIME_S", "60")
    bucket = r"bucket 0 of DistributedDataParallel \(3\.bias, 3\.weight\)"
    where = r"rank 0 submitted it \(at [^ ]*script\.py:17\), rank 1 did not"
    warning = re.compile(rf'all_reduce #\d+ of group "\w+" \(pair\), {bucket}: waited \d+ s\. {where}')
    go_on = tmp_path / "warned"
    with ranks_of(forks, tmp_path, _LATE, 2, go_on) as ranks:
        ranks[0].wait_for(warning, LIMIT_S)
        go_on.touch()
        assert [process.wait(LIMIT_S) for process in ranks] == [0, 0]


_CALLS_BACK_AT_EXIT = """
dist.init_process_group("ringtrain")

def rest(future):
    time.sleep(1)
    print("came back", flush=True)

dist.all_reduce(torch.ones(2), async_op=True).get_future().then(rest)
if dist.get_rank() == 0:
    received = torch.zeros(1)
    dist.irecv(received).get_future().then(rest)
    while received == 0:
        time.sleep(0.001)
else:
    dist.send(torch.ones(1), 0)
dist.barrier()
"""


def test_python_ends_after_the_callbacks_of_futures_that_are_under_way(forks, tmp_path):
    with ranks_of(forks, tmp_path, _CALLS_BACK_AT_EXIT, 2) as ranks:
        texts = [process.ends(LIMIT_S) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], texts
    assert [text.count("came back") for text in texts] == [2, 1], texts


_LOST = """
dist.init_process_group("ringtrain")
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
for _ in range(2):
    model(torch.ones(2, 64)).sum().backward()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
try:
    model(torch.ones(2, 64)).sum().backward()
except hvd.PeerLostError as error:
    assert "rank 1" in str(error), error
    print("lost in backward", flush=True)
try:
    dist.all_reduce(torch.ones(2))
except hvd.PeerLostError as error:
    assert "rank 1" in str(error), error
    print(f"named after {time.monotonic() - begin:.1f} s", flush=True)
os._exit(0)
"""


def test_a_killed_rank_is_named_by_the_backward_of_ddp_and_by_each_later_call(forks, tmp_path):
    with ranks_of(forks, tmp_path, _LOST, 3) as ranks:
        texts = [process.ends(LIMIT_S) for process in ranks]
    assert ranks[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert ranks[rank].returncode == 0 and "lost in backward" in texts[rank], texts[rank]
        assert "named after" in texts[rank], texts[rank]


_STRUCK = """
how = sys.argv[1]
dist.init_process_group("ringtrain", timeout=datetime.timedelta(seconds=120))
rank = dist.get_rank()
dist.new_group([0, 1])
dist.all_reduce(torch.ones(2))
dist.all_reduce(torch.ones(1000))
if how == "two" and rank in (1, 2):
    os.kill(os.getpid(), signal.SIGKILL)
if how == "alone" and rank == 1:
    raise ValueError("a bad batch")
begin = time.monotonic()
for step in range(3):
    try:
        dist.all_reduce(torch.ones(1000))
    except hvd.RingtrainError as error:
        print(type(error).__name__, time.monotonic() - begin, error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("how", "left", "expected"),
    [
        ("two", [0, 3], r"PeerLostError .*rank [12] .*is gone"),
        ("alone", [0, 2, 3], r"RemoteError .*rank 1 .*raised ValueError: a bad batch"),
    ],
)
def test_every_rank_that_is_left_has_a_typed_error(forks, tmp_path, how, left, expected):
    with ranks_of(forks, tmp_path, _STRUCK, 4, how) as ranks:
        for rank in left:
            text = ranks[rank].ends(LIMIT_S)
            lines = [line for line in text.splitlines() if re.match(r"\w+Error [\d.]+ ", line)]
            assert ranks[rank].returncode == 0 and lines, text
            assert re.match(expected, lines[0]), text
            assert float(lines[0].split()[1]) < 20, text


_STOPPED = """
dist.init_process_group("ringtrain", timeout=datetime.timedelta(seconds=2))
count = int(sys.argv[1])
tensors = [torch.ones(count + step % 5) for step in range(5)]
dist.barrier()
print("begins", flush=True)
step = 0
while True:
    begin = time.monotonic()
    try:
        dist.all_reduce(tensors[step % 5])
    except hvd.RingtrainError as error:
        print(type(error).__name__, time.monotonic() - begin, error, flush=True)
        break
    step += 1
os._exit(0)
"""


@pytest.mark.parametrize("count", [1, 4_000_000])
def test_a_rank_that_stops_anywhere_ends_the_wait_of_the_others_at_the_timeout_of_the_group(forks, tmp_path, count):
    with ranks_of(forks, tmp_path, _STOPPED, 3, count) as ranks:
        ranks[1].wait_for("begins", LIMIT_S)
        time.sleep(0.5)
        ranks[1].send_signal(signal.SIGSTOP)
        for rank in (0, 2):
            text = ranks[rank].ends(60)
            found = re.search(r"^StalledError ([\d.]+) ", text, re.M)
            assert ranks[rank].returncode == 0 and found, text
            assert float(found[1]) < 10, text


_ELASTIC = """
import os, signal
import torch, torch.distributed as dist
import ringtrain.torch as hvd, ringtrain.torch.distributed

torch.set_num_threads(1)
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
torch.nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)

@hvd.elastic.run
def train(state):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("ringtrain", init_method="ringtrain://")
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    print(f"process {os.getpid()} is one of {dist.get_world_size()} from step {state.step}", flush=True)
    while state.step < 12:
        if state.step == 7 and dist.get_world_size() == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        ddp(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state.step += 1
        if state.step % 5 == 0:
            state.commit()
    print(f"process {os.getpid()} ends with bias {model.bias.item()}", flush=True)
    dist.destroy_process_group()

train(hvd.elastic.TorchState(model, optimizer, step=0))
"""


def test_an_elastic_job_makes_the_default_group_of_ddp_again_in_the_processes_that_are_left(tmp_path):
    script = tmp_path / "elastic.py"
    script.write_text(_ELASTIC)
    printed = run(ringrun(3, "--min-np", "2", "--max-np", "3"), script)
    began = set(re.findall(r"process (\d+) is one of 3 from step 0", printed))
    went_on = set(re.findall(r"process (\d+) is one of 2 from step 5", printed))
    # Each step takes 2 * 0.25 from the bias, so the lost steps 6 and 7 count once.
    ended = set(re.findall(r"process (\d+) ends with bias -6\.0", printed))
    assert len(began) == 3 and len(went_on) == 2 and went_on < began and ended == went_on, printed


_LEAVES = """
import os, sys, time
from datetime import timedelta

import torch, torch.distributed as dist
import ringtrain as hvd, ringtrain.torch.distributed

end, late_s = sys.argv[1], float(sys.argv[2])
dist.init_process_group("ringtrain", init_method="ringtrain://", timeout=timedelta(seconds=60))
rank = dist.get_rank()
if rank < 2:
    time.sleep(late_s)
pair = dist.new_group([0, 1])
if rank == 2:
    if end == "destroys":
        dist.destroy_process_group()
    sys.exit(0)
values = torch.ones(2)
for _ in range(3):
    dist.all_reduce(values, group=pair)
assert values.tolist() == [8.0, 8.0]
if end == "is needed":
    begin = time.monotonic()
    try:
        dist.all_reduce(values)
    except hvd.ShutDownError as error:
        assert time.monotonic() - begin < 20, "the others were told after a long time"
        assert "2" in str(error), error
    else:
        raise SystemExit("an operation without rank 2 is done")
os.write(1, f"rank {rank} is done\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("end", "late_s"), [("ends", 1), ("destroys", 1), ("is needed", 0)])
def test_a_rank_that_leaves_after_the_groups_were_made_waits_until_the_others_have_made_them(end, late_s, tmp_path):
    script = tmp_path / "leaves.py"
    script.write_text(_LEAVES)
    output = run(ringrun(3), script, end, late_s)
    assert "rank 0 is done" in output and "rank 1 is done" in output, output


_FOR_TORCHRUN = """
import sys, torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1])
ones = torch.ones(1)
dist.all_reduce(ones)
print(f"rank {dist.get_rank()} has {ones.item()}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["ringtrain", "gloo"])
def test_a_script_for_torchrun_runs_under_ringrun_as_it_is(backend, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_FOR_TORCHRUN)
    assert sorted(run(ringrun(2), script, backend).splitlines()) == ["rank 0 has 2.0", "rank 1 has 2.0"]
