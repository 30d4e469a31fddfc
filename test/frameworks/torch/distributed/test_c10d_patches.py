"""Each patch of PyTorch: what it replaces, what goes wrong without it, and the switch that leaves it out."""

import json
import math
import os
import re
from datetime import timedelta
from pathlib import Path

import pytest
from harness.forked import forks_of
from harness.frameworks import need_torch_of_backend, on_demand, version_of
from test_c10d import default_group
from test_c10d_buckets import trained, was_in_place

need_torch_of_backend()

torch = on_demand("torch")
dist = on_demand("torch.distributed")
hvd = on_demand("ringtrain.torch")

forks = forks_of("torch", "torch.distributed", "torch.testing")

HERE = Path(__file__).resolve().parent
REPLACED = {
    "error_classes": {"torch.autograd._engine_run_backward", "torch.autograd.graph._engine_run_backward"},
    "kept_works": {"torch._C._distributed_c10d.Reducer._set_forward_pass_work_handle"},
    "builtin_hooks": {"torch.nn.parallel.distributed.DistributedDataParallel._register_builtin_comm_hook"},
    "shared_buckets": {
        "torch.nn.parallel.distributed.DistributedDataParallel._ddp_init_helper",
        "torch._C._distributed_c10d.Reducer._rebuild_buckets",
    },
    "monitored_barrier": {
        "torch.distributed.monitored_barrier",
        "torch.distributed.distributed_c10d.monitored_barrier",
    },
    "set_timeout": {"torch.distributed.distributed_c10d._set_pg_timeout"},
    "hooks": {
        "torch._C._distributed_c10d.FlightRecorderHook.attach",
        "torch._C._distributed_c10d.NanCheckHook.attach",
    },
    "gloo": {"torch.distributed.distributed_c10d.ProcessGroupGloo"},
}
# The tests and trainings that need each patch, by file and name.
TESTED_IN = {
    "error_classes": ("test_c10d.py", "test_backward_of_ddp_raises_the_class_of_the_error"),
    "kept_works": ("c10d_trainings.py", "join_dividing_by_ranks_left"),
    "builtin_hooks": ("c10d_trainings.py", "builtin_hooks"),
    "shared_buckets": (
        "test_c10d_buckets.py",
        "test_buckets_are_reduced_without_a_copy_before_and_after_they_are_rebuilt",
    ),
    "monitored_barrier": ("test_c10d.py", "test_a_monitored_barrier_names_who_does_not_come"),
    "set_timeout": ("test_c10d_as_gloo.py", "test_the_timeout_of_a_group_can_be_set_later"),
    "hooks": ("test_c10d_newest.py", "test_hooks_that_attach_themselves_see_each_operation"),
    "gloo": ("test_c10d.py", "test_a_program_that_asks_for_gloo_gets_ringtrain"),
}
# Of this PyTorch.
IS_NEW = version_of("torch") >= (2, 14)
NOT_HERE = ("monitored_barrier", "set_timeout") if IS_NEW else ("hooks",)
NAMES = [name for name in REPLACED if name not in NOT_HERE]
WITHOUT_ALL = ",".join(NAMES)

# Prints the names of all functions and classes of torch that another one has replaced.
_PRINTS_REPLACED = """
import json, sys
import torch, torch.distributed, torch.nn.parallel

def callables():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch" and module is not None:
            for key, value in list(vars(module).items()):
                if callable(value):
                    found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    found.update((f"{name}.{key}.{of}", it) for of, it in list(vars(value).items()) if callable(it))
    return found

before = callables()
if VERSION:
    torch.__version__ = VERSION
import ringtrain.torch.distributed
after = callables()
print(json.dumps([name for name, it in before.items() if name in after and after[name] is not it]))
"""


def replaced(forks, folder, version="", as_gloo="1", **environment):
    """Names of torch that the import of the backend replaces in a process of its own."""
    environment = {**os.environ, "RINGTRAIN_AS_GLOO": as_gloo, **environment}
    process = forks.start(["-c", f"VERSION = {version!r}\n{_PRINTS_REPLACED}"], environment, folder / "replaced")
    printed = process.ends(60)
    assert process.returncode == 0, printed
    return set(json.loads(printed.splitlines()[-1]))


def union(names):
    return {replaced for name in names for replaced in REPLACED[name]}


def test_every_patch_is_in_the_list_and_tested():
    from ringtrain.torch.distributed.patches import PATCHES

    assert [patch.name for patch in PATCHES] == list(REPLACED)
    for file, name in (TESTED_IN[patch] for patch in REPLACED):
        assert f"\ndef {name}(" in (HERE / file).read_text(), name
    page = (HERE.parents[3] / "docs" / "torch-distributed.md").read_text()
    told = re.findall(r"^\| `(\w+)` \| .* \| (\d)\.(\d+)-(\d?)\.?(\d*) \|$", page, re.MULTILINE)
    versions = {name: ((int(a), int(b)), (int(c), int(d) + 1) if c else (math.inf, 0)) for name, a, b, c, d in told}
    assert versions == {patch.name: (patch.first, patch.end) for patch in PATCHES}


def test_the_patches_replace_these_names_of_torch_and_no_others(forks, tmp_path):
    assert replaced(forks, tmp_path) == union(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_that_is_left_out_leaves_torch_as_it_was(name, forks, tmp_path):
    others = [other for other in NAMES if other != name]
    assert replaced(forks, tmp_path, RINGTRAIN_TORCH_WITHOUT=f" {name}, ") == union(others)


def test_gloo_is_replaced_only_where_the_environment_asks_for_it(forks, tmp_path):
    others = union(name for name in NAMES if name != "gloo")
    assert replaced(forks, tmp_path, as_gloo="0") == others


def test_an_older_torch_is_left_as_it_was(forks, tmp_path):
    assert replaced(forks, tmp_path, version="2.0.1") == set()
    of_2_2 = union(name for name in REPLACED if name not in ("error_classes", "set_timeout", "hooks"))
    assert replaced(forks, tmp_path, version="2.2.0+cpu") == of_2_2


def test_a_patch_is_for_the_versions_from_its_first_to_its_end():
    from ringtrain.torch.distributed.patches import Patch

    patch = Patch("some", (2, 3), (2, 10), lambda: None)
    versions = ["1.13.1", "2.2.2", "2.3.0", "2.9.1+cpu", "2.10.0a0+git1234", "2.10.0", "3.0.0"]
    assert [version for version in versions if patch.is_for(version)] == ["2.3.0", "2.9.1+cpu"]


def test_an_unknown_patch_is_refused_with_the_names_of_all(forks, tmp_path):
    environment = {**os.environ, "RINGTRAIN_TORCH_WITHOUT": "gloo,bukkets"}
    process = forks.start(["-c", "import ringtrain.torch.distributed"], environment, tmp_path / "refused")
    printed = process.ends(60)
    assert process.returncode == 1
    names = ", ".join(REPLACED)
    assert f"RINGTRAIN_TORCH_WITHOUT has 'bukkets', which is not a patch; the patches are {names}" in printed


# ----------------------------------------------------------------------------------- what each patch is for, on 2 ranks


def backward_raises_the_class(rank):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    for _ in range(2):
        model(torch.ones(8)).sum().backward()
    has_class = None
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 1 sent float32\[3\]") as raised:
            model(torch.ones(8)).sum().backward()
        has_class = raised.errisinstance(hvd.MismatchError)
        assert ("bucket 0" in str(raised.value)) == has_class
    else:
        with pytest.raises(hvd.MismatchError, match=r"rank 1 sent float32\[3\]"):
            dist.all_reduce(torch.ones(3))
    return hvd.broadcast_object(has_class, 0)


def reducer_keeps_its_work(rank):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    with model.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            model(torch.ones(8)).sum().backward()
    return True


def hook_of_cpp_is_taken(rank):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    try:
        model(torch.full((8,), rank + 1.0)).sum().backward()
    except RuntimeError:
        return False
    assert model.module.weight.grad.tolist() == [[1.5] * 8] * 8
    return True


def buckets_are_shared(rank):
    trained(torch.float32, 3)
    return was_in_place()


def barrier_is_monitored(rank):
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=30))
    except ValueError as error:
        assert "only implemented for GLOO" in str(error)
        return False
    return True


def timeout_is_set(rank):
    group = dist.new_group()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=17), group)
    return group.options._timeout == timedelta(seconds=17)


def hook_sees_operations(rank):
    from torch._C import _distributed_c10d as c10d

    c10d.NanCheckHook.attach(dist.distributed_c10d._get_default_group())
    try:
        dist.all_reduce(torch.full((2,), float("nan")))
    except RuntimeError as error:
        assert "NaN found" in str(error)
        return True
    return False


def gloo_is_ringtrain(rank):
    from ringtrain.torch.distributed import ProcessGroup

    group = dist.new_group(backend="gloo")
    dist.all_reduce(tensor := torch.ones(3), group=group)
    assert tensor.tolist() == [2.0] * 3
    return isinstance(group, ProcessGroup)


CHECKS = {
    "error_classes": backward_raises_the_class,
    "kept_works": reducer_keeps_its_work,
    "builtin_hooks": hook_of_cpp_is_taken,
    "shared_buckets": buckets_are_shared,
    "monitored_barrier": barrier_is_monitored,
    "set_timeout": timeout_is_set,
    "hooks": hook_sees_operations,
    "gloo": gloo_is_ringtrain,
}


@pytest.mark.ranks(2, timeout=120, env={"RINGTRAIN_AS_GLOO": "1"})
def test_each_patch_does_what_it_is_for():
    for name in NAMES:
        with default_group() as rank:
            assert CHECKS[name](rank), name


@pytest.mark.ranks(2, timeout=120, env={"RINGTRAIN_AS_GLOO": "1", "RINGTRAIN_TORCH_WITHOUT": WITHOUT_ALL})
def test_without_the_patches_torch_does_what_their_reasons_say():
    for name in NAMES:
        if name != "kept_works":  # without which the reducer waits for ever
            with default_group() as rank:
                assert not CHECKS[name](rank), name
