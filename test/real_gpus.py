"""The libraries of arrays on GPUs, and what a test wants of them. On the ranks only."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

import ringtrain as hvd

NAMES = ["cupy", "torch"]


def library(name: str) -> ModuleType:
    """exact_cupy or exact_torch_gpu; skips the test where the library is missing or cannot use GPUs."""
    pytest.importorskip(name, reason=f"{name} is not installed in this environment")
    if name == "cupy":
        return importlib.import_module("exact_cupy")
    if not importlib.import_module("torch").cuda.is_available():
        pytest.skip("this PyTorch was built for CPUs")
    return importlib.import_module("exact_torch_gpu")


def need_nccl(of: ModuleType) -> None:
    """Skips the test where NCCL cannot connect the ranks."""
    version = int(hvd.nccl_built())
    if version == 0:
        pytest.skip("NCCL is not there")
    if hvd.size() > of.device_count() and version < 23000:
        pytest.skip(f"{hvd.size()} ranks on {of.device_count()} GPUs want NCCL 2.30, and this is {version}")
