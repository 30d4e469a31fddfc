"""Bad input: an error on the caller's line, or on every rank; afterwards everything works."""

import functools
import inspect
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from harness.children import fork, require_good_end
from harness.exact import require_equal
from harness.refused import bad_arguments, disagreements

import ringtrain as hvd
from ringtrain import _core as core
from ringtrain.job import network

ONES = np.ones((4, 2), "float32")


def require_that_all_is_well():
    require_equal(hvd.allreduce(ONES, op=hvd.Sum), ONES * hvd.size())


DISAGREEMENTS = disagreements(hvd, np.ones)


@pytest.mark.fast
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("which", DISAGREEMENTS)
def test_ranks_that_disagree_all_hear_who_did_what(which):
    call, message = DISAGREEMENTS[which]
    last = hvd.size() - 1
    for _ in range(2):
        with pytest.raises(hvd.MismatchError, match=message) as caught:
            call(hvd.rank() == last)
        assert f"rank {last} " in str(caught.value)
        assert isinstance(caught.value, hvd.HorovodInternalError | RuntimeError)
        require_that_all_is_well()


@pytest.mark.ranks(2, 3)
def test_a_mismatch_with_what_was_cached_before():
    for name in ("bad", "worse"):
        hvd.allreduce(ONES, name=name)
        with pytest.raises(hvd.MismatchError):
            hvd.allreduce(ONES[: 2 if hvd.rank() else 4], name=name)
        require_equal(hvd.allreduce(ONES, name=name), ONES)


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_a_name_in_flight_is_refused_on_the_callers_line():
    if hvd.rank() == 0:
        first = hvd.allreduce_async(ONES, name="twice", op=hvd.Sum)
        with pytest.raises(ValueError, match='"twice": an operation of this name is in flight'):
            hvd.allreduce_async(ONES, name="twice")
        hvd.barrier()
        require_equal(hvd.synchronize(first), ONES * 2)
    else:
        hvd.barrier()
        hvd.allreduce(ONES, name="twice", op=hvd.Sum)
    require_that_all_is_well()


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_operations_of_different_kinds_may_have_one_name():
    rank, is_late = hvd.rank(), hvd.rank() == 1
    for _ in range(3):  # agreed on, then from the cache
        if is_late:
            hvd.barrier()
        handles = [
            hvd.allreduce_async(ONES, name="loss", op=hvd.Sum),
            hvd.allgather_async(ONES + rank, name="loss"),
            hvd.broadcast_async(ONES + rank, 1, name="loss"),
        ]
        if not is_late:
            with pytest.raises(ValueError, match='"loss": an operation of this name is in flight'):
                hvd.allgather_async(ONES, name="loss")
            hvd.barrier()
        require_equal(hvd.synchronize(handles[2]), ONES + 1)
        require_equal(hvd.synchronize(handles[0]), ONES * 2)
        require_equal(hvd.synchronize(handles[1]), np.concatenate([ONES, ONES + 1]))
    require_that_all_is_well()


@pytest.mark.ranks(2)
def test_kinds_that_ranks_confuse_are_told_though_they_may_share_a_name():
    operations = [lambda: hvd.allreduce_async(ONES, name="x"), lambda: hvd.broadcast_async(ONES, 0, name="x")]
    handles = [operations[number]() for number in ((0, 1) if hvd.rank() == 0 else (1, 0))]
    for handle in handles:
        with pytest.raises(hvd.MismatchError, match=r'"x".*rank 0 called'):
            hvd.synchronize(handle)
    require_that_all_is_well()


class Lent:
    """An array of a library without an adapter, in the memory of the host."""

    def __dlpack__(self, **options):
        return ONES.__dlpack__(**options)

    def __dlpack_device__(self):
        return ONES.__dlpack_device__()


BAD_ARGUMENTS = {
    **bad_arguments(hvd, np.ones, lambda: ONES),
    "text": (lambda: hvd.allreduce(np.ones(2, "U1")), TypeError, "dtype <U1; send it with broadcast_object"),
    "8-bit floats": (
        lambda: hvd.allreduce(np.ones(2, ml_dtypes.float8_e4m3fn)),
        TypeError,
        "dtype float8_e4m3fn; convert it to one of bool, uint8",
    ),
    "objects": (lambda: hvd.allreduce(np.array([None])), TypeError, "dtype object; send it with broadcast_object"),
    "another byte order": (
        lambda: hvd.broadcast(np.ones(2, ">f4"), 0),
        TypeError,
        r"dtype >f4, .* convert it with array.astype\(array.dtype.newbyteorder\(\"=\"\)\)",
    ),
    "another byte order in place": (lambda: hvd.allreduce_(np.ones(2, ">u8")), TypeError, "dtype >u8, .*byte order"),
    "a long double": (
        lambda: hvd.allgather(np.ones(2, np.longdouble)),
        TypeError,
        r"convert it with array.astype\(numpy.float64\), or send it unchanged with broadcast_object or allgather",
    ),
    "a complex long double": (lambda: hvd.allgather(np.ones(2, "clongdouble")), TypeError, "numpy.complex128"),
    "fields": (
        lambda: hvd.alltoall(np.zeros(hvd.size(), [("x", "f4"), ("y", "i4")])),
        TypeError,
        r'send its fields one by one, such as array\["x"\], or the array with broadcast_object or allgather_object',
    ),
    "dates": (lambda: hvd.broadcast(np.zeros(2, "M8[s]"), 0), TypeError, r"send array.view\(numpy.int64\)"),
    "a masked array": (lambda: hvd.allreduce(np.ma.ones(2)), TypeError, r"send array.filled\(value\), or"),
    "a masked array in place": (lambda: hvd.allreduce_(np.ma.ones(2)), TypeError, "its mask would be lost"),
    "an array that lends host memory": (
        lambda: hvd.allreduce(Lent()),
        TypeError,
        r"cannot send a .*\.Lent; .* and numbers. Pass numpy.from_dlpack\(array\), which shares its memory.",
    ),
    "in place on a number": (lambda: hvd.allreduce_(1.0), TypeError, "needs a NumPy array"),
    "a name of ringtrain's own": (lambda: hvd.allreduce(ONES, name="<join>"), ValueError, "names that begin with"),
    "a number to remove": (
        lambda: hvd.remove_process_set(1),
        TypeError,
        "needs the ProcessSet that add_process_set returned, not 1",
    ),
    "a priority that is text": (
        lambda: hvd.broadcast(ONES, 0, priority="x"),
        TypeError,
        "broadcast: priority must be an integer, not 'x'",
    ),
    "a priority that is text, in place": (
        lambda: hvd.allreduce_(ONES, name="urgent", priority="x"),
        TypeError,
        'allreduce "urgent": priority must be an integer',
    ),
    "a priority of more than 32 bits": (
        lambda: hvd.allreduce_async(ONES, name="urgent", priority=1 << 31),
        ValueError,
        r'allreduce "urgent": priority must be from -2\*\*31 to 2\*\*31 - 1, not 2147483648',
    ),
    "a priority of more than 32 bits, in place": (
        lambda: hvd.allreduce_(ONES, name="urgent", priority=-1 << 40),
        ValueError,
        'allreduce "urgent": priority must be from',
    ),
    "a weight that no float can hold": (
        lambda: hvd.allreduce(ONES, weight=10**400),
        ValueError,
        "allreduce: weight must be a number that a float can hold",
    ),
    "a name that is an array": (
        lambda: hvd.allreduce_(ONES, name=ONES),
        TypeError,
        "allreduce: the name of an operation is a str or None, not",
    ),
    "a factor before an average that is text": (
        lambda: hvd.DistributedOptimizer(Descent(), gradient_predivide_factor="x"),
        TypeError,
        "gradient_predivide_factor must be a number, not 'x'",
    ),
    "passes that are text": (
        lambda: hvd.DistributedOptimizer(Descent(), backward_passes_per_step="x"),
        TypeError,
        "backward_passes_per_step must be an integer, not 'x'",
    ),
    "a barrier of a list": (lambda: hvd.barrier([0]), TypeError, "barrier: process_set must be a ProcessSet"),
    "an optimizer's process set that is a list": (
        lambda: hvd.DistributedOptimizer(Descent(), process_set=[0]),
        TypeError,
        "DistributedOptimizer: process_set must be a ProcessSet",
    ),
    "an optimizer's compression by name": (
        lambda: hvd.DistributedOptimizer(Descent(), compression="zip"),
        TypeError,
        "must be a Compressor, .*, not 'zip'$",
    ),
    "a root that is text": (lambda: hvd.broadcast_object(1, root_rank="0"), TypeError, "must be an integer in"),
    "an op as a name": (lambda: hvd.reducescatter(ONES, hvd.Sum), TypeError, "not <?ReduceOp.Sum.*; write op=Sum"),
}


class Descent:
    def step(self, params, grads):
        return params


REDUCTIONS = {
    "allreduce": hvd.allreduce,
    "allreduce_": hvd.allreduce_,
    "allreduce_async": hvd.allreduce_async,
    "allreduce_async_": hvd.allreduce_async_,
    "grouped_allreduce": lambda one, *rest, **named: hvd.grouped_allreduce([one], *rest, **named),
    "grouped_allreduce_": lambda one, *rest, **named: hvd.grouped_allreduce_([one], *rest, **named),
    "grouped_allreduce_async": lambda one, *rest, **named: hvd.grouped_allreduce_async([one], *rest, **named),
    "grouped_allreduce_async_": lambda one, *rest, **named: hvd.grouped_allreduce_async_([one], *rest, **named),
}


@pytest.mark.fast
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("form", REDUCTIONS)
def test_an_allreduce_refuses_anything_but_a_bool_in_the_place_of_average(form):
    refused = {
        "not <?ReduceOp.Sum.*; write op=Sum": hvd.Sum,
        "not <?ReduceOp.Average.*; write op=Average": hvd.Average,
        "not 'grad.0'; write name='grad.0'": "grad.0",
        "not 'mean'; write op=Average": "mean",
        "must be True, False or None, not 1$": 1,
    }
    for message, second in refused.items():
        for _ in range(3):  # of a name that comes again, too
            array = ONES.copy()
            with pytest.raises(TypeError, match=f"average, the second argument, .*{message}"):
                REDUCTIONS[form](array, second, name="second")
            require_equal(array, ONES)
    require_that_all_is_well()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("form", REDUCTIONS)
def test_a_bool_as_average_is_deprecated_on_the_callers_line(form):
    for average, op in ((True, "Average"), (False, "Sum"), (np.False_, "Sum")):
        with pytest.warns(DeprecationWarning, match=f"write op={op}") as warnings:
            result = REDUCTIONS[form](ONES.copy(), average)
        assert [one.filename for one in warnings] == [__file__]
        result = hvd.synchronize(result) if "async" in form else result
        result = result[0] if isinstance(result, list) else result
        require_equal(result, ONES * (1 if average else hvd.size()))


def submitted_without_a_name():
    return sum(one["name"].startswith("<unnamed") and not one["ended_s"] for one in core.last_operations())


@pytest.mark.fast
@pytest.mark.ranks(2, 3, fast=[2])
def test_operations_without_a_name_of_two_threads_at_the_same_time_fail_on_all_ranks():
    one, two, three = (np.full(3, number) for number in (1, 2, 3))
    for _ in range(4):  # a repeated operation is prepared, and announced by one bit
        if hvd.rank() == 0:
            pool = ThreadPoolExecutor(1)
            of_thread = pool.submit(hvd.allreduce, one, op=hvd.Sum)
            while not submitted_without_a_name():
                time.sleep(0.001)
            second = hvd.allreduce_async(two, op=hvd.Sum)
            hvd.allreduce(one, name="both are submitted")
            first = of_thread.result(60)
        else:
            hvd.allreduce(one, name="both are submitted")
            first = hvd.allreduce(one, op=hvd.Sum)
            second = hvd.allreduce_async(two, op=hvd.Sum)
        require_equal(first, one * hvd.size())
        told = r"rank 0 submitted it \(rank 0 at .*test_errors.py:\d+; .* while another thread .* waited .*: give each"
        with pytest.raises(hvd.MismatchError, match=told):
            hvd.synchronize(second)
        require_equal(hvd.allreduce(three, op=hvd.Sum), three * hvd.size())
    require_that_all_is_well()


@pytest.mark.ranks(1, 2)
def test_threads_may_take_turns_with_operations_without_a_name_and_have_their_own_names():
    for number in range(8):
        thread = threading.Thread(target=hvd.allreduce, args=(np.full(3, number),))
        thread.start()
        require_equal(hvd.allreduce(ONES, name="beside a thread"), ONES)
        thread.join()
        require_that_all_is_well()


@pytest.mark.ranks(1)
def test_one_rank_alone_has_no_order_to_keep():
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda number: hvd.allreduce(np.full(100_000, number))[0], range(100)))
    assert results == list(range(100))


TWO_THREADS = """
import time, numpy as np, ringtrain as hvd
from concurrent.futures import ThreadPoolExecutor
from ringtrain._core import last_operations
hvd.init()
one, two = np.ones(3), np.full(3, 2)
for _ in range(3):
    if hvd.rank() == 0:
        hvd.allreduce(one, name="both are submitted")
        results = hvd.allreduce(one, op=hvd.Sum), hvd.allreduce(two, op=hvd.Sum)
    else:
        first = hvd.allreduce_async(one, op=hvd.Sum)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(hvd.allreduce, two, op=hvd.Sum)
            while sum(one["name"][:8] == "<unnamed" and not one["ended_s"] for one in last_operations()) < 2:
                time.sleep(0.001)
            hvd.allreduce(one, name="both are submitted")
        results = hvd.synchronize(first), second.result()
    assert results[0].tolist() == [2, 2, 2] and results[1].tolist() == [4, 4, 4], results
"""


def test_a_thread_that_submits_after_another_one_has_gone_on_is_warned_of_once(tmp_path):
    script = tmp_path / "threads.py"
    script.write_text(TWO_THREADS)
    words = ["-m", "ringtrain.run", "-np", "2", "--network", "sockets", sys.executable, str(script)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "two threads have submitted operations without a name" in line]
    assert len(told) == 1 and told[0].startswith("[1]") and "threads.py:12)" in told[0], done.stderr


OTHER_ARGUMENTS = """
import os, sys, numpy as np, ringtrain as hvd
from ringtrain.job import launched_by
rank = launched_by.detect().rank
os.environ["HOROVOD_TIMELINE"] = f"{sys.argv[1]}/{rank}.json"  # as test suites do
hvd.init(comm=[0])
assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == hvd.size() == 3 and hvd.rank() == rank
"""


def test_sockets_take_all_ranks_and_the_timeline_of_rank_0(tmp_path):
    words = ["-m", "ringtrain.run", "-np", "3", "--network", "sockets", sys.executable, "-c", OTHER_ARGUMENTS, tmp_path]
    environ = {**os.environ, "RINGTRAIN_CACHE_CAPACTIY": "3"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "ringtrain: " in line]
    assert [line[:3] for line in told] == ["[0]", "[0]"], done.stderr
    assert "init(comm=[0]): over sockets a job has all ranks that were started" in told[0]
    assert "RINGTRAIN_CACHE_CAPACTIY has no effect" in told[1]
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]


@pytest.mark.ranks(2)
def test_operations_without_a_name_stay_matched_after_an_error_of_one_rank_alone():
    other = hvd.add_process_set([1])
    for bad in (
        lambda: hvd.allreduce("text"),
        lambda: hvd.allreduce(np.ones(2, bool)),
        lambda: hvd.alltoall(ONES, splits=[99, 0]),
        lambda: hvd.broadcast(ONES, 7),
        lambda: hvd.allreduce(ONES, process_set=other),
    ):
        if hvd.rank() == 0:
            with pytest.raises((TypeError, ValueError)):
                bad()
        assert hvd.allreduce(np.array([1 + hvd.rank()]), op=hvd.Sum)[0] == 3
        assert hvd.broadcast_object({"of": hvd.rank()}, 1) == {"of": 1}
    hvd.remove_process_set(other)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("which", BAD_ARGUMENTS)
def test_bad_arguments_are_refused_on_the_callers_line(which):
    call, error, message = BAD_ARGUMENTS[which]
    with pytest.raises(error, match=message):
        call()
    require_that_all_is_well()


@pytest.mark.ranks(2, 3)
def test_rows_that_cannot_be_split_evenly():
    with pytest.raises(ValueError, match="cannot be split evenly over"):
        hvd.alltoall(np.ones(hvd.size() + 1))


@pytest.mark.ranks(1, 2)
def test_a_read_only_array_is_not_written_to():
    fixed = np.ones(3)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        hvd.allreduce_(fixed)
    require_equal(hvd.allreduce(fixed), np.ones(3))


@pytest.mark.ranks(2)
def test_a_user_may_call_an_operation_join():
    for name in ("join", "barrier", "add_process_set", "unnamed.0"):
        require_equal(hvd.allreduce(ONES, name=name), ONES)


@pytest.mark.ranks(2)
def test_a_forked_child_does_not_wait_for_its_parents_operation():
    handle = hvd.allreduce_async(ONES, name="before the fork") if hvd.rank() == 0 else None
    if handle is not None:
        child = os.fork()
        if child == 0:
            try:
                hvd.synchronize(handle)
            except hvd.NotInitializedError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    hvd.barrier()
    if handle is None:
        hvd.allreduce(ONES, name="before the fork")
    else:
        require_equal(hvd.synchronize(handle), ONES)


@pytest.mark.ranks(2, initialised=False)
def test_an_operation_that_one_rank_never_submits_ends_with_a_stalled_error():
    hvd.init(stall_warning_time_s=60, stall_shutdown_time_s=1)
    for name in ("cached", "new"):
        if name == "cached":
            hvd.allreduce(ONES, name=name)
        if hvd.rank() == 0:
            message = rf'allreduce "{name}".*rank 0 submitted it \(at .*test_errors.py:\d+\), rank 1 did not'
            with pytest.raises(hvd.StalledError, match=message):
                hvd.allreduce(ONES, name=name)
        else:
            time.sleep(1)
        hvd.barrier()
    require_that_all_is_well()
    hvd.shutdown()


@pytest.mark.ranks(1, 2)
def test_init_in_a_forked_child_is_refused_before_it_connects_to_others():
    def body():
        network.connect = lambda *_: os._exit(3)
        try:
            hvd.init()
        except hvd.RingtrainError as error:
            assert str(error).startswith("this process was forked from a rank of ringtrain and cannot join a job")
        else:
            os._exit(4)

    require_good_end(fork(body))
    hvd.allreduce(ONES, name="after the fork")


@pytest.mark.ranks(2)
def test_a_forked_child_is_told_that_it_is_no_rank():
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            hvd.allreduce(ONES)
            answer = "nothing"
        except hvd.NotInitializedError as error:
            answer = str(error)
        os.write(writing, answer.encode())
        hvd.shutdown()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert "forked" in os.read(reading, 1000).decode()
    require_that_all_is_well()


@pytest.mark.ranks(1, 2, isolated=True)
def test_a_call_after_shutdown_says_what_ended_ringtrain():
    hvd.init()
    hvd.shutdown()
    line = inspect.currentframe().f_lineno - 1
    message = rf"it was ended by shutdown\(\) at .*test_errors.py:{line}; call init\(\) again"
    with pytest.raises(hvd.NotInitializedError, match=message):
        hvd.allreduce(ONES)
    hvd.init()
    require_that_all_is_well()


def test_calls_before_init():
    operations = [hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter, lambda ones: hvd.broadcast(ones, 0)]
    calls = [functools.partial(operation, ONES) for operation in operations]
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.barrier, hvd.join, hvd.global_process_set.included, *calls):
        with pytest.raises(hvd.NotInitializedError, match=r"call init\(\) (first|again)"):
            call()
        with pytest.raises(ValueError):  # as in Horovod
            call()
    assert not hvd.is_initialized()
    hvd.shutdown()


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"fusion_threshold_mb": -1}, ValueError, "fusion_threshold_mb must be a number from 0 to 4096"),
        ({"cache_capacity": "many"}, ValueError, "cache_capacity must be a number"),
        ({"simd": "mmx"}, ValueError, "one of auto scalar avx2 avx512 neon, not mmx"),
        ({"fusion": 1}, TypeError, "has no option 'fusion'"),
    ],
)
def test_options_out_of_range(keywords, error, message):
    with pytest.raises(error, match=message):
        hvd.init(**keywords)
    assert not hvd.is_initialized()


def test_a_bad_variable_is_named(monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "-5")
    with pytest.raises(ValueError, match="from HOROVOD_FUSION_THRESHOLD=-5"):
        hvd.init()


@pytest.mark.ranks(2, initialised=False)
def test_options_that_differ_between_ranks():
    from mpi4py import MPI

    with pytest.raises(ValueError, match="ring_chunk_kb must be the same on all ranks"):
        hvd.init(ring_chunk_kb=100 + MPI.COMM_WORLD.Get_rank())
    hvd.init(ring_chunk_kb=100)
    require_that_all_is_well()
    hvd.shutdown()


def test_a_launcher_of_another_mpi_is_refused():
    """The ranks of a foreign launcher would each be rank 0 of 1."""
    if (
        "Open MPI"
        in subprocess.run([Path(sys.prefix) / "bin" / "mpirun", "--version"], capture_output=True, text=True).stdout
    ):
        foreign = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"}
    else:
        foreign = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    result = subprocess.run(
        [sys.executable, "-c", "import ringtrain; ringtrain.init()"],
        env={**os.environ, **foreign},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode != 0
    assert "started 4 ranks" in result.stderr and "ringrun -np 4" in result.stderr


@pytest.mark.parametrize("module", ["ringtrain", "ringtrain.torch"])
@pytest.mark.parametrize(
    ("name", "meant"),
    [("all_reduce", "allreduce"), ("get_rank", "rank"), ("init_process_group", "init"), ("barier", "barrier")],
)
def test_a_name_of_torch_or_one_that_is_almost_right_gets_a_hint(module, name, meant):
    face = pytest.importorskip(module)
    with pytest.raises(
        AttributeError, match=rf"^module '{module}' has no attribute '{name}'; did you mean '{meant}'\?$"
    ):
        getattr(face, name)
    with pytest.raises(AttributeError, match=r"^module '[a-z.]+' has no attribute 'horse'$"):
        face.horse  # noqa: B018


def test_public_errors_are_called_as_users_import_them():
    errors = [error for name in hvd.__all__ if inspect.isclass(error := getattr(hvd, name)) and "Error" in name]
    assert len(errors) > 10
    assert {error.__module__ for error in errors} == {"ringtrain"}


class Model:
    def state_dict(self):
        """As of a torch.nn.Module."""

    def parameters(self):
        """As of a torch.nn.Module."""


class Optimizer(Model):
    param_groups = ()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (Model(), r"this is Model, not arrays; write broadcast_parameters\(model.state_dict\(\), ...\)"),
        (Model().parameters, r"this is method, not arrays; call it, as in broadcast_parameters\(model.parameters\(\)"),
        (
            Optimizer(),
            r"this is Optimizer, not arrays; of an optimizer send the state, by broadcast_optimizer_state\(optimizer",
        ),
        (None, r"this is NoneType, not arrays; it takes arrays in a dict, list or tuple"),
        ({"a": [1.0]}, r'params\["a.0"\] is float, not an array; put a number into a 0-d array'),
    ],
    ids=["model", "method", "optimizer", "None", "number"],
)
def test_a_thing_without_parameters_is_refused_with_a_remedy(params, message):
    with pytest.raises(TypeError, match=f"^broadcast_parameters: {message}"):
        hvd.broadcast_parameters(params)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("thing", "remedy"),
    [
        ([ONES], "grouped_allreduce"),
        (("a", 1), "grouped_allreduce"),
        ({"a": ONES}, "broadcast_object"),
        ("x", "object"),
    ],
    ids=["list", "tuple", "dict", "str"],
)
def test_an_object_in_the_place_of_an_array_is_refused_with_a_remedy(thing, remedy):
    with pytest.raises(TypeError, match=rf"^ringtrain cannot send a {type(thing).__name__}; .*{remedy}"):
        hvd.allreduce(thing)
