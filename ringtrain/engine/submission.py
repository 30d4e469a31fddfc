"""Submits operations on the arrays of users to the core, and makes their results of what the core returns."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

import ringtrain._core as _core
from ringtrain._core import OpKind, ReduceOp, Site
from ringtrain.arrays.adapter import Adapter, View, adapter_for
from ringtrain.engine.compression import AnyCompressor, Compression, QuantizingCompressor
from ringtrain.engine.handles import Handle, OnGpu, on_gpu_of, report_failure
from ringtrain.engine.process_sets import ProcessSet
from ringtrain.engine.requirements import (
    have,
    is_priority,
    require_average,
    require_compressor,
    require_factor,
    require_op,
    require_priority,
    require_quantizable,
    require_reducible,
    require_root,
    require_scatterable,
    require_usable,
    require_weighable,
    require_weight,
)
from ringtrain.failure import call_site, note_submitter, warn

_FOR_COMPLEX = (ReduceOp.Sum, ReduceOp.Average)
INTEGERS = {number for name, number in _core.DTYPES.items() if "float" not in name}


class Reduction(NamedTuple):
    """How an allreduce or reducescatter makes one value of many."""

    op: ReduceOp = ReduceOp.Sum
    prescale: float = 1.0
    postscale: float = 1.0
    compression: AnyCompressor = Compression.none
    weight: float | None = None  # of this rank, in an average; None: all ranks weigh the same

    @staticmethod
    def of(
        op: ReduceOp | None,
        average: bool | None,
        prescale_factor: float,
        postscale_factor: float,
        compression: AnyCompressor,
        weight: Any = None,
        title: str = "allreduce",
    ) -> Reduction:
        """Makes a Reduction of Horovod's arguments, and of a weight. `title`: of the operation, for messages.

        Raises:
            ValueError: both `op` and `average` are given; or a weight without Average, or one that is out of range.
            TypeError: an argument is of another type, such as an op in the place of `average`.
        """
        # Of every operation, so what is usual is not looked at by functions.
        if average is not None or type(op) is not ReduceOp:
            op = op_of(op, average)
        if compression is not Compression.none:
            require_compressor(compression)
        if type(prescale_factor) is not float:
            prescale_factor = require_factor(prescale_factor, "prescale_factor")
        if type(postscale_factor) is not float:
            postscale_factor = require_factor(postscale_factor, "postscale_factor")
        if weight is not None:
            weight = require_weight(weight, op, title)
        return Reduction(op, prescale_factor, postscale_factor, compression, weight)


def op_of(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """The operation that Horovod's two arguments ask for. Raises as `Reduction.of`."""
    if average is not None:
        require_average(average)
        if op is not None:
            raise ValueError("give op or average, not both: average is the older spelling of op")
        op = ReduceOp.Average if average else ReduceOp.Sum
        warn(f"the argument average is deprecated: write op={op.name}", DeprecationWarning)
        return op
    if op is None:
        return ReduceOp.Average
    require_op(op)
    return op


_NO_REDUCTION = Reduction()


class Operation(NamedTuple):
    """An operation as the user asked for it. `tensors` has one element unless `is_group`."""

    kind: OpKind
    tensors: Sequence[Any]
    name: str | None
    process_set: ProcessSet
    reduction: Reduction = _NO_REDUCTION
    root: int = 0
    priority: int = 0
    splits: Sequence[Any] = ()  # alltoall: one for each tensor, None for even ones
    is_group: bool = False
    in_place: bool = False

    @property
    def title(self) -> str:
        """For messages: allreduce "layer1.weight"."""
        has_name = isinstance(self.name, str) and self.name
        return f'{self.kind.name.lower()} "{self.name}"' if has_name else self.kind.name.lower()


class _Input(NamedTuple):
    """One tensor of an operation on its way."""

    adapter: Adapter
    original: Any  # the user's
    context: Any  # of the compressor
    sent: Any  # what the core reads
    view: View  # of `sent`
    output: Any  # what the core writes, or None where it allocates the result

    def output_view(self) -> View:
        return self.view if self.output is self.sent else self.adapter.view(self.output)


def submit_barrier(name: str) -> _core.Handle:
    """Submit a barrier of all ranks under a name of our own, such as "<end>": its rank submits nothing more."""
    operation = _core.Operation(OpKind.BARRIER, name)
    return _core.submit(operation, [], [], is_awaited=True, site=call_site())


def start(operation: Operation, is_awaited: bool = False) -> Handle[Any]:
    """Submit an operation. Raises at once what the caller's own rank can see.

    `is_awaited`: the caller waits for it at once.
    """
    _core.require_initialized()
    number = require_usable(operation.process_set, operation.name, operation.title)
    priority = require_priority(operation.priority, operation.title)
    _check_list(operation)
    try:
        inputs = [_prepare(operation, tensor) for tensor in operation.tensors]
    except Exception as error:
        _name_if_out_of_memory(error, operation)
        raise
    compression = operation.reduction.compression
    quantization = compression if isinstance(compression, QuantizingCompressor) else None
    if quantization is not None:
        dtypes = [one.adapter.dtype_name(one.sent) for one in inputs]
        require_quantizable(
            quantization, operation.kind, operation.reduction.op, operation.name, dtypes, operation.process_set
        )
    on_gpu = _place_of(operation, inputs)
    splits = _splits_of(operation, inputs)
    root = operation.root
    if operation.kind == OpKind.BROADCAST:
        root = require_root(root, operation.process_set, operation.title)
    agreed = _core.Operation(
        operation.kind,
        operation.name or "",
        process_set=number,
        op=operation.reduction.op,
        root=root,
        prescale=operation.reduction.prescale,
        postscale=operation.reduction.postscale,
        codes=quantization.codes if quantization else "",
        threshold=quantization.threshold if quantization else 0.0,
    )
    views = [one.view for one in inputs]
    outputs = [one.output_view() for one in inputs if one.output is not None]
    try:
        handle = _core.submit(
            agreed,
            views,
            outputs,
            splits,
            priority,
            is_awaited=is_awaited,
            site=call_site(),
            weight=operation.reduction.weight,
        )
    except Exception as error:
        report_failure(error)
        raise
    return Handle(handle, inputs, lambda core: _finish_or_name(operation, inputs, core), on_gpu)


def _check_list(operation: Operation) -> None:
    if not operation.is_group:
        return
    if not isinstance(operation.tensors, (list, tuple)):
        raise TypeError(f"{operation.title}: a grouped operation takes a list of tensors")
    if not operation.tensors:
        raise ValueError(f"{operation.title}: a grouped operation needs at least one tensor")


def _prepare(operation: Operation, tensor: Any) -> _Input:
    adapter = adapter_for(tensor)
    compression = operation.reduction.compression
    if operation.in_place and compression is Compression.none:
        in_place = adapter.view_in_place(tensor)
        if in_place is not None:
            _check_dtype_and_shape(operation, adapter, tensor, in_place[1])
            return _Input(adapter, tensor, None, tensor, in_place, tensor)
    array = adapter.prepare(tensor)
    writes_into_tensor = operation.in_place and adapter.is_in_place(tensor)
    if operation.kind in (OpKind.ALLGATHER, OpKind.ALLTOALL):
        array = adapter.rows(array)
    sent, context = compression.compress(array)
    if sent is not array:
        sent = adapter.prepare(sent)
    view = adapter.view(sent)
    _check_dtype_and_shape(operation, adapter, sent, view[1])
    output = None
    if operation.kind in (OpKind.ALLREDUCE, OpKind.BROADCAST):
        may_overwrite = writes_into_tensor or sent is not array or (operation.in_place and array is not tensor)
        output = sent if may_overwrite else adapter.empty_like(sent)
    else:
        adapter.require_results()
    return _Input(adapter, tensor, context, sent, view, output)


def _place_of(operation: Operation, inputs: list[_Input]) -> OnGpu | None:
    """Returns None for host memory. Raises ValueError unless all tensors are in the same place."""
    if not inputs:
        return None
    first = inputs[0]
    for one in inputs[1:]:
        if one.view[3:4] != first.view[3:4]:
            raise ValueError(
                f"{operation.title}: its tensors are {_place_text(first.view)} and {_place_text(one.view)}; "
                "put them in one place"
            )
    return on_gpu_of(first.adapter, first.sent, first.view)


def _place_text(view: View) -> str:
    return f"on GPU {view[3]}" if len(view) == 5 else "in host memory"


def _check_dtype_and_shape(operation: Operation, adapter: Adapter, sent: Any, dtype: int) -> None:
    op = operation.reduction.op
    reduces = operation.kind in (OpKind.ALLREDUCE, OpKind.REDUCESCATTER)
    if reduces and (dtype in INTEGERS or op not in _FOR_COMPLEX):
        require_reducible(op, adapter.dtype_name(sent), sent.dtype, operation.title)
    if operation.reduction.weight is not None:
        require_weighable(adapter.dtype_name(sent), sent.dtype, operation.title)
    if operation.kind == OpKind.REDUCESCATTER:
        require_scatterable(op, len(sent.shape), operation.title)


def _splits_of(operation: Operation, inputs: list[_Input]) -> list[int]:
    """The splits of all tensors in one list."""
    if operation.kind != OpKind.ALLTOALL:
        return []
    if len(operation.splits) != len(inputs):
        raise ValueError(f"{operation.title}: {len(inputs)} tensors, but splits for {len(operation.splits)}")
    return [
        number
        for one, given in zip(inputs, operation.splits, strict=True)
        for number in _checked_splits(operation, one.sent.shape[0], given)
    ]


def _checked_splits(operation: Operation, rows: int, given: Any) -> list[int]:
    size = operation.process_set.size() or 0
    if given is None:
        if rows % size:
            raise ValueError(f"{operation.title}: {rows} rows cannot be split evenly over {size} ranks; give splits")
        return [rows // size] * size
    splits = np.asarray(adapter_for(given).on_host(given) if hasattr(given, "dtype") else given)
    if splits.dtype.kind not in "iu" or splits.shape != (size,):
        raise ValueError(
            f"{operation.title}: splits must be {size} integers, one for each rank, "
            f"not {splits.dtype}{list(splits.shape)}"
        )
    if (splits < 0).any() or int(splits.sum()) != rows:
        raise ValueError(f"{operation.title}: splits {splits.tolist()} do not add up to the {rows} rows of the tensor")
    return [int(number) for number in splits]


def _finish_or_name(operation: Operation, inputs: list[_Input], core: _core.Handle) -> Any:
    try:
        return _finish(operation, inputs, core)
    except Exception as error:
        _name_if_out_of_memory(error, operation)
        raise


def _name_if_out_of_memory(error: Exception, operation: Operation) -> None:
    """Adds the name of the operation, which the library that ran out of memory does not know."""
    is_out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if is_out_of_memory and sys.version_info >= (3, 11):
        error.add_note(f"ringtrain was making room for {operation.title}")


def _finish(operation: Operation, inputs: list[_Input], core: _core.Handle) -> Any:
    """The user's result of a completed operation."""
    if not inputs:
        return core.number()
    if inputs[0].output is not None:
        outputs = [one.output for one in inputs]
    else:
        outputs = [
            one.adapter.from_memory(memory, shape, one.sent)
            for one, (memory, _, shape) in zip(inputs, core.tensors(), strict=True)
        ]
    results = [_deliver(operation, one, output) for one, output in zip(inputs, outputs, strict=True)]
    if operation.kind == OpKind.ALLTOALL:
        results = _with_received_splits(operation, inputs, results, core.received_splits())
    return results if operation.is_group else results[0]


def _deliver(operation: Operation, one: _Input, output: Any) -> Any:
    result = operation.reduction.compression.decompress(output, one.context)
    if not operation.in_place:
        return one.adapter.returned(result, like=one.original)
    if result is not one.original:
        one.adapter.assign(one.original, result)
    return one.original


def _with_received_splits(
    operation: Operation, inputs: list[_Input], results: list[Any], received: list[int]
) -> list[Any]:
    """A result becomes a pair where the user gave splits."""
    ranks = len(received) // len(results)
    each = [received[first : first + ranks] for first in range(0, len(received), ranks)]
    return [
        result if given is None else (result, one.adapter.received_splits(numbers, given))
        for one, result, given, numbers in zip(inputs, results, operation.splits, each, strict=True)
    ]


# --- operations that are submitted again and again --------------------------------------------------------------------


_BOOL = _core.DTYPES["bool"]

# The name, the arguments of Reduction.of, the process set, the priority.
Key = tuple[str | None, ReduceOp | None, bool | None, float, float, AnyCompressor, ProcessSet, int]
BroadcastKey = tuple[str | None, int, ProcessSet, int]  # the name, the root, the process set, the priority


class Prepared(_core.Prepared):
    """One array that comes again under a name or from a line, which `_core.Prepared` submits.

    `on_gpu` is None for an array in the host's memory.
    """

    __slots__ = ("on_gpu",)
    on_gpu: OnGpu | None

    def wait(self) -> Any:
        """Wait for what was begun and return its array. As `Handle.wait`, but only once."""
        try:
            array = self.finish(0.2, math.inf)
        except BaseException as error:
            self.end(error)
            raise
        return self.as_handle().wait() if array is None else array

    def as_handle(self) -> Handle[Any]:
        """Return the Handle of what was begun, which keeps the array as long as it may be read or written."""
        core, array = self.take()
        return Handle(core, array, None, self.on_gpu)

    def end(self, error: BaseException) -> None:
        """Make room for the next submission after this error."""
        if self.has_begun():
            self.as_handle()
        report_failure(error)

    def __del__(self) -> None:
        if self.has_begun():
            self.as_handle()


_Key = TypeVar("_Key", Key, BroadcastKey)


class PreparedTensors(Generic[_Key]):
    """Submits operations of one kind on one tensor in place, at a third of the cost when a key is repeated.

    A repeated tensor may have other values and another address; after any other change it is prepared anew.
    """

    MAX_KNOWN = 10_000  # names and lines; beyond that all are forgotten
    MAX_OF_LINE = 4  # that differ in shape or other arguments; beyond that the oldest is forgotten

    def __init__(self) -> None:
        # By name, without a prefix; None for a name that came once. Of calls without a name, a list by their line.
        self.known: dict[str | Site, Prepared | list[Prepared] | None] = {}

    def submit(self, tensor: Any, key: _Key, weight: float | None = None, site: Site | None = None) -> Handle[Any]:
        """Submit a tensor. Raises at once what the rank of the caller can see.

        `weight`: of this rank, in an average. `site`: the line that calls, always of a call without a name; None: the
        one that has called first with this name.
        """
        prepared: Prepared | None = _core.find_repeated(self.known, tensor, weight, *key, site)
        if prepared is not None:
            try:
                core = prepared.start_again(tensor)
            except Exception as error:
                report_failure(error)
                raise
            if core is not None:
                return Handle(core, tensor, None, prepared.on_gpu)
        return self._submit_new(tensor, key, False, weight, site)

    def run(self, tensor: Any, key: _Key, weight: float | None = None, site: Site | None = None) -> Any:
        """Submit a tensor as `submit`, and return it with its result."""
        return self.result_of(_core.run_repeated(self.known, tensor, weight, *key, site), tensor, key, weight, site)

    def result_of(self, again: Any, tensor: Any, key: _Key, weight: float | None, site: Site | None) -> Any:
        """Return the tensor with its result, given what `run_repeated` has returned."""
        if again is None:
            return self._submit_new(tensor, key, True, weight, site).wait()
        return again.as_handle().wait() if type(again) is Prepared else again

    def _submit_new(
        self, tensor: Any, key: _Key, is_awaited: bool, weight: float | None, site: Site | None
    ) -> Handle[Any]:
        raise NotImplementedError

    def _place_of(self, name: str | None, site: Site | None) -> str | Site | None:
        """Returns the key in `known` of a call; None for one that is not to be repeated."""
        return site if name is None else name or None

    def _remember(self, place: str | Site, prepared: Prepared | None) -> None:
        if place not in self.known and len(self.known) >= self.MAX_KNOWN:
            self.known.clear()
        if isinstance(place, str):
            self.known[place] = prepared
            return
        of_line = self.known.setdefault(place, [])
        assert isinstance(of_line, list)
        if prepared is not None:
            of_line.insert(0, prepared)
            del of_line[self.MAX_OF_LINE :]


class PreparedAllreduces(PreparedTensors[Key]):
    """Allreduces, with Horovod's arguments.

    Args:
        prefix: put before all names.
        prepares_new: prepare a tensor when its name is new; otherwise when the name is repeated, as most never are.
    """

    def __init__(self, prefix: str = "", prepares_new: bool = False):
        super().__init__()
        self.prefix = prefix
        self._prepares_new = prepares_new

    def __reduce__(self) -> Any:
        """A copy begins with nothing prepared."""
        return PreparedAllreduces, (self.prefix, self._prepares_new)

    def _submit_new(
        self, tensor: Any, key: Key, is_awaited: bool, weight: float | None, site: Site | None
    ) -> Handle[Any]:
        name, op, average, prescale, postscale, compression, process_set, priority = key
        full_name = f"{self.prefix}{name}" if self.prefix else name
        if op is None and average is None:
            op = ReduceOp.Average
        is_usual = (
            (full_name is None or (isinstance(full_name, str) and full_name[:1] != "<"))
            and (type(op) is ReduceOp and average is None and compression is Compression.none)
            and (type(prescale) is type(postscale) is float and type(priority) is int and is_priority(priority))
            and isinstance(process_set, ProcessSet)
        )
        number = process_set.process_set_id if is_usual else None
        adapter = adapter_for(tensor)
        view = adapter.view_in_place(tensor) if number is not None else None
        is_float = view is not None and view[1] not in INTEGERS
        is_reducible = view is None or is_float or op is None or (weight is None and have(op, view[1] == _BOOL))
        if view is None or not is_reducible:
            reduction = Reduction.of(op, average, prescale, postscale, compression, weight)
            operation = Operation(
                *(OpKind.ALLREDUCE, [tensor], full_name, process_set, reduction), priority=priority, in_place=True
            )
            return start(operation, is_awaited)
        assert op is not None and number is not None
        if weight is not None:
            weight = require_weight(weight, op, "allreduce")
        agreed = full_name or "", op, prescale, postscale, number, priority
        place = self._place_of(name, site)
        if site is None:
            site = call_site(full_name or "")
        else:
            note_submitter()
        on_gpu = _gpu_of(adapter, view)
        prepared = None
        if place is not None:
            if self._prepares_new or place in self.known:
                ways = _ways_to_look(adapter, tensor, on_gpu)
                prepared = Prepared(view, *agreed, site, *ways, is_weighted=weight is not None)
                prepared.on_gpu = on_gpu
                if weight is not None:
                    prepared.set_weight(weight)
                prepared.set_key(key, site)
            self._remember(place, prepared)
        try:
            core = None if prepared is None else prepared.start(tensor, is_awaited, "", None)
            if core is None:
                core = _core.allreduce_in_place(view, *agreed, is_awaited, site, weight)
        except Exception as error:
            report_failure(error)
            raise
        return Handle(core, tensor, None, on_gpu)


class PreparedBroadcasts(PreparedTensors[BroadcastKey]):
    """Broadcasts. A name that comes for the second time is prepared."""

    def _submit_new(
        self, tensor: Any, key: BroadcastKey, is_awaited: bool, weight: float | None, site: Site | None
    ) -> Handle[Any]:
        name, root, process_set, priority = key
        operation = Operation(
            OpKind.BROADCAST, [tensor], name, process_set, root=root, priority=priority, in_place=True
        )
        place = self._place_of(name, site) if name is None or isinstance(name, str) else None
        prepared = self._prepare(operation, key, site) if place in self.known else None
        try:
            core = None if prepared is None else prepared.start(tensor, is_awaited, "", None)
        except Exception as error:
            report_failure(error)
            raise
        if prepared is None or core is None:
            handle, prepared = start(operation, is_awaited), None
        else:
            handle = Handle(core, tensor, None, prepared.on_gpu)
        if place is not None:
            self._remember(place, prepared)
        return handle

    def _prepare(self, operation: Operation, key: BroadcastKey, site: Site | None) -> Prepared | None:
        """Raises as `start`. None for a tensor that cannot be worked on in place."""
        (tensor,) = operation.tensors
        name, process_set, title = operation.name, operation.process_set, operation.title
        _core.require_initialized()
        number = require_usable(process_set, name, title)
        root = require_root(operation.root, process_set, title)
        priority = require_priority(operation.priority, title)
        adapter = adapter_for(tensor)
        view = adapter.view_in_place(tensor)
        if view is None:
            return None
        agreed = name or "", ReduceOp.Sum, 1.0, 1.0, number, priority
        on_gpu = _gpu_of(adapter, view)
        ways = _ways_to_look(adapter, tensor, on_gpu)
        if site is None:
            site = call_site()
        else:
            note_submitter()
        prepared = Prepared(view, *agreed, site, *ways, kind=operation.kind, root=root)
        prepared.on_gpu = on_gpu
        prepared.set_key(key, site)
        return prepared


def run_in_place(
    prepared: PreparedTensors[_Key], tensor: Any, key: _Key, weight: float | None, site: Site | None
) -> Any:
    """Run an operation that changes the tensor of a framework, which is told also after an error."""
    try:
        return prepared.run(tensor, key, weight, site)
    finally:
        adapter_for(tensor).note_change(tensor)


_Looks = tuple[type, Callable[[Any], View | None] | None, Callable[[], int | None] | None, object | None]


def _gpu_of(adapter: Adapter, view: View) -> OnGpu | None:
    """Returns the GPU of an array that has a view in place, and is not kept."""
    return OnGpu(view[3], partial(adapter.stream_of_device, view[3])) if len(view) == 5 else None


def _ways_to_look(adapter: Adapter, tensor: Any, on_gpu: OnGpu | None) -> _Looks:
    """For `_core.Prepared`: the type of the tensor, and how the core looks at another one of it and at the stream."""
    kind = type(tensor)
    look = None if kind is np.ndarray else adapter.view_in_place
    exchange = getattr(kind, "__dlpack_c_exchange_api__", None) if adapter.MAKES == "torch" else None
    return kind, look, None if on_gpu is None else on_gpu.stream, exchange
