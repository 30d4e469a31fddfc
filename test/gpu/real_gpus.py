"""The libraries of arrays on GPUs, and what a test needs of them. On the ranks only, but for `need_gpu`."""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np
import pytest
from harness import gpu_double
from harness.frameworks import is_rank

import ringtrain as hvd
from ringtrain import _core

NAMES = ["cupy", "torch"]

# And the dtype of what is on its way.
COMPRESSIONS = {"fp16": "float16", "bf16": "bfloat16"}


def need_gpu() -> None:
    """Skips the test module where there is no GPU: none of its tests is then collected."""
    if is_rank():
        return
    if gpu_double.is_used():
        pytest.skip("the fake driver in LD_LIBRARY_PATH is not a real GPU", allow_module_level=True)
    if _core.gpu_count() == 0:
        pytest.skip("no CUDA driver finds a GPU here", allow_module_level=True)


def library(name: str, dtype: np.dtype | str = "float32") -> ModuleType:
    """exact_cupy or exact_torch_gpu; skips the test where it is missing, cannot use GPUs or lacks the dtype."""
    module = pytest.importorskip(name, reason=f"{name} is not installed in this environment")
    if name == "cupy":
        if not module.is_available():
            pytest.skip("this CuPy finds no GPU that it can use")
        if str(dtype) == "bfloat16" and int(module.__version__.split(".")[0]) < 14:
            pytest.skip(f"CuPy has bfloat16 from 14 on, and this is {module.__version__}")
        return importlib.import_module("exact_cupy")
    if not module.cuda.is_available():
        pytest.skip("this PyTorch was built for CPUs, or finds no GPU that it can use")
    if str(dtype) in ("uint16", "uint32", "uint64"):
        pytest.skip(f"PyTorch hardly computes with {dtype}")
    return importlib.import_module("exact_torch_gpu")


def need_nccl(of: ModuleType) -> None:
    """Skips the test where NCCL cannot connect the ranks."""
    version = int(hvd.nccl_built())
    if version == 0:
        pytest.skip("NCCL is not there")
    if hvd.size() > of.device_count() and version < 23000:
        pytest.skip(f"{hvd.size()} ranks on {of.device_count()} GPUs need NCCL 2.30, and this is {version}")
