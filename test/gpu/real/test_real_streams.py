"""The order of work on a real GPU: operations are where they were called, and the host does not wait for them."""

import gpu_checks
import pytest
from gpu_checks import OPERATIONS, first_operation
from real_gpus import COMPRESSIONS, NAMES, library, need_gpu, need_nccl

need_gpu()
NCCL = {"RINGTRAIN_GPU_ALGORITHM": "nccl"}


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stream", ["default", "own"])
def test_an_operation_lies_between_the_kernels_of_its_stream(stream, name):
    of = library(name)
    first_operation(of)
    if stream == "default":
        gpu_checks.check_an_operation_lies_between_the_kernels_of_its_stream(of)
        return
    with of.new_stream():
        gpu_checks.check_an_operation_lies_between_the_kernels_of_its_stream(of)


@pytest.mark.ranks(1, timeout=300)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_host_does_not_wait_for_the_gpu(operation, name):
    gpu_checks.check_the_host_does_not_wait(library(name), operation)


@pytest.mark.ranks(2, env=NCCL, timeout=300)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_host_does_not_wait_for_the_gpu_of_another_rank(operation, name):
    need_nccl(library(name))
    gpu_checks.check_the_host_does_not_wait(library(name), operation)


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("name", NAMES)
def test_the_stream_that_waits_is_the_one_that_is_current_then(name):
    gpu_checks.check_the_stream_that_waits_is_the_one_that_is_current_then(library(name))


@pytest.mark.ranks(1, timeout=300)
@pytest.mark.parametrize("name", NAMES)
def test_other_streams_go_on(name):
    gpu_checks.check_other_streams_go_on(library(name))


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_memory_is_not_used_again_while_a_result_is_made_of_it(compression, name):
    of = library(name, COMPRESSIONS[compression])
    gpu_checks.check_memory_stays_while_another_stream_makes_the_result(of, compression)


@pytest.mark.ranks(1, 2, timeout=300)
def test_a_result_may_be_dropped_while_another_stream_than_its_own_reads_it():
    gpu_checks.check_memory_stays_while_another_stream_reads_the_result(library("torch"))
