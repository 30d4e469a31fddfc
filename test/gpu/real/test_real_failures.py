"""Failures on a real GPU: ranks that die while it works, and too little memory; and what the driver says."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from harness.faults import require_clean_end, require_error, run, victim
from measure.faults.injection import kill
from real_gpus import library, need_gpu

import ringtrain as hvd
from ringtrain import _core

need_gpu()
GONE = "is gone: its process was killed or exited early"


@pytest.mark.parametrize("way", ["auto", "staged"])
def test_a_killed_rank_is_named_and_the_gpu_goes_on(way):
    cupy = pytest.importorskip("cupy", reason="the ranks that are killed reduce arrays of CuPy")
    if not cupy.is_available():
        pytest.skip("this CuPy finds no GPU that it can use")
    for _ in range(2):  # what the first job has left would show in the second one
        outcome = run(kill(rank=1).during("reduce on a GPU"), 2, gpu_algorithm=way)
        require_error(outcome, hvd.PeerLostError, victim(outcome), GONE)
        require_clean_end(outcome)


@pytest.mark.ranks(1, 2, isolated=True, timeout=300)
def test_a_result_without_room_on_the_gpu_is_not_lost():
    hvd.init()
    of = library("torch")
    of.use_own_gpu()
    import torch

    mine = of.on_gpu(np.full(30 << 20, hvd.rank(), "float32"))
    hvd.allreduce_(of.on_gpu(np.ones(3)), name="first")
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((150 << 20) / total)
    handle = hvd.allgather_async(mine, name="gathered")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        hvd.synchronize(handle)
    if sys.version_info >= (3, 11):  # exceptions have notes
        assert caught.value.__notes__ == ['ringtrain was making room for allgather "gathered"']
    torch.cuda.set_per_process_memory_fraction(1.0)
    of.require_on_gpu(hvd.synchronize(handle), np.repeat(np.arange(hvd.size(), dtype="float32"), 30 << 20))
    hvd.shutdown()


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="nvidia-smi is not here")
def test_the_driver_and_the_doctor_know_the_gpus_as_nvidia_smi_does():
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    known = [f"GPU-{one}" for one in re.findall(r"UUID: (?:GPU|MIG)-([0-9a-f-]+)", listed)]  # MIG: of a divided GPU
    mine = [_core.gpu_uuid(number) for number in range(_core.gpu_count())]
    assert mine and set(mine) <= set(known)
    line = [sys.executable, "-m", "ringtrain.doctor"]
    told = subprocess.run(line, capture_output=True, text=True, timeout=120).stdout
    for number, uuid in enumerate(mine):
        assert re.search(rf"GPU {number}: .*, {uuid}", told), told
