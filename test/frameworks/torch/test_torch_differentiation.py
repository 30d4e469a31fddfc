"""Gradients of the operations against closed forms, and what autograd knows of operations in place.

The loss of each rank is the sum of its results times coefficients of its own, so these are the gradients of the
results.
"""

import threading
import time

import pytest
from exact_torch import require_tensor, tensors_of_ranks
from harness.frameworks import on_demand

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")


def for_each_set(check):
    """Call it with all ranks, and on those of a smaller set with that."""
    check(hvd.global_process_set)
    if hvd.size() > 2:
        some = hvd.add_process_set(list(range(1, hvd.size())))
        if some.included():
            check(some)
        hvd.remove_process_set(some)


def coefficients(process_set, shape):
    return tensors_of_ranks(process_set.size(), shape, seed=5, op="average")


def input_of(shape):
    return torch.ones(shape, dtype=torch.float64, requires_grad=True)


def gradient(results, coefficients, *inputs):
    results = results if isinstance(results, list) else [results]
    return torch.autograd.grad(sum((result * coefficients).sum() for result in results), inputs)


SCALES = [{}, {"prescale_factor": 2.0}, {"prescale_factor": 0.5, "postscale_factor": 8.0}]


def scale_of(scales):
    return scales.get("prescale_factor", 1.0) * scales.get("postscale_factor", 1.0)


@pytest.mark.ranks(1, 2, 3, fast=[2])
def test_allreduce():
    def check(process_set):
        everybody = coefficients(process_set, (3, 2))
        for op, expected in ((hvd.Sum, sum(everybody)), (hvd.Average, sum(everybody) / len(everybody))):
            for scales in SCALES:
                input, how = input_of((3, 2)), {"op": op, "process_set": process_set, **scales}
                mine = everybody[process_set.rank()]
                (of_input,) = gradient(hvd.allreduce(input, **how), mine, input)
                require_tensor(of_input, expected * scale_of(scales))
                several = [input_of((3, 2)), input_of((3, 2))]
                for of_one in gradient(hvd.grouped_allreduce(several, **how), mine, *several):
                    require_tensor(of_one, expected * scale_of(scales))

    for_each_set(check)


@pytest.mark.ranks(1, 2, 3, fast=[2])
def test_allgather_of_uneven_rows():
    def check(process_set):
        rows = [2, 0, 3][: process_set.size()]
        everybody = coefficients(process_set, (sum(rows), 2))
        expected = (sum(everybody) / len(everybody)).split(rows)[process_set.rank()]
        input, mine = input_of(expected.shape), everybody[process_set.rank()]
        (of_input,) = gradient(hvd.allgather(input, process_set=process_set), mine, input)
        require_tensor(of_input, expected)
        several = [input_of(expected.shape), input_of(expected.shape)]
        for of_one in gradient(hvd.grouped_allgather(several, process_set=process_set), mine, *several):
            require_tensor(of_one, expected)

    for_each_set(check)


@pytest.mark.ranks(1, 2, 3)
def test_allgather_of_numbers():
    input, everybody = input_of(()), coefficients(hvd.global_process_set, (hvd.size(),))
    (of_input,) = gradient(hvd.allgather(input), everybody[hvd.rank()], input)
    require_tensor(of_input, (sum(everybody) / hvd.size())[hvd.rank()])


@pytest.mark.ranks(1, 2, 3)
def test_broadcast():
    def check(process_set):
        root = process_set.ranks[-1]
        everybody = coefficients(process_set, (3,))
        input = input_of((3,))
        result = hvd.broadcast(input, root, process_set=process_set)
        (of_input,) = gradient(result, everybody[process_set.rank()], input)
        average = sum(everybody) / len(everybody)
        require_tensor(of_input, average if hvd.rank() == root else torch.zeros_like(average))

    for_each_set(check)


@pytest.mark.ranks(1, 2, 3)
def test_alltoall():
    def check(process_set):
        size, place = process_set.size(), process_set.rank()
        for splits in (
            [[1] * size] * size,
            [[(sender + 2 * receiver) % 3 for receiver in range(size)] for sender in range(size)],
        ):
            received = [[splits[sender][receiver] for sender in range(size)] for receiver in range(size)]
            everybody = [coefficients(process_set, (sum(received[rank]), 2))[rank] for rank in range(size)]
            expected = torch.cat([everybody[rank].split(received[rank])[place] for rank in range(size)])
            input = input_of((sum(splits[place]), 2))
            result, _ = hvd.alltoall(input, splits[place], process_set=process_set)
            require_tensor(gradient(result, everybody[place], input)[0], expected)
            if splits[place] == [1] * size:
                result = hvd.alltoall(input, process_set=process_set)
                require_tensor(gradient(result, everybody[place], input)[0], expected)

    for_each_set(check)


@pytest.mark.ranks(1, 2, 3)
def test_reducescatter():
    def check(process_set):
        size, place = process_set.size(), process_set.rank()
        rows = [len(part) for part in torch.arange(4).tensor_split(size)]
        everybody = [coefficients(process_set, (rows[rank], 2))[rank] for rank in range(size)]
        for op, factor in ((hvd.Average, 1), (hvd.Sum, size)):
            for scales in SCALES:
                expected = torch.cat(everybody) * factor * scale_of(scales)
                input, how = input_of((4, 2)), {"op": op, "process_set": process_set, **scales}
                (of_input,) = gradient(hvd.reducescatter(input, **how), everybody[place], input)
                require_tensor(of_input, expected)
                several = [input_of((4, 2)), input_of((4, 2))]
                for of_one in gradient(hvd.grouped_reducescatter(several, **how), everybody[place], *several):
                    require_tensor(of_one, expected)

    for_each_set(check)


@pytest.mark.ranks(1, 2, 3)
def test_complex_numbers():
    """As for real ones, by torch's convention: the gradient of a real loss sum(Re(conj(c) x)) is c."""
    size, rank = hvd.size(), hvd.rank()
    rows = size * 2

    def gradient_of(operation, shape):
        everybody = [torch.complex(*parts) for parts in zip(real_of(shape), imaginary_of(shape), strict=True)]
        input = torch.ones(rows, 2, dtype=torch.complex128, requires_grad=True)
        (of_input,) = torch.autograd.grad((everybody[rank].conj() * operation(input)).real.sum(), input)
        return of_input, everybody, sum(everybody)

    def real_of(shape):
        return tensors_of_ranks(size, shape, op="average")

    def imaginary_of(shape):
        return tensors_of_ranks(size, shape, seed=3, op="average")

    whole, part = (rows, 2), (rows // size, 2)
    of_input, _, total = gradient_of(lambda input: hvd.allreduce(input, op=hvd.Sum), whole)
    require_tensor(of_input, total)
    of_input, _, total = gradient_of(lambda input: hvd.grouped_allreduce([input])[0], whole)
    require_tensor(of_input, total / size)
    of_input, _, total = gradient_of(lambda input: hvd.broadcast(input, size - 1), whole)
    require_tensor(of_input, total / size if rank == size - 1 else torch.zeros_like(total))
    of_input, _, total = gradient_of(hvd.allgather, (rows * size, 2))
    require_tensor(of_input, (total / size).chunk(size)[rank])
    of_input, everybody, _ = gradient_of(hvd.alltoall, whole)
    require_tensor(of_input, torch.cat([one.chunk(size)[rank] for one in everybody]))
    of_input, everybody, _ = gradient_of(lambda input: hvd.reducescatter(input, op=hvd.Sum), part)
    require_tensor(of_input, size * torch.cat(everybody))


@pytest.mark.ranks(1, 2)
def test_gradcheck_of_complex_numbers():
    """Of a loss that all ranks share, numerically: one rank's part of it is what its own input changes."""
    input = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(lambda tensor: hvd.allreduce(tensor, postscale_factor=3.0), input)


@pytest.mark.ranks(1, 2, 3)
def test_an_allreduce_can_be_differentiated_twice():
    for op, factor in ((hvd.Average, 1), (hvd.Sum, hvd.size())):
        input = torch.arange(3.0, dtype=torch.float64).requires_grad_()
        result = hvd.allreduce(input, op=op)
        (once,) = torch.autograd.grad((result**3).sum(), input, create_graph=True)
        require_tensor(once, 3 * factor * result**2)
        (twice,) = torch.autograd.grad(once.sum(), input)
        require_tensor(twice, 6 * factor**2 * result)


def gradients_of_gradients(operation):
    """Of the first, second and third order, of an input of this rank."""
    input = (torch.arange(12.0, dtype=torch.float64).reshape(4, 3) + hvd.rank()).requires_grad_()
    of_order = (operation(input) ** 3).sum()
    found = []
    for _ in range(3):
        (gradient,) = torch.autograd.grad(of_order, input, create_graph=True)
        found.append(gradient.detach())
        of_order = (gradient**2).sum()
    return found


@pytest.mark.ranks(2, 3)
def test_a_broadcast_can_be_differentiated_as_often_as_a_row_of_an_allgather():
    for root in range(hvd.size()):
        found = gradients_of_gradients(lambda input, root=root: hvd.broadcast(input, root))
        expected = gradients_of_gradients(lambda input, root=root: hvd.allgather(input[None])[root])
        for mine, other in zip(found, expected, strict=True):
            require_tensor(mine, other)
            assert bool(mine.any()) == (hvd.rank() == root)


@pytest.mark.ranks(2)
def test_all_ranks_take_part_in_gradients_of_gradients():
    for operation in (
        lambda input: hvd.allreduce(input, weight=1.0 + hvd.rank()),
        lambda input: hvd.grouped_allreduce([input, input * 2])[1],
        lambda input: hvd.grouped_allgather([input, input * 2])[1],
        hvd.alltoall,
        lambda input: hvd.alltoall(input, torch.tensor([1, 3]))[0],
        hvd.reducescatter,
        lambda input: hvd.grouped_reducescatter([input, input * 2])[0],
    ):
        assert all(gradient.any() for gradient in gradients_of_gradients(operation))


@pytest.mark.ranks(2)
def test_members_of_a_group_without_a_gradient_are_left_out_of_backward():
    """Such as labels and masks, on all ranks alike."""
    rank = hvd.rank()
    others = [torch.tensor([rank, 2]), torch.tensor([True, rank == 1]), torch.tensor([7], dtype=torch.uint8)]
    for operation, takes_bool in ((hvd.grouped_allgather, True), (hvd.grouped_allreduce, False)):
        first, last = input_of((2,)), input_of((3, 1))
        inputs = [first, *(one for one in others if takes_bool or one.dtype != torch.bool), last]
        results = operation(inputs)
        assert [one.requires_grad for one in results] == [True, *[False] * (len(inputs) - 2), True]
        (results[0].sum() * 2 + results[-1].sum() * 3).backward()
        require_tensor(first.grad, torch.full((2,), 2.0, dtype=torch.float64))
        require_tensor(last.grad, torch.full((3, 1), 3.0, dtype=torch.float64))
    inputs = [input_of((2, 1)), torch.tensor([[rank], [2]])]
    floats, integers = hvd.grouped_reducescatter(inputs)
    floats.sum().backward()
    assert integers.dtype == torch.int64 and not integers.requires_grad
    require_tensor(inputs[0].grad, torch.ones(2, 1, dtype=torch.float64))


@pytest.mark.ranks(2)
def test_gradients_of_named_operations_are_matched_by_name():
    inputs = [input_of((2,)), input_of((2,))]
    results = [hvd.allreduce(input, op=hvd.Sum, name=name) for name, input in zip("ab", inputs, strict=True)]
    # the first thread to come waits for the other rank's second
    threads = [threading.Thread(target=(place * results[place].sum()).backward) for place in (0, 1)]
    for place in (0, 1) if hvd.rank() else (1, 0):
        threads[place].start()
        time.sleep(0.1)
    for place, thread in enumerate(threads):
        thread.join()
        require_tensor(inputs[place].grad, torch.full((2,), 2.0 * place, dtype=torch.float64))


@pytest.mark.ranks(1, 2)
def test_min_max_and_product_have_no_gradient():
    for op in (hvd.Min, hvd.Max, hvd.Product):
        input = input_of((2, 2))
        for result in (
            hvd.allreduce(input, op=op),
            hvd.grouped_allreduce([input], op=op)[0],
            hvd.reducescatter(input, op=op),
            hvd.grouped_reducescatter([input], op=op)[0],
        ):
            with pytest.raises(RuntimeError, match=f"op={op.name} has no gradient"):
                result.sum().backward()


@pytest.mark.ranks(1, 2)
def test_only_what_waits_and_has_a_gradient_is_differentiable():
    input = input_of((2,))
    assert hvd.allreduce(input).requires_grad
    assert not hvd.allreduce(input.detach()).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(input)).requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(input).requires_grad
    one, other = hvd.grouped_allreduce([input, input.detach()])
    (one.sum() + other.sum()).backward()
    require_tensor(input.grad, torch.ones(2, dtype=torch.float64))


# In place


@pytest.mark.ranks(2)
def test_a_leaf_that_requires_a_gradient_can_be_changed():
    for change in (
        lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum),
        lambda tensor: hvd.grouped_allreduce_([tensor], op=hvd.Sum),
        lambda tensor: hvd.broadcast_(tensor, 1),
    ):
        parameter = torch.nn.Parameter(torch.full((3,), 2.0 * hvd.rank()))
        change(parameter)
        assert parameter.is_leaf and parameter.requires_grad
        require_tensor(parameter.detach(), torch.full((3,), 2.0))


@pytest.mark.ranks(2)
def test_backward_refuses_values_that_were_changed_after_it_had_saved_them():
    for change in (
        lambda tensor: hvd.allreduce_(tensor),
        lambda tensor: hvd.allreduce_(tensor=tensor),
        lambda tensor: hvd.synchronize(hvd.allreduce_async_(tensor)),
        lambda tensor: hvd.grouped_allreduce_([tensor]),
        lambda tensor: hvd.synchronize(hvd.grouped_allreduce_async_([tensor])),
        lambda tensor: hvd.broadcast_(tensor, 0),
        lambda tensor: hvd.synchronize(hvd.broadcast_async_(tensor, 0)),
        lambda tensor: hvd.grouped_broadcast_([tensor], 0),
        lambda tensor: hvd.synchronize(hvd.grouped_broadcast_async_([tensor], 0)),
    ):
        input, saved = input_of((2,)), torch.ones(2, dtype=torch.float64)
        result = (input * saved).sum()
        change(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()


@pytest.mark.ranks(2)
def test_in_inference_mode():
    with torch.inference_mode():
        tensor = torch.ones(2)
        require_tensor(hvd.allreduce(tensor, op=hvd.Sum), torch.full((2,), 2.0))
        require_tensor(hvd.allreduce_(tensor, op=hvd.Sum), torch.full((2,), 2.0))
