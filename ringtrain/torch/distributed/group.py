"""A process group of torch.distributed whose operations are those of ringtrain's engine."""

from __future__ import annotations

import functools
import inspect
import math
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled

import ringtrain._core as _core
from ringtrain._core import OpKind, ReduceOp
from ringtrain.arrays.adapter import View
from ringtrain.arrays.torch import coalesced, require_indices, sum_sparse
from ringtrain.errors import ShutDownError, StalledError
from ringtrain.torch.distributed import meeting
from ringtrain.torch.distributed.backend import DEVICES, Hookable, asking
from ringtrain.torch.distributed.buckets import Buckets, is_called_by_backward
from ringtrain.torch.distributed.monitoring import missing_at
from ringtrain.torch.distributed.naming import Call, Names
from ringtrain.torch.distributed.prepared import Prepared, prepare
from ringtrain.torch.distributed.splitting import Splittable
from ringtrain.torch.distributed.streams import order_of
from ringtrain.torch.distributed.transfers import Transfers
from ringtrain.torch.distributed.views import (
    BITWISE,
    RedOp,
    Tensor,
    assign,
    bytes_view_of,
    contiguous,
    copies_back,
    deliver,
    elements_of,
    gathered_rows,
    list_of,
    needs_all_values,
    nothing_of,
    op_of,
    reduction_of,
    require_one_place,
    require_writable,
    seconds_of,
    shares_memory,
    view_of,
    with_shape,
)
from ringtrain.torch.distributed.work import Work, shown_in_profiles, submitted

# Its methods have other forms from version to version.
_OfTorch: Any = dist.ProcessGroup
_AllreduceOptions = dist.AllreduceOptions
_NO_TIMEOUT = _AllreduceOptions().timeout  # of options that have none
_all_reduce_code = inspect.unwrap(dist.all_reduce).__code__
# Functions of torch that wait for what isend() and irecv() return.
_FRAMES_OF_TORCH = 8  # at most, from the group to these functions, by way of hooks
_waiting_codes = {inspect.unwrap(function).__code__ for function in (dist.send, dist.recv)}


def _is_awaited_message() -> bool:
    """Whether a script has called send() or recv(), which call the group by way of isend() or irecv()."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_OF_TORCH):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code in _waiting_codes:
            return True
    return False


def _is_awaited(opts: Any) -> bool:
    """Whether the caller of an operation with these options waits for it before it goes on."""
    return opts is not None and not getattr(opts, "asyncOp", True)


_DONE = Work.done([])  # for torch.distributed.all_reduce(), which waits for it and returns nothing


class Options:
    """Settings of a group, for scripts and torch, at `group.options`."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.backend = "ringtrain"


class ProcessGroup(Hookable, Splittable, _OfTorch):  # type: ignore[misc]
    """A group that `torch.distributed.init_process_group("ringtrain")` or `new_group()` makes.

    Its operations may be called by name, too, as those of any ProcessGroup: `group.allreduce([tensor]).wait()`. Each
    returns a Work. Tensors are dense, in host memory or on the GPU of this rank, of any dtype that is not quantized;
    those that are not contiguous are copied on their way.

    Raised by the call: ShutDownError after destroy_process_group(); ValueError for a tensor on another device, shapes
    that do not fit together, a rank that the group does not have; TypeError for an op that the dtype does not have.
    Raised by `Work.wait()`: what ringtrain.errors lists.

    Args:
        store: torch's, for the group alone.
        ranks: of the job, in the order of the group.
        rank: of this process, in the group.
        timeout: of each operation.
        name: of the group, the same on all its ranks.
    """

    event_prefix = "ringtrain"  # of the names that torch.profiler shows

    def __init__(self, store: Any, ranks: list[int], rank: int, timeout: timedelta, name: str) -> None:
        self._begin(store, ranks, rank, timeout, name)
        self._open(store, ranks, rank)

    def _begin(self, store: Any, ranks: list[int], rank: int, timeout: timedelta, name: str) -> None:
        """Makes the group, which has no process set yet."""
        super().__init__(rank, len(ranks))
        self.options = Options(timeout)
        self.options.global_ranks_in_group, self.options.group_name = ranks, name
        self._store, self._ranks, self._rank, self._size = store, ranks, rank, len(ranks)
        self._timeout_s = seconds_of(timeout)
        self._name_it(name)
        self._lock = threading.RLock()  # names and submissions are in one order
        self._set, self._job, self._is_open = 0, 0, False
        self._buckets = Buckets()
        self._coalesced: list[Work] | None = None
        self._settling_alone: weakref.WeakSet[Work] = weakref.WeakSet()
        self._barriers = 0

    def _name_it(self, name: str) -> None:
        self._group_name, self._group_desc = name, ""
        self._title = f'group "{name}"'  # of messages

    def _open(self, store: Any, ranks: list[int], rank: int) -> None:
        self._store, self._ranks, self._rank, self._size = store, ranks, rank, len(ranks)
        self._set = meeting.open_set(ranks, timedelta(seconds=self._timeout_s))
        self._job = meeting.current_job()
        self._names = Names(self._set)
        self._buckets = Buckets()
        self._transfers = Transfers(self._set, ranks, ranks[rank])
        self._is_open = True
        meeting.note_opened()

    def _another(self, store: Any, ranks: list[int], rank: int, timeout: timedelta, name: str, desc: str) -> Any:
        group = ProcessGroup(store, ranks, rank, timeout, name)
        group._set_group_name(name)
        group._set_group_desc(desc)
        return group

    # ------------------------------------------------------------------------------------- what torch asks of a group

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getRank(self) -> int:  # by this name from C++
        return self._rank

    def getSize(self) -> int:
        return self._size

    def name(self) -> str:
        return "ringtrain"

    def getBackendName(self) -> str:
        return "ringtrain"

    def _get_backend_name(self) -> str:
        """Returns "gloo" where there is no GPU: torch asks whether a rank without a shard of a tensor is on the CPU."""
        return "ringtrain" if torch.cuda.is_available() else "gloo"

    @property
    def group_name(self) -> str:
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name
        super()._set_group_name(name)

    @property
    def group_desc(self) -> str:
        return self._group_desc

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc
        is_said = desc not in ("", "undefined")  # of torch, for a group without one
        self._title = f'group "{self._group_name}"' + (f" ({desc})" if is_said else "")
        super()._set_group_desc(desc)

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in DEVICES]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        if torch.device(device).type not in DEVICES:  # functions of torch catch this class
            raise RuntimeError(f"ringtrain's groups are for tensors on {' and '.join(DEVICES)}, not on {device}")
        return self

    supports_coalescing = False
    supports_time_estimate = False

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """The ranks are connected already."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of each operation from now on."""
        self._timeout_s = seconds_of(timeout)
        self.options._timeout = timeout

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Calls are counted from the beginning."""

    def _get_sequence_number_for_group(self) -> int:
        return self._names.calls if self._is_open else 0

    def shutdown(self) -> None:
        """No operation can be called any more. With its last group a job that began with torch's ends, too."""
        if self._is_open:
            self._is_open = False
            self._forget_hooks()
            meeting.note_closed(self._job, self._set, self._ranks, self._timeout_s)

    def abort(self) -> None:
        """As shutdown(), after the hooks for that."""
        self._call_abort_hooks()
        self.shutdown()

    # --------------------------------------------------------------------------------------------------- submitting

    def _require_open(self, kind: str) -> None:
        if not self._is_open or self._job != meeting.current_job():
            raise ShutDownError(
                f"{kind} of {self._title}: the group is gone, by destroy_process_group() or with its job; make another "
                "one with init_process_group() or new_group()"
            )

    def _submit(
        self,
        kind: str,
        core: OpKind,
        signature: Hashable,
        inputs: Sequence[View],
        outputs: Sequence[View] = (),
        op: ReduceOp = ReduceOp.Sum,
        root: int = 0,
        splits: Sequence[int] = (),
        opts: Any = None,
        arrays: Any = None,
        results: Any = None,
        finish: Callable[[_core.Handle], None] | None = None,
        delivers: bool = True,
        prepared: Callable[[Call, int, str], _core.Handle | None] | None = None,
        detail: str = "",
    ) -> Work:
        """The Work of one operation of all ranks of the group. `finish` gets its handle when it is done.

        `delivers`: `finish` writes the results, so they must arrive also where nobody waits. `prepared` submits a call
        that comes again, given the number of its signature and its title, or returns None if it cannot. `detail`: what
        else messages say of it.
        """
        self._require_open(kind)
        require_one_place((*inputs, *outputs), f"{kind} of {self._title}")
        with self._lock:
            number = self._names.number_of((kind, signature, op, root))
            is_repeated = self._names.upcoming().kind == kind
            call = self._names.advance(kind, number)
            call.prepared = None
            title = f"{kind} #{self._names.calls} of {self._title}{detail}"
            handle = prepared(call, number, title) if is_repeated and prepared is not None else None
            if handle is None:
                operation = _core.Operation(core, call.name, self._set, op, root)
                handle = submitted(operation, inputs, outputs, splits, _is_awaited(opts), title)
        then = None if finish is None else functools.partial(finish, handle)
        work = Work(
            title,
            (handle,),
            arrays,
            results,
            then,
            self._timeout_of(opts),
            order_of(inputs[0]) if inputs else None,
        )
        if finish is not None and delivers:
            self._let_settle(work, opts)
        return self._noted(work)

    def _let_settle(self, work: Work, opts: Any) -> Work:
        """Has a Work whose results need a copy make them, unless its caller waits for it now.

        A barrier waits until they are made.
        """
        if not _is_awaited(opts):
            with self._lock:
                self._settling_alone.add(work)
            work.settle_alone()
        return work

    def _noted(self, work: Work) -> Work:
        """For torch's coalescing, within which one Work joins those of all calls."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _timeout_of(self, opts: Any) -> float:
        given = getattr(opts, "timeout", None)
        if given == _NO_TIMEOUT:
            return self._timeout_s
        seconds = given.total_seconds() if isinstance(given, timedelta) else -1.0
        return seconds if seconds > 0 else self._timeout_s

    def _join(self, works: list[Work], results: Any) -> Work:
        """One Work of several."""
        handles = [handle for work in works for handle in work._handles]

        def finish() -> None:
            for work in works:
                work.wait()

        longest = max((work._timeout_s for work in works), default=self._timeout_s)
        title = works[0]._title if works else f"nothing of {self._title}"
        order = next((work._order.again() for work in works if work._order is not None), None)
        return Work(title, handles, works, results, finish, longest, order)

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return self._join(works, [])

    # ------------------------------------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        caller = asking(sys._getframe().f_back)
        is_one = type(opts) is _AllreduceOptions and len(tensors) == 1 and self._coalesced is None
        detail = self._buckets.detail(tensors[0], caller) if is_one and is_called_by_backward(caller) else ""
        if _profiler_enabled():
            return self._allreduce_shown(tensors, opts, detail)
        if is_one:
            forgets_work = caller is not None and caller.f_code is _all_reduce_code
            work = self._allreduce_again(tensors, opts, detail, forgets_work)
            if work is not None:
                return work
        return self._allreduce("all_reduce", list_of(tensors), opts, detail)

    @shown_in_profiles("all_reduce", 0)
    def _allreduce_shown(self, tensors: Any, opts: Any, detail: str) -> Work:
        return self._allreduce("all_reduce", list_of(tensors), opts, detail)

    def _allreduce_again(self, tensors: list[Tensor], opts: Any, detail: str, forgets_work: bool) -> Work | None:
        """As _allreduce, of one tensor that was prepared, in a fraction of the time. None of any other.

        `forgets_work`: the caller does nothing with the Work of an operation that it waits for but to wait.
        """
        if not self._is_open or self._job != meeting.current_job():
            return None
        with self._lock:
            names = self._names
            prepared: Prepared | None = names.upcoming().prepared
            if prepared is None or hash(opts.reduceOp) != prepared.op:
                return None
            title = f"all_reduce #{names.calls + 1} of {self._title}{detail}"
            # On a GPU other streams may wait for a Work that is kept.
            needs_handle = opts.asyncOp or (prepared.device is not None and not forgets_work)
            begun = prepared.submit(tensors[0], needs_handle, title)
            if begun is False:
                return None
            names.advance("all_reduce", prepared.signature)
        timeout_s = self._timeout_of(opts)
        handle = prepared.run(timeout_s) if begun is True else begun
        if handle is None:
            return _DONE if forgets_work else Work.done(tensors)
        return Work(title, (handle,), tensors, tensors, None, timeout_s, prepared.order_of(handle))

    @shown_in_profiles("all_reduce", 0)
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self._allreduce("all_reduce", list_of(tensors), opts)

    def _allreduce(self, kind: str, tensors: list[Tensor], opts: Any, detail: str = "") -> Work:
        op = op_of(opts)
        if any(tensor.layout is torch.sparse_coo for tensor in tensors):
            return self._join([self._allreduce_sparse(tensor, op, opts) for tensor in tensors], tensors)
        if needs_all_values(op, tensors):
            works = [self._reduce_bitwise(kind, tensor, op, opts) for tensor in tensors]
            return self._join(works, tensors)
        memory = [contiguous(tensor, kind) for tensor in tensors]
        views = [view_of(one, kind) for one in memory]
        reduction = reduction_of(op, tensors, kind)
        signature = tuple(view[1:3] for view in views)
        finish = copies_back(tensors, memory)
        again = None
        if len(views) == 1 and finish is None:
            again = functools.partial(prepare, tensors[0], views[0], self._set, reduction, op)
        return self._submit(
            *(kind, OpKind.ALLREDUCE, signature, views, views, reduction),
            opts=opts,
            arrays=memory,
            results=tensors,
            finish=finish,
            prepared=again,
            detail=detail,
        )

    def _reduce_bitwise(self, kind: str, tensor: Tensor, op: Any, opts: Any) -> Work:
        """The engine has no such reduction, so all ranks get all values and reduce them."""
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            raise TypeError(f"{kind} of {self._title}: {op.name} is for integers and bool, not for {tensor.dtype}")
        require_writable([tensor])
        gathered = torch.empty((self._size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)

        def finish(_: _core.Handle) -> None:
            assign(tensor, functools.reduce(BITWISE[op], gathered.unbind(0)))

        return self._gather_into(kind, gathered, tensor, opts, tensor, finish, (op,))

    def _allreduce_sparse(self, tensor: Tensor, op: Any, opts: Any) -> Work:
        if op != RedOp.SUM:
            raise TypeError(f"all_reduce of {self._title}: sparse tensors have SUM alone, not {op.name}")
        require_indices(f"all_reduce of {self._title}", tensor)
        own = coalesced(tensor.detach())
        indices, values = own.indices().t().contiguous(), own.values().contiguous()
        all_indices = self._gather_rows("all_reduce", indices, opts)
        all_values = self._gather_rows("all_reduce", values, opts)

        def finish() -> None:
            of_indices, of_values = (
                gathered_rows(all_indices._handles[0], indices),
                gathered_rows(all_values._handles[0], values),
            )
            with torch.no_grad():
                tensor.copy_(sum_sparse(of_indices.t(), of_values, tensor.shape))

        handles = [*all_indices._handles, *all_values._handles]
        arrays = (indices, values)
        order = None if all_values._order is None else all_values._order.again()
        work = Work(all_values._title, handles, arrays, [tensor], finish, all_values._timeout_s, order)
        return self._let_settle(work, opts)

    def _gather_rows(self, kind: str, rows: Tensor, opts: Any) -> Work:
        """Gathers from each rank as many rows as it has."""
        view = view_of(rows, kind, tuple(rows.shape))
        return self._submit(kind, OpKind.ALLGATHER, (view[1], view[2][1:], "rows"), [view], opts=opts, arrays=rows)

    @shown_in_profiles("reduce", 0)
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> Work:
        """Only the root's tensor changes."""
        given = list_of(tensors)
        root, op = (opts.rootRank, op_of(opts)) if hasattr(opts, "rootRank") else (int(opts or 0), op_of(op))
        place = meeting.place(self._ranks, root)
        if root != self._rank:
            given = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in given]
        if needs_all_values(op, given):
            return self._join([self._reduce_bitwise("reduce", tensor, op, opts) for tensor in given], given)
        memory = [contiguous(tensor, "reduce") for tensor in given]
        views = [view_of(one, "reduce") for one in memory]
        signature = (place, *(view[1:3] for view in views))
        return self._submit(
            *("reduce", OpKind.ALLREDUCE, signature, views, views, reduction_of(op, given, "reduce")),
            root=place,  # compared only: all ranks have the sums
            opts=opts,
            arrays=memory,
            results=given,
            finish=copies_back(given, memory),
        )

    @shown_in_profiles("reduce_scatter", 1)
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        outputs = list_of(outputs)
        inputs = inputs if inputs and not isinstance(inputs[0], Tensor) else [inputs]
        works = []
        for output, parts in zip(outputs, inputs, strict=True):
            if any(part.dtype != output.dtype for part in parts):
                raise TypeError(f"reduce_scatter of {self._title}: inputs and output have different dtypes")
            if len(parts) != self._size or any(part.numel() != output.numel() for part in parts):
                raise ValueError(
                    f"reduce_scatter of {self._title}: {self._size} tensors of {output.numel()} elements are needed, "
                    f"one for each rank, not {[tuple(part.shape) for part in parts]}"
                )
            together = torch.cat([part.detach().reshape(-1) for part in parts])
            works.append(self._reduce_scatter_into("reduce_scatter", output, together, opts))
        return works[0] if len(works) == 1 else self._join(works, outputs)

    @shown_in_profiles("reduce_scatter", 1)
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter_into("reduce_scatter_tensor", output, input, opts)

    _reduce_scatter_base = reduce_scatter_single

    @shown_in_profiles("reduce_scatter", 1)
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._join(
            [
                self._reduce_scatter_into("reduce_scatter_tensor", output, given, opts)
                for output, given in zip(outputs, inputs, strict=True)
            ],
            outputs,
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter_into(self, kind: str, output: Tensor, given: Tensor, opts: Any) -> Work:
        op = op_of(opts)
        self._require_fitting(kind, given, output, "input", "output")
        if needs_all_values(op, [given]):
            own = given.detach().reshape(self._size, -1).clone()
            whole = self._reduce_bitwise(kind, own, op, opts)

            def take_part() -> None:
                whole.wait()
                assign(output, own[self._rank].reshape(output.shape))

            order = None if whole._order is None else whole._order.again()
            work = Work(whole._title, whole._handles, whole, [output], take_part, whole._timeout_s, order)
            return self._let_settle(work, opts)
        source = contiguous(given, kind)
        target = contiguous(output, kind)
        out = view_of(target, kind)
        view = view_of(source, kind, (self._size, *out[2]))
        return self._submit(
            *(kind, OpKind.REDUCESCATTER, view[1:3], [view], [out], reduction_of(op, [given], kind)),
            opts=opts,
            arrays=(source, target),
            results=[output],
            finish=copies_back([output], [target]),
        )

    # ------------------------------------------------------------------------------------------- moving values

    @shown_in_profiles("broadcast", 0)
    def broadcast(self, tensors: Any, opts: Any = None, root: int = 0, timeout: timedelta | None = None) -> Work:
        given = list_of(tensors)
        source = opts.rootRank if hasattr(opts, "rootRank") else int(root if opts is None else opts)
        place = meeting.place(self._ranks, source)
        memory = [contiguous(tensor, "broadcast") for tensor in given]
        views = [bytes_view_of(one, "broadcast") for one in memory]
        return self._submit(
            *("broadcast", OpKind.BROADCAST, tuple(view[1:3] for view in views), views, views),
            root=place,
            opts=opts,
            arrays=memory,
            results=given,
            finish=None if source == self._rank else copies_back(given, memory),
        )

    @shown_in_profiles("all_gather", 1)
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        inputs = list_of(inputs)
        self._buckets.note(asking(sys._getframe(1)))
        outputs = outputs if outputs and not isinstance(outputs[0], Tensor) else [outputs]
        works = [
            self._gather_list("all_gather", targets, given, opts)
            for targets, given in zip(outputs, inputs, strict=True)
        ]
        return works[0] if len(works) == 1 else self._join(works, outputs)

    @shown_in_profiles("all_gather", 1)
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """`outputs` has a list for each rank, with a tensor for each input."""
        works = [
            self._gather_list("all_gather_coalesced", [of_rank[i] for of_rank in outputs], given, opts)
            for i, given in enumerate(inputs)
        ]
        return self._join(works, outputs)

    def _gather_list(self, kind: str, outputs: list[Tensor], given: Tensor, opts: Any) -> Work:
        if len(outputs) != self._size:
            raise ValueError(f"{kind} of {self._title}: {self._size} outputs are needed, not {len(outputs)}")
        if any(output.dtype != given.dtype for output in outputs):
            raise TypeError(f"{kind} of {self._title}: input and outputs have different dtypes")
        if outputs[self._rank].numel() != given.numel():
            raise ValueError(
                f"{kind} of {self._title}: the input has shape {tuple(given.shape)}, its place in the outputs "
                f"{tuple(outputs[self._rank].shape)}"
            )
        require_writable(outputs)
        counts = [output.numel() for output in outputs]
        if len(set(counts)) > 1:
            return self._gather_uneven(kind, outputs, given, opts)
        gathered = torch.empty(self._size * given.numel(), dtype=given.dtype, device=given.device)

        def finish(_: _core.Handle) -> None:
            for output, values in zip(outputs, gathered.split(counts), strict=True):
                assign(output, values.reshape(output.shape))

        return self._gather_into(kind, gathered, given, opts, outputs, finish)

    def _gather_uneven(self, kind: str, outputs: list[Tensor], given: Tensor, opts: Any) -> Work:
        source = contiguous(given, kind)
        view = bytes_view_of(source, kind)

        def finish(handle: _core.Handle) -> None:
            deliver(kind, outputs, handle, given)

        return self._submit(
            *(kind, OpKind.ALLGATHER, (view[1], "uneven"), [view]),
            opts=opts,
            arrays=source,
            results=outputs,
            finish=finish,
        )

    @shown_in_profiles("all_gather", 1)
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        self._require_fitting("all_gather_into_tensor", output, input, "output", "input")
        target = contiguous(output, "all_gather_into_tensor")
        finish = copies_back([output], [target])
        return self._gather_into("all_gather_into_tensor", target, input, opts, [output], finish)

    _allgather_base = all_gather_single

    @shown_in_profiles("all_gather", 1)
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        works = [self.all_gather_single(output, given, opts) for output, given in zip(outputs, inputs, strict=True)]
        return self._join(works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_into(
        self,
        kind: str,
        target: Tensor,
        given: Tensor,
        opts: Any,
        results: Any,
        finish: Callable[[_core.Handle], None] | None,
        signature: tuple[Hashable, ...] = (),
    ) -> Work:
        """`target` is contiguous. One row for each rank, so that ranks with different ones are told."""
        source = contiguous(given, kind)
        view = bytes_view_of(source, kind)
        return self._submit(
            *(kind, OpKind.ALLGATHER, (*view[1:3], *signature), [with_shape(view, (1, *view[2]))]),
            outputs=[bytes_view_of(target, kind)],
            opts=opts,
            arrays=(source, target),
            results=results,
            finish=finish,
        )

    @shown_in_profiles("gather", 1)
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        given = list_of(inputs)[0]
        root = opts.rootRank if hasattr(opts, "rootRank") else int(opts or 0)
        meeting.place(self._ranks, root)
        targets: list[Tensor] = []
        if root == self._rank:
            targets = list(outputs if isinstance(outputs[0], Tensor) else outputs[0])
            self._require_list("gather", targets, given)
        splits = [given.numel() if one == root else 0 for one in range(self._size)]
        return self._exchange("gather", (root,), [given.detach().reshape(-1)], splits, targets, given, opts)

    @shown_in_profiles("scatter", 1)
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        target = list_of(outputs)[0]
        root = opts.rootRank if hasattr(opts, "rootRank") else int(opts or 0)
        meeting.place(self._ranks, root)
        sent = [nothing_of(target)]
        splits = [0] * self._size
        if root == self._rank:
            parts = list(inputs if isinstance(inputs[0], Tensor) else inputs[0])
            self._require_list("scatter", parts, target)
            sent = [part.detach().reshape(-1) for part in parts]
            splits = [part.numel() for part in parts]
        targets = [target if one == root else nothing_of(target) for one in range(self._size)]
        into = target if contiguous(target, "scatter") is target else None
        return self._exchange("scatter", (root,), sent, splits, targets, target, opts, results=[target], into=into)

    def _require_list(self, kind: str, tensors: list[Tensor], like: Tensor) -> None:
        if len(tensors) != self._size or any(tensor.numel() != like.numel() for tensor in tensors):
            raise ValueError(
                f"{kind} of {self._title}: {self._size} tensors of shape {tuple(like.shape)} are needed, one for each "
                f"rank, not {[tuple(tensor.shape) for tensor in tensors]}"
            )
        if any(tensor.dtype != like.dtype for tensor in tensors):
            raise TypeError(f"{kind} of {self._title}: input and outputs have different dtypes")

    @shown_in_profiles("all_to_all", 1)
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        outputs, inputs = list(outputs), list(inputs)
        if len(outputs) != self._size or len(inputs) != self._size:
            raise ValueError(
                f"all_to_all of {self._title}: {self._size} inputs and outputs are needed, not {len(inputs)} and "
                f"{len(outputs)}"
            )
        if len({one.dtype for one in (*inputs, *outputs)}) > 1:
            raise TypeError(f"all_to_all of {self._title}: inputs and outputs have different dtypes")
        sent = [one.detach().reshape(-1) for one in inputs]
        splits = [one.numel() for one in inputs]
        return self._exchange("all_to_all", (), sent, splits, outputs, inputs[0], opts)

    @shown_in_profiles("all_to_all", 1)
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        kind = "all_to_all_single"
        sent = self._splits_of(kind, input, input_splits, "input")
        received = self._splits_of(kind, output, output_splits, "output")
        row = math.prod(input.shape[1:])
        if row != math.prod(output.shape[1:]):
            raise ValueError(
                f"{kind} of {self._title}: rows of the input have shape {tuple(input.shape[1:])}, those of the output "
                f"{tuple(output.shape[1:])}"
            )
        target = contiguous(output, kind)
        parts = list(target.detach().reshape(-1).split([count * row for count in received]))
        copy = copies_back([output], [target])
        splits = [count * row for count in sent]
        sent_rows = [input.detach().reshape(-1)]
        return self._exchange(kind, (), sent_rows, splits, parts, input, opts, [output], copy, target)

    alltoall_base = all_to_all_single

    def _splits_of(self, kind: str, tensor: Tensor, splits: Sequence[int], what: str) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self._size:
                raise ValueError(
                    f"{kind} of {self._title}: {rows} rows of the {what} cannot be split evenly over {self._size} ranks"
                )
            return [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows or min(splits) < 0:
            raise ValueError(
                f"{kind} of {self._title}: the {what} splits {list(splits)} must be {self._size} numbers that add up "
                f"to its {rows} rows"
            )
        return list(splits)

    def _exchange(
        self,
        kind: str,
        signature: tuple[Hashable, ...],
        sent: list[Tensor],
        splits: list[int],
        targets: list[Tensor],
        like: Tensor,
        opts: Any,
        results: Any = None,
        then: Callable[[_core.Handle], None] | None = None,
        into: Tensor | None = None,
    ) -> Work:
        """Elements go to the ranks by `splits`, and those that come go to `targets`, one for each rank or none.

        `into` has the memory of all targets, one after the other. The engine writes there, unless it is the input's.
        """
        require_writable(targets)
        together = sent[0] if len(sent) == 1 else torch.cat(sent)
        source = contiguous(together, kind)
        view = bytes_view_of(source, kind)
        (count,) = view[2]
        factor = count // together.numel() if together.numel() else elements_of(like)
        expected = [target.numel() * factor for target in targets] if targets else [0] * self._size
        is_apart = into is not None and not shares_memory(into, source)
        outputs = [bytes_view_of(into, kind)] if into is not None and is_apart else []

        def finish(handle: _core.Handle) -> None:
            received = handle.received_splits()
            if received != expected:
                raise ValueError(
                    f"{kind} of {self._title}: the ranks sent {[one // factor for one in received]} elements, but this "
                    f"rank has room for {[one // factor for one in expected]}"
                )
            if targets and not outputs:
                deliver(kind, targets, handle, like)
            if then is not None:
                then(handle)

        return self._submit(
            *(kind, OpKind.ALLTOALL, (view[1], *signature), [view]),
            outputs=outputs,
            splits=[split * factor for split in splits],
            opts=opts,
            arrays=(source, targets),
            results=targets if results is None else results,
            finish=finish,
            delivers=then is not None or (bool(targets) and not outputs),
        )

    def _require_fitting(self, kind: str, large: Tensor, small: Tensor, of_large: str, of_small: str) -> None:
        if large.dtype != small.dtype:
            raise TypeError(f"{kind} of {self._title}: the {of_large} is {large.dtype}, the {of_small} {small.dtype}")
        if large.numel() != small.numel() * self._size:
            raise ValueError(
                f"{kind} of {self._title}: the {of_large} has {large.numel()} elements, which is not {self._size} "
                f"times the {small.numel()} of the {of_small}"
            )

    # ---------------------------------------------------------------------------------------------- synchronizing

    @shown_in_profiles("barrier", -1)
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        with self._lock:
            before = [work for work in self._settling_alone if not work._is_done]
        work = self._submit("barrier", OpKind.BARRIER, (), [], opts=opts, results=[])
        return self._join([work, *before], []) if before else work

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that tells which ranks did not come, through torch's store, in the words of gloo.

        Args:
            timeout: by default that of the group.
            wait_all_ranks: wait for every rank before the error names all that are missing, instead of the first.

        Raises:
            StalledError: ranks did not come within the timeout.
        """
        self._require_open("monitored_barrier")
        self._barriers += 1
        seconds = self._timeout_s if timeout is None else seconds_of(timeout)
        prefix = f"ringtrain/monitored_barrier/{self._set}/{self._barriers}"  # groups of one name may share a store
        said = missing_at(self._store, prefix, self._rank, self._size, seconds, wait_all_ranks, self._title)
        if said:
            raise StalledError(said)

    # ---------------------------------------------------------------------------------------------- point to point

    @shown_in_profiles("send", 0)
    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        (tensor,) = self._one_of("send", tensors)
        place = meeting.place(self._ranks, dst)
        awaited = _is_awaited_message()
        return self._noted(self._transfers.send(tensor, place, tag, self._title, self._timeout_s, awaited))

    @shown_in_profiles("recv", 0)
    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        (tensor,) = self._one_of("recv", tensors)
        place = meeting.place(self._ranks, src)
        awaited = _is_awaited_message()
        return self._noted(self._transfers.receive(tensor, place, tag, self._title, self._timeout_s, awaited))

    @shown_in_profiles("recvAnySource", 0)
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        (tensor,) = self._one_of("recv", tensors)
        awaited = _is_awaited_message()
        return self._noted(
            self._transfers.receive(tensor, _core.ANY_SOURCE, tag, self._title, self._timeout_s, awaited)
        )

    def _one_of(self, kind: str, tensors: Any) -> list[Tensor]:
        given: list[Tensor] = list_of(tensors)
        if len(given) != 1:
            raise ValueError(f"{kind} of {self._title}: one tensor at a time, not {len(given)}")
        self._require_open(kind)
        return given
