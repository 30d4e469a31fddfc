"""Checks of torch.distributed on tensors on GPUs, on the fakes and on real GPUs. Each makes the default group."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from exact_torch_gpu import (
    empty,
    is_done,
    keep_busy,
    new_stream,
    on_gpu,
    require_on_gpu,
    synchronize,
    use_own_gpu,
)
from gpu_checks import SLOW_S, Stopwatch
from harness.exact import data, data_of_ranks, reference
from harness.frameworks import on_demand

torch = on_demand("torch")
dist = on_demand("torch.distributed")
hvd = on_demand("ringtrain.torch")

_COUNTS = (1, 1031)
_CALLS = 24  # from so many on, a repeated one is prepared, whichever of its names comes


@contextmanager
def default_group() -> Iterator[tuple[int, int]]:
    """Of all ranks of the job; its value is the rank, and how many there are."""
    import ringtrain.torch.distributed  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("ringtrain", init_method="ringtrain://", timeout=timedelta(seconds=60))
    use_own_gpu()
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()
        gc.collect()


def check_reductions(dtype: str) -> None:
    with default_group() as (rank, size):
        ops = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        for (name, op), count in ((pair, count) for pair in ops.items() for count in _COUNTS):
            arrays = data_of_ranks(size, (count,), dtype, op=name)
            expected = reference(name, arrays)
            dist.all_reduce(mine := on_gpu(arrays[rank]), op)
            require_on_gpu(mine, expected)
            dist.reduce(mine := on_gpu(arrays[rank]), size - 1, op)
            require_on_gpu(mine, expected if rank == size - 1 else arrays[rank])
            parts = data_of_ranks(size, (size * count,), dtype, op=name)
            whole = reference(name, parts)
            dist.reduce_scatter_tensor(scattered := empty(count, dtype), on_gpu(parts[rank]), op)
            require_on_gpu(scattered, whole[rank * count : (rank + 1) * count])
            lists = [on_gpu(part) for part in np.split(parts[rank], size)]
            dist.reduce_scatter(scattered := empty(count, dtype), lists, op)
            require_on_gpu(scattered, whole[rank * count : (rank + 1) * count])
        matrices = data_of_ranks(size, (3, 4), dtype)
        transposed = on_gpu(matrices[rank]).t()  # not contiguous
        dist.all_reduce(transposed)
        require_on_gpu(transposed, reference("sum", matrices).T)


def check_bitwise_and_complex_reductions() -> None:
    with default_group() as (rank, size):
        dist.all_reduce(bits := on_gpu(np.arange(9) ^ (5 * rank)), dist.ReduceOp.BXOR)
        require_on_gpu(bits, np.bitwise_xor.reduce([np.arange(9) ^ (5 * one) for one in range(size)]))
        mine = on_gpu(np.array([1 + 2j, 3 - 1j], "complex64") * (rank + 1))
        dist.all_reduce(mine)
        require_on_gpu(mine, np.array([1 + 2j, 3 - 1j], "complex64") * (size * (size + 1) // 2))


def check_moving(dtype: str) -> None:
    with default_group() as (rank, size):
        for count in _COUNTS:
            of_ranks = [data(one, (count,), dtype) for one in range(size)]
            together = np.concatenate(of_ranks)
            dist.broadcast(mine := on_gpu(of_ranks[rank]), size - 1)
            require_on_gpu(mine, of_ranks[-1])
            gathered = [empty(count, dtype) for _ in range(size)]
            dist.all_gather(gathered, on_gpu(of_ranks[rank]))
            for got, expected in zip(gathered, of_ranks, strict=True):
                require_on_gpu(got, expected)
            dist.all_gather_into_tensor(into := empty(size * count, dtype), on_gpu(of_ranks[rank]))
            require_on_gpu(into, together)
            targets = [empty(count, dtype) for _ in range(size)] if rank == 0 else None
            dist.gather(on_gpu(of_ranks[rank]), targets, 0)
            for got, expected in zip(targets or [], of_ranks, strict=False):
                require_on_gpu(got, expected)
            sent = [on_gpu(one) for one in of_ranks] if rank == size - 1 else None
            dist.scatter(mine := empty(count, dtype), sent, size - 1)
            require_on_gpu(mine, of_ranks[rank])
        uneven = [empty(one + 1, dtype) for one in range(size)]
        dist.all_gather(uneven, on_gpu(data(rank, (rank + 1,), dtype)))
        for one, got in enumerate(uneven):
            require_on_gpu(got, data(one, (one + 1,), dtype))
        rows = [data(one, (size, 3), dtype) for one in range(size)]
        dist.all_to_all_single(mine := on_gpu(rows[0]), on_gpu(rows[rank]))
        require_on_gpu(mine, np.stack([of_rank[rank] for of_rank in rows]))
        same = on_gpu(rows[rank])
        dist.all_to_all_single(same, same)
        require_on_gpu(same, np.stack([of_rank[rank] for of_rank in rows]))
        received = [empty(3, dtype) for _ in range(size)]
        dist.all_to_all(received, [on_gpu(row) for row in rows[rank]])
        for one, got in enumerate(received):
            require_on_gpu(got, rows[one][rank])
        dist.barrier()


def check_messages() -> None:
    """They go through host memory, so one end may be on a GPU and the other not."""
    with default_group() as (rank, size):
        after, before = (rank + 1) % size, (rank - 1) % size
        for knows_sender in (True, False):
            received = empty(1000, "float32")
            keep_busy(SLOW_S / 8)
            mine = on_gpu(np.full(1000, rank, "float32")) + 1
            sent = dist.isend(mine, after)
            dist.irecv(received, before if knows_sender else None).wait()
            sent.wait()
            require_on_gpu(received + 1, np.full(1000, before + 2, "float32"))
        received = empty(5, "float32") if rank == 0 else torch.empty(5)
        work = dist.isend(torch.full((5,), float(rank)) if rank == 1 else on_gpu(np.full(5, rank, "float32")), after)
        dist.recv(received, before)
        work.wait()
        assert received.cpu().tolist() == [float(before)] * 5


def check_an_operation_lies_between_the_kernels_of_its_stream() -> None:
    with default_group() as (rank, size):
        dist.all_reduce(on_gpu(np.zeros(1000)))
        for stream in (new_stream(), new_stream()):
            with stream:
                mine = on_gpu(np.zeros(1000))
                keep_busy(SLOW_S / 4)
                mine += rank + 1
                dist.all_reduce(mine)
                doubled = 2 * mine
                gathered = [torch.empty_like(doubled) for _ in range(size)]
                dist.all_gather(gathered, doubled)
                total = size * (size + 1) / 2
                for one in gathered:
                    require_on_gpu(one + 1, np.full(1000, 2 * total + 1))


CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda mine: dist.all_reduce(mine),
    "async": lambda mine: dist.all_reduce(mine, async_op=True).wait(),
    "future": lambda mine: dist.all_reduce(mine, async_op=True).get_future().wait(),
    "broadcast": lambda mine: dist.broadcast(mine, 0),
    "all_gather": lambda mine: dist.all_gather([torch.empty_like(mine) for _ in range(dist.get_world_size())], mine),
    "all_to_all_single": lambda mine: dist.all_to_all_single(mine, mine),
}


def check_the_host_does_not_wait(call: str) -> None:
    with default_group() as (_, size):
        mine = on_gpu(np.full(size * 4, 0.5))
        mine *= 2  # at first kernels are loaded or compiled, of this one and of the operation
        CALLS[call](mine)
        synchronize()
        keep_busy(SLOW_S)
        mine *= 2
        with Stopwatch() as host:
            CALLS[call](mine)
        assert host.seconds < SLOW_S / 2
        assert not is_done()
        synchronize()


def check_the_stream_that_waits_is_the_one_that_is_current_then(way: str) -> None:
    with default_group() as (_, size):
        dist.all_reduce(on_gpu(np.zeros(1000)))
        begun_in, ended_in, again_in = new_stream(), new_stream(), new_stream()
        for busy_s in (0, SLOW_S):
            with begun_in:
                mine = on_gpu(np.zeros(1000)).reshape(10, 100).t()  # its result is a copy back
                keep_busy(busy_s)
                mine += 1
                work = dist.all_reduce(mine, async_op=True)
                future = work.get_future() if way == "future" else None
            with ended_in:
                _ = work.wait() if future is None else future.wait()
                require_on_gpu(mine + 1, np.full((100, 10), size + 1.0))
            with again_in:
                _ = work.wait() if future is None else future.wait()
                require_on_gpu(mine + 2, np.full((100, 10), size + 2.0))


def check_a_callback_of_a_future_sees_the_result() -> None:
    with default_group() as (_, size):
        dist.all_reduce(on_gpu(np.zeros(1000)))
        mine = on_gpu(np.zeros(1000))
        keep_busy(SLOW_S)
        mine += 1
        doubled = dist.all_reduce(mine, async_op=True).get_future().then(lambda future: 2 * future.value()[0])
        require_on_gpu(doubled.wait() + 1, np.full(1000, 2.0 * size + 1))


def check_a_work_is_complete_when_the_gpu_is() -> None:
    with default_group() as (_, size):
        dist.all_reduce(on_gpu(np.zeros(1000)))
        mine = on_gpu(np.zeros((10, 100))).t()
        keep_busy(SLOW_S)
        mine += 1
        work = dist.all_reduce(mine, async_op=True)
        assert not work.is_completed()
        work.wait()
        assert not work.is_completed() and not is_done()
        end = time.monotonic() + 60
        while not work.is_completed():
            assert time.monotonic() < end
            time.sleep(0.001)
        require_on_gpu(mine, np.full((100, 10), float(size)))


def check_memory_stays_while_another_stream_makes_the_result() -> None:
    """A copy of what is not contiguous is freed by the host before the GPU has read it."""
    with default_group() as (_, size):
        for _ in range(2):  # the first time the host may be slow
            begun_in, ended_in = new_stream(), new_stream()
            with begun_in:
                mine = on_gpu(np.ones((8, 8), "float32")).t()
                work = dist.all_reduce(mine, async_op=True)
            with ended_in:
                keep_busy(SLOW_S / 2)
                work.wait()
            del work
            with begun_in:
                others = [on_gpu(np.full(64, 7, "float32")) for _ in range(20)]
            with ended_in:
                require_on_gpu(mine, np.full((8, 8), float(size), "float32"))
            del others


@contextmanager
def all_are_prepared() -> Iterator[None]:
    """Raises AssertionError from an operation that is not prepared."""
    from ringtrain.torch.distributed.group import ProcessGroup

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an operation was not prepared")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroup, "_submit", refuse)
        yield


def allreduce_of_group(mine: Any) -> Any:
    """Returns the Work of an operation that is not async, which dist.all_reduce() keeps for itself."""
    options = dist.AllreduceOptions()
    options.asyncOp = False
    return dist.distributed_c10d._get_default_group().allreduce([mine], options)


REPEATS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda mine: dist.all_reduce(mine),
    "async": lambda mine: dist.all_reduce(mine, async_op=True).wait(),
    "future": lambda mine: dist.all_reduce(mine, async_op=True).get_future().wait(),
    "group": lambda mine: allreduce_of_group(mine).wait(),
}


def prepare(call: Callable[[Any], Any], count: int) -> None:
    for _ in range(_CALLS):
        call(on_gpu(np.ones(count)))
    synchronize()


def check_repeats_are_prepared(way: str) -> None:
    with default_group() as (rank, size):
        prepare(REPEATS[way], 1000)
        with all_are_prepared():
            for step in range(_CALLS):
                arrays = data_of_ranks(size, (1000,), "float64", seed=step)
                mine = on_gpu(arrays[rank])
                REPEATS[way](mine if step % 2 else mine.reshape(10, 100))
                require_on_gpu(mine, reference("sum", arrays))
        for dtype in ("float32", "int64", "float64"):
            for count in (10, 1000):
                arrays = data_of_ranks(size, (count,), dtype)
                REPEATS[way](mine := on_gpu(arrays[rank]))
                require_on_gpu(mine, reference("sum", arrays))


def check_a_repeat_lies_between_the_kernels_of_its_stream(way: str) -> None:
    with default_group() as (rank, size):
        prepare(REPEATS[way], 1000)
        for stream in (new_stream(), new_stream()):
            with stream, all_are_prepared():
                mine = on_gpu(np.zeros(1000))
                keep_busy(SLOW_S / 4)
                mine += rank + 1
                REPEATS[way](mine)
                require_on_gpu(mine + 1, np.full(1000, size * (size + 1) / 2 + 1))


def check_the_stream_that_waits_for_a_repeat_is_the_one_that_is_current_then(way: str) -> None:
    """`way`: what is waited for: "work", "future", or what `allreduce_of_group` returns, "group"."""

    def start(mine: Any) -> Any:
        if way == "group":
            return allreduce_of_group(mine)
        work = dist.all_reduce(mine, async_op=True)
        return work.get_future() if way == "future" else work

    with default_group() as (_, size):
        prepare(lambda mine: start(mine).wait(), 1000)
        begun_in, ended_in, again_in = new_stream(), new_stream(), new_stream()
        for busy_s in (0, SLOW_S):
            with begun_in, all_are_prepared():
                mine = on_gpu(np.zeros(1000))
                keep_busy(busy_s)
                mine += 1
                pending = start(mine)
            for place, stream in enumerate((ended_in, again_in)):
                with stream:
                    pending.wait()
                    require_on_gpu(mine + place, np.full(1000, float(size + place)))


def check_memory_of_a_repeat_stays_while_another_stream_reads_it() -> None:
    with default_group() as (_, size):
        prepare(lambda mine: dist.all_reduce(mine, async_op=True).wait(), 64)
        for _ in range(2):  # the first time the host may be slow
            begun_in, ended_in = new_stream(), new_stream()
            with begun_in, all_are_prepared():
                mine = on_gpu(np.ones(64))
                keep_busy(SLOW_S / 2)
                work = dist.all_reduce(mine, async_op=True)
            with ended_in:
                work.wait()
                doubled = 2 * mine
            del work, mine
            with begun_in:
                others = [empty(64, "float64") for _ in range(20)]
            with ended_in:
                require_on_gpu(doubled, np.full(64, 2.0 * size))
            del others
