"""Operations in programs of XLA for GPUs: what XLA would call, called by hand, on fakes of the driver and NCCL."""

import re
import time

import numpy as np
import pytest
from exact_cupy import keep_busy, on_gpu, require_on_gpu, synchronize, use_own_gpu
from harness.gpu_arrays import GPU, STAGED, cupy
from xla_frames import Stream, XlaError

import ringtrain as hvd
from ringtrain._core import OpKind, ReduceOp

BUSY_S = 0.3


def placed(array):
    """The array on this rank's GPU, there for all streams."""
    there = on_gpu(array)
    synchronize()
    return there


class Program:
    """The operations of one program, in a stream that is not the default one."""

    def __init__(self):
        use_own_gpu()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.xla = Stream(self.stream.ptr)
        self.tickets = {}

    def start(self, kind, name, array, op=ReduceOp.Sum, splits="", weight=None):
        in_place = [array] if kind in (OpKind.ALLREDUCE, OpKind.BROADCAST) else []
        self.tickets[name] = placed(np.zeros(1, np.uint32))
        how = {
            **{"kind": kind.value, "op": op.value, "root": 1, "process_set": 0, "prescale": 1.0, "postscale": 1.0},
            **{"splits": splits, "codes": "", "threshold": 0.0, "site": "train.py:3", "name": name},
            **{"priority": 0, "is_awaited": 0, "is_per_device": 0, "is_weighted": int(weight is not None)},
        }
        weights = [] if weight is None else [weight]
        self.xla.call("ringtrain_start", [array, *weights], [*in_place, self.tickets[name]], **how)

    def finish(self, kind, names, arguments, results):
        together = "".join(f"{len(name.encode())}:{name}" for name in names)
        tickets = [self.tickets[name] for name in names]
        how = {"kind": kind.value, "names": together, "tickets": len(names), "process_set": 0}
        self.xla.call("ringtrain_finish", [*arguments, *tickets, tickets[-1]], results, **how)

    def get(self, array):
        self.stream.synchronize()
        return array.get().tolist()


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_average_by_a_weight_that_the_program_has_computed_on_the_gpu(dtype):
    program = Program()
    mine = placed(np.full(1000, 4.0 * hvd.rank(), np.float32))
    weight = placed(np.array([6, 2][hvd.rank()], dtype))
    program.start(OpKind.ALLREDUCE, "weighted", mine, op=ReduceOp.Average, weight=weight)
    program.finish(OpKind.ALLREDUCE, ["weighted"], [mine], [mine])
    assert program.get(mine) == [1.0] * 1000


@pytest.mark.ranks(2, env=GPU)
def test_a_sum_lies_between_the_work_of_its_stream_and_the_host_goes_on():
    program = Program()
    mine = placed(np.zeros(1000, np.float32))
    hvd.allreduce_(on_gpu(np.zeros(3)), name="first")  # makes communicators
    hvd.barrier()
    begun = time.monotonic()
    with program.stream:
        keep_busy(BUSY_S)
        mine += hvd.rank() + 1
    program.start(OpKind.ALLREDUCE, "sum", mine)
    program.finish(OpKind.ALLREDUCE, ["sum"], [mine], [mine])
    with program.stream:
        mine *= 2
    assert time.monotonic() - begun < BUSY_S
    assert program.get(mine) == [6.0] * 1000


@pytest.mark.ranks(2, env=STAGED, slow=True, way="staged")
@pytest.mark.ranks(2, env=GPU)
def test_all_operations():
    check_all_operations()


def check_all_operations():
    rank = hvd.rank()
    program = Program()
    first, second = placed(np.full(5, rank + 1.0)), placed(np.full((2, 2), 10.0 * (rank + 1)))
    for name, array in {"a": first, "b:é": second}.items() if rank == 0 else {"b:é": second, "a": first}.items():
        program.start(OpKind.ALLREDUCE, name, array)
    rows = placed(np.full((3, 2), rank, np.int32))
    program.start(OpKind.ALLGATHER, "rows", rows)
    program.finish(OpKind.ALLREDUCE, ["a", "b:é"], [first, second], [first, second])
    assert program.get(first) == [3.0] * 5 and program.get(second) == [[30.0] * 2] * 2
    gathered = placed(np.zeros((6, 2), np.int32))
    program.finish(OpKind.ALLGATHER, ["rows"], [rows], [gathered])
    assert program.get(gathered) == [[0, 0]] * 3 + [[1, 1]] * 3
    root = placed(np.full(4, rank, np.float16))
    program.start(OpKind.BROADCAST, "root", root)
    program.finish(OpKind.BROADCAST, ["root"], [root], [root])
    assert program.get(root) == [1] * 4
    parts, part = placed(np.arange(4, dtype=np.int64) + rank), placed(np.zeros(2, np.int64))
    program.start(OpKind.REDUCESCATTER, "parts", parts)
    program.finish(OpKind.REDUCESCATTER, ["parts"], [parts], [part])
    assert program.get(part) == ([1, 3] if rank == 0 else [5, 7])
    sent, received = placed(np.arange(2, dtype=np.int32) + 10 * rank), placed(np.zeros(2, np.int32))
    program.start(OpKind.ALLTOALL, "parts for all", sent, splits="1,1")
    program.finish(OpKind.ALLTOALL, ["parts for all"], [sent], [received])
    assert program.get(received) == [rank, 10 + rank]


@pytest.mark.ranks(2, env=GPU)
def test_a_barrier_comes_after_the_work_of_all_ranks():
    program = Program()
    mine, copy = placed(np.zeros(3)), placed(np.zeros(3))
    hvd.barrier()
    begun = time.monotonic()
    with program.stream:
        if hvd.rank() == 1:
            keep_busy(BUSY_S)
        mine += 1
    program.start(OpKind.BARRIER, "all", mine)
    program.finish(OpKind.BARRIER, ["all"], [mine], [copy])
    assert time.monotonic() - begun >= BUSY_S
    assert program.get(copy) == [1.0] * 3


@pytest.mark.ranks(2, env=GPU)
def test_a_failure_is_raised_when_the_operation_is_finished():
    program = Program()
    mine = placed(np.ones(3 + hvd.rank()))
    program.start(OpKind.ALLREDUCE, "other", mine)
    with pytest.raises(XlaError, match=r'ringtrain\.MismatchError: .*"other"'):
        program.finish(OpKind.ALLREDUCE, ["other"], [mine], [mine])
    with pytest.raises(XlaError, match="an operation that was never started"):
        program.finish(OpKind.ALLREDUCE, ["other"], [mine], [mine])
    rows, too_short = placed(np.ones(3)), placed(np.zeros(5))
    program.start(OpKind.ALLGATHER, "rows", rows)
    with pytest.raises(XlaError, match="not what was expected when the program was compiled"):
        program.finish(OpKind.ALLGATHER, ["rows"], [rows], [too_short])
    assert program.get(too_short) == [0.0] * 5
    mine = placed(np.ones(3))
    program.start(OpKind.ALLREDUCE, "other", mine)
    program.finish(OpKind.ALLREDUCE, ["other"], [mine], [mine])
    assert program.get(mine) == [2.0] * 3


@pytest.mark.ranks(1, env=GPU)
def test_flags_on_a_gpu_say_whose_gradient_is_not_finite():
    program = Program()
    array, copy = placed(np.ones(3)), placed(np.zeros(3))
    how = {"ranks": "0,1", "names": "w\nb"}
    program.xla.call("ringtrain_require_finite", [array, placed(np.array([0, 0], np.int32))], [copy], **how)
    require_on_gpu(copy, np.ones(3))
    with pytest.raises(XlaError, match=r'NonFiniteError: the gradient of "b" is NaN or infinite on rank 1'):
        program.xla.call("ringtrain_require_finite", [array, placed(np.array([0, 1], np.int32))], [copy], **how)


@pytest.mark.ranks(2, env=GPU)
def test_a_program_for_gpus_starts_all_before_it_finishes_any():
    jax = pytest.importorskip("jax")
    import ringtrain.jax as of_jax

    def program(x):
        sums = of_jax.allreduce({"w": x, "b": x[0]}, name="g")
        return sums, of_jax.allgather(x, name="rows"), of_jax.barrier_on(x)

    given = jax.ShapeDtypeStruct((4,), "float32")
    text = jax.jit(program).trace(given).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"@ringtrain_(start|finish).*?names? = \"(.*?)\"", text)
    assert [what for what, _ in calls] == ["start"] * 4 + ["finish"] * 3
    assert [names for what, names in calls if what == "finish"][:2] == ["3:g.b3:g.w", "4:rows"]
