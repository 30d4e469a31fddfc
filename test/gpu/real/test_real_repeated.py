"""Operations on a real GPU that repeat are prepared once: exact, in order, and changes are seen."""

import numpy as np
import pytest
import repeated_gpu_checks as checks
from harness.exact import DTYPE_OF_EACH_SIZE
from real_gpus import NAMES, library, need_gpu
from repeated_gpu_checks import ASYNC_WAYS, CHANGES, WAYS

need_gpu()


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPE_OF_EACH_SIZE, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_each_repeat_is_exact(name, dtype, way):
    checks.check_each_repeat_is_exact(library(name, dtype), way, dtype)


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("name", NAMES)
def test_ways_to_repeat(name):
    of = library(name)
    checks.check_many_in_flight(of)
    checks.check_weights_and_priorities(of)
    checks.check_broadcasts(of)


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_change_is_seen(name, way, change):
    checks.check_a_change_is_seen(library(name), way, change)


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_name_goes_from_host_memory_to_a_gpu_and_back(name, way):
    of = library(name)
    checks.check_host_memory_and_a_gpu_take_turns(of, way, np.copy if name == "cupy" else of.tensor_of)


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_repeat_lies_between_the_kernels_of_its_stream(name, way):
    checks.check_it_lies_between_the_kernels_of_its_stream(library(name), way)


@pytest.mark.ranks(1, timeout=300)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_the_host_does_not_wait_for_the_gpu(name, way):
    checks.check_the_host_does_not_wait(library(name), way)


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("way", ASYNC_WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_the_stream_that_waits_is_the_one_that_is_current_then(name, way):
    checks.check_the_stream_that_waits_is_the_one_that_is_current_then(library(name), way)


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("way", ASYNC_WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_memory_of_a_dropped_array_is_not_used_again_meanwhile(name, way):
    checks.check_memory_of_a_dropped_array_is_not_used_again_meanwhile(library(name), way)


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("name", NAMES)
def test_a_dropped_array_is_kept_while_it_is_in_use(name):
    checks.check_a_dropped_array_is_kept(library(name))
