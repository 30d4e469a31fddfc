"""The backend as torch 2.14 and newer see it: hooks, a Backend for each device, ranks that change."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.frameworks import need, version_of

need("torch")
if version_of("torch") < (2, 14):
    pytest.skip("this PyTorch has no hooks: `make newest-torch` runs these with one that has", allow_module_level=True)

_BEGIN = """
import json, os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import ringtrain as hvd, ringtrain.torch.distributed
from torch._C import _distributed_c10d as c10d

torch.set_num_threads(1)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.FileStore(sys.argv[1], size)

def meet(key, value="-"):
    store.set(f"{key} {rank}", value)
    return [store.get(f"{key} {one}").decode() for one in range(size)]

def fails(kind, text, call, *given):
    try:
        call(*given)
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}: {text}")

def begin(backend="ringtrain", **options):
    dist.init_process_group(backend, store=dist.PrefixStore("torch", store), rank=rank, world_size=size,
                            timeout=timedelta(seconds=60), **options)
    return dist.distributed_c10d._get_default_group()

def require_sum():
    own = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(own)
    assert own.tolist() == [sum(range(1, dist.get_world_size() + 1))] * 4
"""


def run(script, size, folder, codes=None, **variables):
    """Plain processes with the variables of torchrun."""
    ranks = []
    for rank in range(size):
        place = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        environment = {
            **os.environ,
            **place,
            **variables,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-c", _BEGIN + script + "\nprint('well')", str(folder / "store")]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    codes = codes or [0] * size
    end = time.monotonic() + 120
    while time.monotonic() < end and any(one.poll() is None for one in ranks):
        if any(one.poll() not in (None, code) for one, code in zip(ranks, codes, strict=True)):
            break  # the others wait for it
        time.sleep(0.05)
    for one in ranks:
        one.kill()
    outputs = [one.communicate()[0].decode() for one in ranks]
    assert [one.returncode for one in ranks] == codes, "\n".join(outputs)
    for rank, output in enumerate(outputs):
        assert codes[rank] or output.endswith("well\n"), output


_HOOKS = """
group = begin()
seen = []
group.register_pre_hook(1, lambda told: seen.append(("before", told.name.name)))
group.register_post_hook(2, lambda told: seen.append(("after", told.name.name)))
calls = []

def call(name, operation, *given, **named):
    operation(*given, **named)
    calls.extend([("before", name), ("after", name)])

values = torch.ones(2)
call("ALLREDUCE", dist.all_reduce, values)
assert values.tolist() == [size, size]
call("BROADCAST", dist.broadcast, values, 0)
gathered = torch.zeros(size)
call("ALLGATHER", dist.all_gather_single, gathered, torch.full((1,), float(rank)))
assert gathered.tolist() == list(range(size))
one = torch.zeros(1)
call("REDUCE_SCATTER", dist.reduce_scatter_single, one, torch.arange(float(size)))
assert one.tolist() == [rank * size]
call("BARRIER", dist.barrier)
call("ALLTOALL", dist.all_to_all_single, torch.zeros(size), torch.ones(size))
if rank == 0:
    call("SEND", dist.send, torch.ones(3), 1)
else:
    call("RECV", dist.recv, torch.ones(3), 0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
before = len(seen)
model(torch.full((1, 3), rank + 1.0)).sum().backward()
assert model.module.weight.grad.tolist() == [[1.5] * 3]
assert ("before", "ALLREDUCE") in seen[before:]
assert seen[: len(calls)] == calls, seen
work = dist.all_reduce(values, async_op=True)
assert type(work) is ringtrain.torch.distributed.Work
work.wait()
dist.get_backend_impl(group, torch.device("cpu")).allreduce([values]).wait()
on_meta = dist.all_reduce(torch.ones(2, device="meta"), async_op=True)  # of which torch asks no Backend
assert type(on_meta) is not ringtrain.torch.distributed.Work
group.unregister_pre_hook(1), group.unregister_post_hook(2)
assert type(group) is ringtrain.torch.distributed.ProcessGroup  # which is called directly again
seen.clear()
dist.all_reduce(values)
assert seen == []

def raising(_):
    raise ValueError("of the hook")

group.register_pre_hook(3, raising)
fails(Exception, "of the hook", dist.all_reduce, values)
group.unregister_pre_hook(3)
require_sum()
aborted = []
group.register_abort_hook(4, lambda: aborted.append(rank))
backend = dist.get_backend_impl(group, torch.device("cpu"))
assert not backend.supports_reconfigure and backend.rank() == rank and backend.get_error() == c10d.ErrorType.SUCCESS
fails(RuntimeError, "enable_reconfigure=True", dist._get_reconfigure_handle)
backend.abort()
assert aborted == [rank] and type(group) is ringtrain.torch.distributed.ProcessGroup
fails(hvd.ShutDownError, "the group is gone", dist.all_reduce, values)
"""


def test_hooks_see_each_operation_and_a_group_without_them_works_as_before(tmp_path):
    run(_HOOKS, 2, tmp_path)


_ATTACHED = """
group = begin()
recorder = c10d.FlightRecorderHook.attach(group)
for length in (2, 3):
    dist.all_reduce(torch.ones(length))
fails(hvd.MismatchError, "rank 0 sent float32[4], rank 1 sent float32[5]", dist.all_reduce, torch.ones(4 + rank))
recorded = json.loads(c10d._dump_fr_trace_json())["entries"]
assert [(one["profiling_name"], one["input_sizes"]) for one in recorded] == [
    ("c10d:allreduce", [[2]]), ("c10d:allreduce", [[3]]), ("c10d:allreduce", [[4 + rank]])
], recorded
checking = c10d.NanCheckHook.attach(group)
fails(RuntimeError, "NaN found", dist.all_reduce, torch.full((2,), float("nan")))
require_sum()
dist.destroy_process_group()
os.environ["TORCH_DIST_NAN_CHECK"] = "1"
begin()
fails(RuntimeError, "NaN found", dist.all_reduce, torch.full((2,), float("nan")))
require_sum()
"""


def test_hooks_that_attach_themselves_see_each_operation(tmp_path):
    run(_ATTACHED, 2, tmp_path, TORCH_FR_BUFFER_SIZE="100")


_DIVIDED = """
class Other(c10d.Backend):
    def getBackendName(self):
        return "other"

dist.Backend.register_backend("other", lambda told, _: Other(told.group_rank, told.group_size), True, devices=["cuda"])
dist.Backend.backend_type_map["other"] = dist.ProcessGroup.BackendType.XCCL
group = begin("cpu:ringtrain,cuda:other")
assert type(dist.get_backend_impl(group, torch.device("cuda"))) is Other
assert isinstance(dist.get_backend_impl(group, torch.device("cpu")), ringtrain.torch.distributed.Backend)
seen = []
group.register_pre_hook(1, lambda told: seen.append(told.name.name))
require_sum()
assert seen == ["ALLREDUCE"]
pair = dist.new_group([0, 1])
values = torch.ones(3)
dist.all_reduce(values, group=pair)
assert values.tolist() == [2, 2, 2]
objects = [None, None]
dist.all_gather_object(objects, rank)
assert objects == [0, 1]
dist.monitored_barrier()
dist.destroy_process_group()
fails(ValueError, "has not been initialized", dist.all_reduce, values)
"""


def test_devices_are_divided_among_several_backends(tmp_path):
    run(_DIVIDED, 2, tmp_path)


_RECONFIGURED = """
group = begin(os.environ["ASKED_FOR"], enable_reconfigure=True)
backend = dist.get_backend_impl(group, torch.device("cpu"))
assert dist._supports_reconfigure() and backend.supports_reconfigure
fails(hvd.ShutDownError, "call reconfigure() first", dist.all_reduce, torch.ones(1))
handles = meet("handles", dist._get_reconfigure_handle())

def reconfigure(uuid, handles, seconds=60):
    dist._reconfigure(uuid, handles, timeout=timedelta(seconds=seconds)).wait()

def require(new_rank, new_size):
    assert (dist.get_rank(), dist.get_world_size()) == (new_rank, new_size)
    assert (backend.rank(), backend.size()) == (new_rank, new_size)
    require_sum()

reconfigure(100, handles)
require(rank, 3)
# Hooks go with the group.
seen = []
group.register_pre_hook(1, lambda told: seen.append(told.name.name))
# Shrinks, by the one in the middle.
if rank != 1:
    reconfigure(101, [handles[0], handles[2]])
    require(rank // 2, 2)
meet("shrunk")
if rank == 1:
    fails(hvd.ShutDownError, "exited early", dist.all_reduce, torch.ones(1))
# Grows, splits, merges, in an order of its own and in any order.
reconfigure(102, handles[::-1])
require(2 - rank, 3)
reconfigure(103 + min(rank, 1), handles[:1] if rank == 0 else handles[1:])
require(max(rank - 1, 0), min(rank + 1, 2))
reconfigure(110, set(handles))
require(sorted(handles).index(handles[rank]), 3)
# Wrong handles are refused before anything ends.
fails(RuntimeError, "already used", reconfigure, 110, handles)
fails(ValueError, "is no handle", reconfigure, 111, ["gloo:1"])
fails(ValueError, "comes twice", reconfigure, 111, [handles[rank]] * 2)
fails(ValueError, "is not among those", reconfigure, 111, handles[rank + 1:] + handles[:rank])
require_sum()
meet("refused")
# Operations in flight fail, also by an abort.
pending = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None
meet("in flight")
backend.abort()
if rank == 0:
    fails(hvd.ShutDownError, "", pending.wait)
fails(hvd.ShutDownError, "the group is gone", dist.all_reduce, torch.ones(1))
reconfigure(120, handles)
require(rank, 3)
# The ranks do not agree, and keep what they have.
meet("agreed")
fails(hvd.MismatchError, "other handles, or another order", reconfigure, 130,
      [handles[0], *(handles[1:] if rank < 2 else handles[:0:-1])])
fails(hvd.StalledError, "rank 2 did not come", reconfigure, 131, handles, 2) if rank < 2 else None
require(rank, 3)
reconfigure(132, handles)
require(rank, 3)
group.unregister_pre_hook(1)
assert len(seen) == (10 if rank == 0 else 9) and set(seen) == {"ALLREDUCE"}, seen
meet("before the death")
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
fails(hvd.StalledError, "rank 1 did not come", reconfigure, 140, handles, 2)
reconfigure(141, [handles[2], handles[0]])
require(1 - rank // 2, 2)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("asked_for", ["ringtrain", "gloo"])
def test_the_ranks_of_a_group_change_again_and_again_also_after_a_death(tmp_path, asked_for):
    is_gloo = str(int(asked_for == "gloo"))
    run(_RECONFIGURED, 3, tmp_path, codes=[0, -9, 0], ASKED_FOR=asked_for, RINGTRAIN_AS_GLOO=is_gloo)


_STOPPED = """
group = begin(enable_reconfigure=True)
handles = meet("handles", dist._get_reconfigure_handle())
pids = meet("pids", str(os.getpid()))
dist._reconfigure(1, handles).wait()
require_sum()
meet("begun")
if rank == 0:
    os.kill(int(pids[1]), signal.SIGSTOP)
    store.set("stopped", "-")
if rank == 1:
    store.get("going on")
    fails(hvd.RemoteError, "its group was reconfigured or aborted", dist.all_reduce, torch.ones(1))
else:
    store.get("stopped")
    begin_s = time.monotonic()
    dist._reconfigure(2, [handles[0], handles[2]], timeout=timedelta(seconds=60)).wait()
    assert time.monotonic() - begin_s < 30  # not stall_shutdown_time_s
    require_sum()
    if rank == 0:
        os.kill(int(pids[1]), signal.SIGCONT)
        store.set("going on", "-")
meet("goes on")
dist._reconfigure(3, handles).wait()
require_sum()
dist.destroy_process_group()
"""


def test_a_rank_that_is_stopped_can_be_left_out(tmp_path):
    run(_STOPPED, 3, tmp_path)


def test_the_habits_of_gloo_hold_where_every_group_has_hooks():
    """A NanCheckHook each, with which torch refuses sparse tensors, and an all_to_all_single() without splits."""
    without = "not without_any_call and not before_a_barrier and not share_memory"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", without, "-m", "not slow"]
    environment = {**os.environ, "TORCH_DIST_NAN_CHECK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    tests = Path(__file__).with_name("test_c10d_as_gloo.py")
    done = subprocess.run([*command, str(tests)], env=environment, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
