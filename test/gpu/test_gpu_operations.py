"""Every operation on CuPy arrays and on PyTorch tensors: exact, in place, and in the order of streams. On fakes.

One dtype of each size shows how it gets there, since the doubles compute what they like; test/gpu/real/ has all.
test_cupy_adapter.py and test_gpu_groups.py test the numbers of each dtype for the core and for NCCL.
"""

import importlib

import gpu_checks
import numpy as np
import pytest
from exact_torch import TORCH_DTYPES
from gpu_checks import COLLECTIVES, OPERATIONS
from harness.exact import DTYPE_OF_EACH_SIZE
from harness.frameworks import on_demand
from harness.gpu_arrays import GPU, STAGED

torch = on_demand("torch")  # so that these ranks have imported it

LIBRARIES = {"cupy": "exact_cupy", "torch": "exact_torch_gpu"}
of_each_library = pytest.mark.parametrize("name", LIBRARIES)


def library(name):
    return importlib.import_module(LIBRARIES[name])


@pytest.mark.ranks(1, 2, 3, 4, env=GPU, fast=[2], dtypes=DTYPE_OF_EACH_SIZE)
@pytest.mark.ranks(2, 3, env=STAGED, dtypes=DTYPE_OF_EACH_SIZE, way="staged")
@of_each_library
def test_every_op_and_shape(name, dtype):
    gpu_checks.check_all_ops_and_shapes(library(name), dtype)


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_op_and_shape_of_each_dtype_of_torch(dtype):
    gpu_checks.check_all_ops_and_shapes(library("torch"), dtype)


@pytest.mark.ranks(3, env=GPU, dtypes=DTYPE_OF_EACH_SIZE)
@pytest.mark.ranks(1, 2, 4, env=GPU, dtypes=[np.dtype("float32")])
@pytest.mark.ranks(3, env=STAGED, dtypes=DTYPE_OF_EACH_SIZE, way="staged")
@pytest.mark.parametrize("collective", COLLECTIVES)
@of_each_library
def test_collectives(name, collective, dtype):
    COLLECTIVES[collective](library(name), dtype)


@pytest.mark.ranks(1, 2, 3, env=GPU)
@of_each_library
def test_ways_to_call_them(name):
    gpu_checks.check_groups_of_different_dtypes(library(name))
    gpu_checks.check_many_at_once_in_another_order_on_each_rank(library(name))
    gpu_checks.check_scale_factors(library(name))
    gpu_checks.check_transposed(library(name))


@pytest.mark.ranks(1, 2, 3, env=GPU)
@pytest.mark.parametrize("compression", ["fp16", "bf16"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32"])
@of_each_library
def test_compression_gives_back_the_dtype(name, compression, dtype):
    gpu_checks.check_compression(library(name), compression, dtype)


@pytest.mark.ranks(1, 2, env=GPU)
@pytest.mark.parametrize("operation", OPERATIONS)
@of_each_library
def test_the_host_does_not_wait_for_the_gpu(name, operation):
    gpu_checks.check_the_host_does_not_wait(library(name), operation)


@pytest.mark.ranks(1, 2, env=GPU)
@of_each_library
def test_streams_have_their_order(name):
    gpu_checks.check_other_streams_go_on(library(name))
    gpu_checks.check_the_stream_that_waits_is_the_one_that_is_current_then(library(name))


@pytest.mark.ranks(1, 2, env=GPU)
@pytest.mark.parametrize("compression", ["fp16", "bf16"])
@of_each_library
def test_memory_is_not_used_again_while_a_result_is_made_of_it(name, compression):
    gpu_checks.check_memory_stays_while_another_stream_makes_the_result(library(name), compression)
