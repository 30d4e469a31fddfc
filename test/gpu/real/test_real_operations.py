"""Every operation on arrays on a real GPU, alone and shared by ranks: equal to the exact data."""

import gpu_checks
import numpy as np
import pytest
from gpu_checks import COLLECTIVES
from harness.exact import DTYPE_OF_EACH_SIZE, DTYPES
from real_gpus import COMPRESSIONS, NAMES, library, need_gpu, need_nccl

import ringtrain as hvd

need_gpu()
NCCL = {"RINGTRAIN_GPU_ALGORITHM": "nccl"}
STAGED = {"RINGTRAIN_GPU_ALGORITHM": "staged"}


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_op_and_shape(dtype, name):
    gpu_checks.check_all_ops_and_shapes(library(name, dtype), dtype)


@pytest.mark.ranks(2, 4, env=STAGED, timeout=300)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPE_OF_EACH_SIZE, ids=str)
def test_every_op_and_shape_through_host_memory(dtype, name):
    gpu_checks.check_all_ops_and_shapes(library(name, dtype), dtype)


@pytest.mark.ranks(2, 4, env=NCCL, timeout=300)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_op_and_shape_through_nccl(dtype, name):
    of = library(name, dtype)
    need_nccl(of)
    gpu_checks.check_all_ops_and_shapes(of, dtype)


@pytest.mark.ranks(1, 2, 4, timeout=300)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("dtype", DTYPE_OF_EACH_SIZE, ids=str)
def test_collectives(dtype, collective, name):
    COLLECTIVES[collective](library(name, dtype), dtype)


@pytest.mark.ranks(2, 4, env=NCCL, timeout=300)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("dtype", DTYPE_OF_EACH_SIZE, ids=str)
def test_collectives_through_nccl(dtype, collective, name):
    of = library(name, dtype)
    need_nccl(of)
    COLLECTIVES[collective](of, dtype)


@pytest.mark.ranks(1, 2, 4, timeout=300)
@pytest.mark.parametrize("name", NAMES)
def test_ways_to_call_them(name):
    gpu_checks.check_groups_of_different_dtypes(library(name))
    gpu_checks.check_many_at_once_in_another_order_on_each_rank(library(name))
    gpu_checks.check_scale_factors(library(name))
    gpu_checks.check_transposed(library(name))


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compression_gives_back_the_dtype(compression, name):
    of = library(name, COMPRESSIONS[compression])
    for dtype in ("float32", "float64", "float16", "int32"):
        gpu_checks.check_compression(of, compression, dtype)


@pytest.mark.ranks(2, timeout=300)
def test_arrays_of_both_libraries_meet():
    of = [library(name) for name in NAMES][hvd.rank()]  # where one is missing, no rank waits for the other
    mine = of.on_gpu(np.full(1000, 1.0 + hvd.rank()))
    of.require_on_gpu(hvd.allreduce(mine, op=hvd.Sum, name="both"), np.full(1000, 3.0))
