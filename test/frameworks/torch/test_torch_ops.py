"""Operations on PyTorch tensors: every form, dtype and layout; what is refused, and how."""

import functools
import gc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from exact_torch import TORCH_DTYPES, array_of, require_tensor, tensor_of, tensors_of_ranks
from harness.exact import (
    COMPLEX,
    DTYPE_OF_EACH_SIZE,
    FLOATS,
    OPS,
    complex_data_of_ranks,
    data_of_ranks,
    reference,
    require_equal,
)
from harness.frameworks import on_demand
from harness.refused import bad_arguments, disagreements

import ringtrain

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")

SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (33, 17), (20_001,)]
HVD_OPS = {name: getattr(ringtrain, name.capitalize()) for name in ("sum", "average", "min", "max", "product")}


def synchronized(start):
    return lambda *args, **kwargs: hvd.synchronize(start(*args, **kwargs))


def one_by_one(grouped):
    """A grouped form where that of one tensor is expected."""
    return lambda tensor, *args, **kwargs: grouped([tensor], *args, **kwargs)[0]


def forms_of(single, begin_single, grouped, begin_grouped):
    """Every way to call an operation with one tensor."""
    return [single, synchronized(begin_single), one_by_one(grouped), one_by_one(synchronized(begin_grouped))]


def some_ranks():
    """All ranks, and all but the first: what a body does with each it does for both."""
    sets = [hvd.global_process_set]
    if hvd.size() > 2:
        sets.append(hvd.add_process_set(list(range(1, hvd.size()))))
    return sets


def forget(sets):
    for one in sets[1:]:
        hvd.remove_process_set(one)


# Every form


class Forms(NamedTuple):
    """Ways to call an allreduce."""

    single: Sequence[Callable]
    grouped: Sequence[Callable]
    in_place: Sequence[Callable]


def every_form():
    single = [hvd.allreduce, synchronized(hvd.allreduce_async)]
    grouped = [hvd.grouped_allreduce, synchronized(hvd.grouped_allreduce_async)]
    return Forms(
        single,
        grouped,
        forms_of(hvd.allreduce_, hvd.allreduce_async_, hvd.grouped_allreduce_, hvd.grouped_allreduce_async_),
    )


def few_forms():
    return Forms([hvd.allreduce], [], [hvd.allreduce_])


def check_allreduce(op, dtype, process_set, forms):
    place, size = process_set.rank(), process_set.size()
    how = {"op": HVD_OPS[op], "process_set": process_set}
    everybody = [data_of_ranks(size, shape, dtype, seed=seed, op=op) for seed, shape in enumerate(SHAPES)]
    expected = [reference(op, arrays) for arrays in everybody]
    mine = [tensor_of(arrays[place]) for arrays in everybody]
    for allreduce in forms.single:
        for tensor, result in zip(mine, expected, strict=True):
            require_tensor(allreduce(tensor, **how), result)
    for grouped_allreduce in forms.grouped:
        for actual, result in zip(grouped_allreduce(mine, **how), expected, strict=True):
            require_tensor(actual, result)
    for allreduce_ in forms.in_place:
        for tensor, arrays, result in zip(mine, everybody, expected, strict=True):
            require_tensor(tensor, arrays[place])  # nothing has changed it
            changed = tensor.clone()
            assert allreduce_(changed, **how) is changed
            require_tensor(changed, result)


@pytest.mark.ranks(1, 2, 3, fast=[2])
@pytest.mark.parametrize("op", OPS)
def test_allreduce(op):
    sets = some_ranks()
    for process_set in sets:
        if process_set.included():
            check_allreduce(op, np.dtype("float32"), process_set, every_form())
    forget(sets)
    for dtype in FLOATS if op == "average" else TORCH_DTYPES:
        check_allreduce(op, dtype, hvd.global_process_set, few_forms())


def check_allgather(dtype, process_set):
    parts = [tensors_of_ranks(process_set.size(), (rows, 3), dtype)[0] for rows in (2, 0, 5)][: process_set.size()]
    forms = hvd.allgather, hvd.allgather_async, hvd.grouped_allgather, hvd.grouped_allgather_async
    for allgather in forms_of(*forms):
        require_tensor(allgather(parts[process_set.rank()], process_set=process_set), torch.cat(parts))


def check_broadcast(dtype, process_set):
    root = process_set.ranks[-1]
    for shape in SHAPES:
        everybody = tensors_of_ranks(process_set.size(), shape, dtype)
        mine = everybody[process_set.rank()]
        forms = hvd.broadcast, hvd.broadcast_async, hvd.grouped_broadcast, hvd.grouped_broadcast_async
        for broadcast in forms_of(*forms):
            require_tensor(broadcast(mine, root, process_set=process_set), everybody[-1])
        forms = hvd.broadcast_, hvd.broadcast_async_, hvd.grouped_broadcast_, hvd.grouped_broadcast_async_
        for broadcast_ in forms_of(*forms):
            changed = mine.clone()
            assert broadcast_(changed, root, process_set=process_set) is changed
            require_tensor(changed, everybody[-1])


def check_alltoall(dtype, process_set):
    size, place = process_set.size(), process_set.rank()
    splits = [[(sender + 2 * receiver) % 3 for receiver in range(size)] for sender in range(size)]
    sent = [tensors_of_ranks(size, (sum(splits[sender]), 2), dtype)[sender] for sender in range(size)]
    expected = torch.cat([sent[sender].split(splits[sender])[place] for sender in range(size)])
    for alltoall in (hvd.alltoall, synchronized(hvd.alltoall_async)):
        for given in (torch.tensor(splits[place]), torch.tensor(splits[place], dtype=torch.int32), splits[place]):
            received, numbers = alltoall(sent[place], given, process_set=process_set)
            require_tensor(received, expected)
            assert numbers.tolist() == [splits[sender][place] for sender in range(size)]
            assert numbers.dtype == getattr(given, "dtype", torch.int32)
    even = [tensors_of_ranks(size, (2 * size,), dtype)[sender] for sender in range(size)]
    expected = torch.cat([tensor.chunk(size)[place] for tensor in even])
    require_tensor(hvd.alltoall(even[place], process_set=process_set), expected)
    for grouped_alltoall in (hvd.grouped_alltoall, synchronized(hvd.grouped_alltoall_async)):
        require_tensor(grouped_alltoall([even[place]], process_set=process_set)[0], expected)


def check_reducescatter(dtype, process_set):
    for rows in (0, 1, 7):
        everybody = data_of_ranks(process_set.size(), (rows, 3), dtype)
        expected = np.array_split(reference("sum", everybody), process_set.size())[process_set.rank()]
        begun = hvd.reducescatter_async, hvd.grouped_reducescatter_async
    for reducescatter in forms_of(hvd.reducescatter, begun[0], hvd.grouped_reducescatter, begun[1]):
        mine = tensor_of(everybody[process_set.rank()])
        require_tensor(reducescatter(mine, op=hvd.Sum, process_set=process_set), expected)


@pytest.mark.ranks(1, 2, 3, fast=[2])
@pytest.mark.parametrize("check", [check_allgather, check_broadcast, check_alltoall, check_reducescatter])
def test_other_operations(check):
    sets = some_ranks()
    for process_set in sets:
        for dtype in DTYPE_OF_EACH_SIZE:  # what is only sent is but bytes
            if process_set.included():
                check(dtype, process_set)
    forget(sets)


@pytest.mark.ranks(2)
def test_compressed_tensors_come_back_in_their_dtype():
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        for dtype in ("float32", "float64", "float16", "int32"):
            everybody = data_of_ranks(2, (33,), dtype)
            mine = tensor_of(everybody[hvd.rank()])
            require_tensor(hvd.allreduce(mine, op=hvd.Sum, compression=compression), reference("sum", everybody))
            require_tensor(mine, everybody[hvd.rank()])
            hvd.allreduce_(mine, op=hvd.Sum, compression=compression)
            require_tensor(mine, reference("sum", everybody))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_numbers(dtype):
    size, rank, last = hvd.size(), hvd.rank(), hvd.size() - 1
    for shape in ((), (0,), (7,), (2 * size, 3)):
        everybody = [tensor_of(array) for array in complex_data_of_ranks(size, shape, dtype, "average")]
        mine, total = everybody[rank], sum(everybody)
        for allreduce in every_form().single:
            require_tensor(allreduce(mine), total / size)
            require_tensor(allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25), total / 2)
        for grouped_allreduce in every_form().grouped:
            for actual, expected in zip(
                grouped_allreduce([mine, mine.real], op=hvd.Sum), (total, total.real), strict=True
            ):
                require_tensor(actual, expected)
        for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
            require_tensor(hvd.allreduce(mine, op=hvd.Sum, compression=compression), total)
        for allreduce_ in every_form().in_place:
            changed = mine.clone()
            assert allreduce_(changed, op=hvd.Sum) is changed
            require_tensor(changed, total)
        require_tensor(hvd.broadcast(mine, last), everybody[-1])
        require_tensor(hvd.broadcast_(mine.clone(), last), everybody[-1])
        gathered = torch.cat([torch.atleast_1d(one) for one in everybody])
        require_tensor(hvd.allgather(mine), gathered)
        require_tensor(hvd.allgather(mine.conj()), gathered.conj_physical())
        require_tensor(hvd.allreduce(mine.conj(), op=hvd.Sum), total.conj_physical())
    splits = [2] * size
    require_tensor(hvd.reducescatter(mine, op=hvd.Sum), total.chunk(size)[rank])
    require_tensor(hvd.grouped_reducescatter([mine], op=hvd.Sum)[0], total.chunk(size)[rank])
    require_tensor(hvd.alltoall(mine), torch.cat([one.chunk(size)[rank] for one in everybody]))
    require_tensor(hvd.alltoall(mine, splits)[0], torch.cat([one.chunk(size)[rank] for one in everybody]))


@pytest.mark.ranks(2)
def test_conjugated_and_strided_complex_tensors_are_changed_in_place():
    base = torch.zeros(4, 6, dtype=torch.complex64)
    conjugated = base[:, ::2].conj()
    conjugated.copy_(torch.full((4, 3), 1 + 2j))
    assert hvd.allreduce_(conjugated, op=hvd.Sum) is conjugated
    require_tensor(base[:, ::2], torch.full((4, 3), 2 - 4j))
    require_tensor(base[:, 1::2], torch.zeros(4, 3, dtype=torch.complex64))


@pytest.mark.ranks(2)
def test_a_compression_of_ones_own():
    class Halved(hvd.Compressor):
        """As a user writes one: sends half of it, as float32."""

        @staticmethod
        def compress(tensor):
            return tensor.float() / 2, tensor.dtype

        @staticmethod
        def decompress(tensor, ctx):
            return (2 * tensor).to(ctx)

    everybody = tensors_of_ranks(2, (33,), "float64")
    mine, total = everybody[hvd.rank()], everybody[0] + everybody[1]
    require_tensor(hvd.allreduce(mine, op=hvd.Sum, compression=Halved), total)
    require_tensor(hvd.allreduce_(mine.clone(), op=hvd.Sum, compression=Halved), total)
    require_tensor(hvd.reducescatter(mine, None, Halved, hvd.Sum), total.tensor_split(2)[hvd.rank()])


@pytest.mark.ranks(1, 2, 3)
def test_scale_factors():
    everybody = tensors_of_ranks(hvd.size(), (7,), op="average")
    result = hvd.allreduce(everybody[hvd.rank()], prescale_factor=0.5, postscale_factor=6.0)
    require_tensor(result, 3 * torch.stack(everybody).mean(0))


# Where the elements lie


LAYOUTS = {
    "transposed": lambda: torch.zeros(4, 3, 5, 2).transpose(1, 3),
    "channels last": lambda: torch.zeros(4, 2, 5, 3).contiguous(memory_format=torch.channels_last),
    "every second": lambda: torch.zeros(4, 2, 5, 6)[..., ::2],
    "inside": lambda: torch.zeros(6, 4, 7, 5)[1:5, 1:3, 1:6, 1:4],
    "with an offset": lambda: torch.zeros(5, 2, 5, 3)[1:],
    "negated": lambda: torch.zeros(4, 2, 5, 3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout):
    everybody = tensors_of_ranks(hvd.size(), (4, 2, 5, 3), "float32")
    whole = torch.stack(everybody)

    def mine():
        return LAYOUTS[layout]().copy_(everybody[hvd.rank()])

    require_tensor(hvd.allreduce(mine(), op=hvd.Sum), whole.sum(0))
    require_tensor(hvd.allgather(mine()), torch.cat(everybody))
    require_tensor(hvd.broadcast(mine(), 0), everybody[0])
    to_last, _ = hvd.alltoall(mine(), [0] * (hvd.size() - 1) + [4])
    require_tensor(to_last, torch.cat(everybody) if hvd.rank() == hvd.size() - 1 else whole[0][:0])
    require_tensor(hvd.reducescatter(mine(), op=hvd.Sum), whole.sum(0).tensor_split(hvd.size())[hvd.rank()])
    for change, expected in (
        (lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum), whole.sum(0)),
        (lambda tensor: hvd.grouped_allreduce_([tensor], op=hvd.Max), whole.amax(0)),
        (lambda tensor: hvd.broadcast_(tensor, 0), everybody[0]),
    ):
        changed = mine()
        strides = changed.stride()
        change(changed)
        require_tensor(changed, expected)
        assert changed.stride() == strides


@pytest.mark.ranks(2)
def test_in_place_changes_nothing_around_a_view():
    base = torch.arange(20.0).reshape(4, 5)
    for view in (base[1:3], base[:, 1], base.t()[2:4, ::2]):
        before = base.clone()
        hvd.allreduce_(view, op=hvd.Sum)
        is_changed = torch.zeros_like(base)
        torch.as_strided(is_changed, view.size(), view.stride(), view.storage_offset()).fill_(1)
        require_tensor(base, torch.where(is_changed.bool(), 2 * before, before))


@pytest.mark.ranks(2)
def test_an_expanded_tensor_can_be_sent_but_not_changed():
    expanded = torch.ones(3, 1).expand(3, 4)
    require_tensor(hvd.allreduce(expanded, op=hvd.Sum), torch.full((3, 4), 2.0))
    with pytest.raises(ValueError, match="was expanded"):
        hvd.allreduce_(expanded)


@pytest.mark.ranks(2)
def test_shared_memory():
    for tensor in (hvd.empty(3, 4), hvd.empty((3, 4)), hvd.empty(torch.Size([3, 4]), dtype=torch.bfloat16)):
        assert tensor.shape == (3, 4) and tensor.is_contiguous()
        tensor.fill_(hvd.rank() + 1)
        hvd.allreduce_(tensor, op=hvd.Sum)
        require_tensor(tensor, torch.full((3, 4), 3, dtype=tensor.dtype))
    assert hvd.empty(()).shape == ()
    assert hvd.empty(0, 3).shape == (0, 3)


def test_shared_memory_needs_init():
    with pytest.raises(hvd.NotInitializedError, match="call init"):
        hvd.empty(3)


# Sparse tensors


@pytest.mark.ranks(1, 2, 3)
def test_sparse_tensors():
    sets = some_ranks()
    for process_set in sets:
        if not process_set.included():
            continue
        size, place = process_set.size(), process_set.rank()
        # the first rank has none; indices repeat within a rank and among ranks
        indices = [[rank, 4, 4][: 3 if rank else 0] for rank in range(size)]
        everybody = [
            torch.sparse_coo_tensor([rows], torch.full((len(rows), 2), 6.0 * (rank + 1)), (6, 2), check_invariants=True)
            for rank, rows in enumerate(indices)
        ]
        total = torch.stack([tensor.to_dense() for tensor in everybody]).sum(0)
        for op, expected in ((hvd.Sum, total), (hvd.Average, total / size)):
            handle = hvd.sparse_allreduce_async(everybody[place], "sparse", op, process_set)
            assert isinstance(handle, hvd.SparseHandle)
            result = hvd.synchronize(handle)
            assert hvd.poll(handle) and result.is_coalesced()
            require_tensor(result.to_dense(), expected)
            require_tensor(handle().to_dense(), expected)
    forget(sets)


# Together with NumPy


@pytest.mark.ranks(2, 3)
def test_a_rank_may_send_an_array_where_the_others_send_tensors():
    everybody = data_of_ranks(hvd.size(), (7, 3), "float32")
    mine = everybody[hvd.rank()] if hvd.rank() == 0 else tensor_of(everybody[hvd.rank()])
    check = require_equal if hvd.rank() == 0 else require_tensor
    check(ringtrain.allreduce(mine, op=hvd.Sum, name="mixed"), reference("sum", everybody))
    check(ringtrain.allgather(mine, name="mixed"), np.concatenate(everybody))
    check(ringtrain.broadcast(mine, 1, name="mixed"), everybody[1])
    both = hvd.grouped_allreduce([np.ones(3, "float32"), torch.ones(3)], op=hvd.Sum)
    require_equal(both[0], array_of(both[1]))


# Refusals


def new_ones(shape, dtype):
    return torch.ones(shape, dtype=getattr(torch, dtype))


@functools.cache
def ones():
    return torch.ones(4, 2)


def wrapper_of_ones():
    """As quantised tensors are made: what it says about itself holds, and its elements are elsewhere."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, wrapped):
            return torch.Tensor._make_wrapper_subclass(cls, wrapped.shape, dtype=wrapped.dtype)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return NotImplemented

    return Wrapper(ones())


BAD_ARGUMENTS = {
    **bad_arguments(hvd, new_ones, ones),
    "complex halves": (lambda: hvd.allreduce(ones().to(torch.complex32)), TypeError, "dtype torch.complex32; convert"),
    "complex maximum": (
        lambda: hvd.allreduce(ones().to(torch.complex64), op=hvd.Max),
        ValueError,
        "op=Max is for real numbers, not for torch.complex64; use op=Sum",
    ),
    "complex product, in place": (
        lambda: hvd.allreduce_(ones().to(torch.complex64), op=hvd.Product),
        ValueError,
        "op=Product is for real numbers",
    ),
    "complex Adasum": (lambda: hvd.allreduce(ones() + 1j, op=hvd.Adasum), ValueError, "op=Adasum is for real numbers"),
    "8-bit floats": (
        lambda: hvd.allreduce(ones().to(torch.float8_e5m2)),
        TypeError,
        "dtype torch.float8_e5m2; convert",
    ),
    "sparse": (lambda: hvd.allreduce(ones().to_sparse()), TypeError, "layout torch.sparse_coo.*sparse_allreduce_async"),
    "sparse, in place": (lambda: hvd.allreduce_(ones().to_sparse()), TypeError, "layout torch.sparse_coo"),
    "dense for sparse": (lambda: hvd.sparse_allreduce_async(ones()), TypeError, "in COO layout, not torch.strided"),
    "list for sparse": (lambda: hvd.sparse_allreduce_async([1.0]), TypeError, "in COO layout, not list"),
    "sparse maximum": (
        lambda: hvd.sparse_allreduce_async(ones().to_sparse(), op=hvd.Max),
        ValueError,
        "Average or Sum",
    ),
    "meta": (lambda: hvd.allreduce(ones().to("meta")), ValueError, "meta device"),
    "meta, in place": (lambda: hvd.allreduce_(ones().to("meta")), ValueError, "meta device"),
    "wrapper": (lambda: hvd.allreduce(wrapper_of_ones()), TypeError, "cannot send a Wrapper: its elements .* it wraps"),
    "wrapper, in place": (lambda: hvd.allreduce_(wrapper_of_ones()), TypeError, "cannot send a Wrapper"),
    "wrapper in a group": (
        lambda: hvd.grouped_broadcast([ones(), wrapper_of_ones()], 0),
        TypeError,
        "cannot send a Wrapper",
    ),
    "splits of floats": (
        lambda: hvd.alltoall(ones(), torch.tensor([2.0] * hvd.size())),
        ValueError,
        "integers, one for",
    ),
    "splits in two dimensions": (
        lambda: hvd.alltoall(ones(), torch.ones(1, 2).long()),
        ValueError,
        "one for each rank",
    ),
    "uneven rows": (lambda: hvd.alltoall(torch.ones(hvd.size() + 1)), ValueError, "cannot be split evenly"),
    "an op in the place of average": (
        lambda: hvd.allreduce(ones(), hvd.Sum),
        TypeError,
        "second argument.*; write op=Sum",
    ),
    "an op in the place of average, in a group": (
        lambda: hvd.grouped_allreduce([ones()], hvd.Sum),
        TypeError,
        "second argument.*; write op=Sum",
    ),
    "an op in the place of average, in place": (
        lambda: hvd.allreduce_(ones(), hvd.Sum),
        TypeError,
        "second argument.*; write op=Sum",
    ),
    "a name in the place of average": (lambda: hvd.allreduce(ones(), "grad.0"), TypeError, "; write name='grad.0'"),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "with gradient"])
def test_bad_arguments_are_refused_on_the_callers_line(requires_grad):
    for what, (call, error, message) in BAD_ARGUMENTS.items():
        try:
            ones().requires_grad_(requires_grad)
            with pytest.raises(error, match=message):
                call()
        except BaseException as failure:
            raise AssertionError(f"{what}: {failure}") from failure
        finally:
            ones().requires_grad_(False)
        require_tensor(ones(), torch.ones(4, 2))
    require_tensor(hvd.allreduce(ones(), op=hvd.Sum), ones() * hvd.size())


@pytest.mark.ranks(2)
def test_a_subclass_that_has_its_elements_is_a_tensor_like_any_other():
    class Tagged(torch.Tensor):
        """A subclass with elements of its own."""

    tagged = torch.arange(4.0).as_subclass(Tagged)
    assert torch.equal(hvd.allreduce(tagged, op=hvd.Sum), 2 * torch.arange(4.0))
    assert hvd.allreduce_(tagged, op=hvd.Sum) is tagged and type(tagged) is Tagged
    assert torch.equal(tagged.as_subclass(torch.Tensor), 2 * torch.arange(4.0))


@pytest.mark.ranks(1, 2)
def test_a_distributed_tensor_is_refused_and_its_local_one_is_not():
    distributed = pytest.importorskip("torch.distributed.tensor")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        tensor = distributed.DTensor.from_local(torch.ones(4), mesh)
        for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather):
            with pytest.raises(TypeError, match=r"cannot send a DTensor: .*to_local\(\)"):
                call(tensor)
        require_tensor(hvd.allreduce(tensor.to_local(), op=hvd.Sum), torch.full((4,), float(hvd.size())))
    finally:
        torch.distributed.destroy_process_group()
        # Cycles keep the group, which has threads: a forked child that collected it would abort.
        gc.collect()


DISAGREEMENTS = disagreements(hvd, new_ones)


@pytest.mark.ranks(2, 3, fast=[2])
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_all_hear_who_did_what(what):
    call, message = DISAGREEMENTS[what]
    with pytest.raises(hvd.MismatchError, match=message):
        call(hvd.rank() == hvd.size() - 1)
    require_tensor(hvd.allreduce(ones(), op=hvd.Sum), ones() * hvd.size())
