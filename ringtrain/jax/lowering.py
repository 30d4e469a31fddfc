"""The operations inside a compiled program: a call of the core for each array, and one that waits for all of them.

Starting an operation never waits, so that each array is on its way as soon as it has its values. XLA may carry out
the calls of a program in any order, and in a small one does so one after the other, waiting in each. So where the
script calls several operations of which none needs another one's result, all of them start before the program waits for
any: then the ranks need not have them in the same order.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

import ringtrain._core as _core
from ringtrain._core import OpKind
from ringtrain.engine.process_sets import global_process_set
from ringtrain.jax import private, waits
from ringtrain.jax.ffi import ffi_lowering
from ringtrain.jax.primitives import (
    KINDS,
    How,
    Names,
    at_trace,
    barrier_p,
    replicated_p,
    report_differences_p,
    require_finite_p,
)
from ringtrain.jax.regions import TICKET, UNCACHED, Place, Typed, is_in_main, register_regions, scope_of
from ringtrain.jax.transfers import Ends, exchange_p
from ringtrain.job import session

# --------------------------------------------------------------------------------------------------- the end of the job
# Programs of JAX that are still under way may need the other ranks, and these may need this one.

# How long computations of JAX may go on before this rank leaves.
_LONGEST_S = 5.0
_PAUSE_S = 0.002


def _let_programs_end() -> None:
    """Programs that have not begun yet, too. If the engine has failed, they fail as well, and at once.

    No thread waits here: one that was still within jaxlib at the end of Python would end the process with an error.
    """
    deadline = time.monotonic() + _LONGEST_S
    for array in jax.live_arrays():
        with contextlib.suppress(RuntimeError):  # it was donated meanwhile
            while not array.is_ready() and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
    _core.wait_for_xla(max(0.0, deadline - time.monotonic()))


# ----------------------------------------------------------------------------------------------------------- operations

_IN_PLACE = (OpKind.ALLREDUCE, OpKind.BROADCAST)
# The rank of a message that is not there.
_NOWHERE = -1


# Whether a program was compiled that is right for the ranks of this generation only.
_is_for_these_ranks = False


def register() -> None:
    session.at_init(lambda _settings: _forget_programs())
    session.at_shutdown(_let_programs_end)
    for primitive, kind in KINDS.items():
        _register(primitive, _lowering_of(kind))
    _register(barrier_p, _lower_barrier)
    _register(require_finite_p, _lower_require_finite)
    _register(report_differences_p, _lower_report_differences)
    mlir.register_lowering(replicated_p, lambda ctx, *operands, names, how: operands)
    mlir.register_lowering(exchange_p, _lower_exchange, platform="cpu", **UNCACHED)
    mlir.register_lowering(exchange_p, _refuse_exchange, **UNCACHED)
    at_trace.append(register_regions([*KINDS, barrier_p, exchange_p], [exchange_p], _Program.of))


def _forget_programs() -> None:
    """There may be other ranks than before."""
    global _is_for_these_ranks
    if _is_for_these_ranks:
        jax.clear_caches()
    _is_for_these_ranks = False


def _note_ranks(kind: OpKind | None, how: How | None) -> None:
    global _is_for_these_ranks
    is_for_any = (
        kind in (*_IN_PLACE, OpKind.BARRIER)
        and how is not None
        and how.process_set is global_process_set
        and not how.is_alone
    )
    _is_for_these_ranks |= not is_for_any


def _register(primitive: Primitive, rule: Callable[..., Any]) -> None:
    # Each call gets a name of its own, so one must not be taken for another one.
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, rule, platform=platform, **UNCACHED)
    mlir.register_lowering(primitive, _refuse, **UNCACHED)


def _refuse(ctx: Any, *operands: Any, **params: Any) -> Any:
    raise NotImplementedError(
        "ringtrain.jax works inside jit on CPUs and on NVIDIA's GPUs. On another device put the operation between two "
        "jitted functions, or have JAX compute on CPUs: JAX_PLATFORMS=cpu"
    )


def _refuse_exchange(ctx: Any, *operands: Any, ends: Ends) -> Any:
    raise NotImplementedError(
        "send, recv and sendrecv work inside jit on CPUs only. On another device call them between two jitted functions"
    )


class _Operation(NamedTuple):
    """One that is in the program, or a loop or condition with operations in it, which has no ticket."""

    place: Place
    tickets: list[Any]
    given: frozenset[str] = frozenset()  # names of its arrays, if the script names it
    scope: Any = None  # of regions.scope_of: operations in one may be under way at the same time
    is_message: bool = False

    @property
    def finish(self) -> Any:
        return self.place.mark


class _Program:
    """The state of a program while it is built. It is kept with what JAX itself keeps meanwhile."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.operations: list[_Operation] = []

    @staticmethod
    def of(ctx: Any) -> _Program:
        program: _Program = private.kept_with_program(ctx).setdefault(_Program, _Program())
        return program

    def note_region(self, place: Place) -> None:
        self.operations.append(_Operation(place, []))

    def here(self) -> list[_Operation]:
        """Returns the operations of the block that is compiled now."""
        block = ir.InsertionPoint.current.block
        return [one for one in self.operations if one.place.block == block]

    def places(self) -> list[Place]:
        """Returns the places of this block from its last loop or condition on, which follows all before it."""
        here = self.here()
        last = max((number for number, one in enumerate(here) if not one.tickets), default=0)
        return [one.place for one in here[last:]]

    def tickets_before(self, is_message: bool = False) -> list[Any]:
        """Returns those of this block that an operation starts after, in the order of the script.

        A message starts after all operations before it, and all operations after the messages before them: the other
        rank, whose program is another one, relies on that order.
        """
        tickets: list[Any] = []
        for one in reversed(self.here()):
            if one.is_message:
                return [*tickets, one.tickets[-1]]
            if not one.tickets:
                break
            tickets += one.tickets * is_message
        return tickets

    def base_name(self, names: Names) -> str:
        """Numbered by their order in the program, not in the process: some rank may have compiled more programs.

        A name that the script gives is numbered from its second use on, such as by a function that is called again.
        """
        if names.given is not None:
            own = _given(names)
            scope = scope_of(ir.InsertionPoint.current.block)
            beside = [one for one in self.operations if _is_same(one.scope, scope)]
            uses = sum(not own.isdisjoint(one.given) for one in beside)
            return f"{names.given}#{uses}" if uses else names.given
        place = names.place.rpartition("/")[2] or "operation"
        number = self.names[place]
        self.names[place] += 1
        return f"{place}#{number}"


def _is_same(block: Any, other: Any) -> bool:
    """MLIR compares blocks with blocks only."""
    return block is other if block is None or other is None else bool(block == other)


def _given(names: Names) -> frozenset[str]:
    return frozenset() if names.given is None else frozenset(names.given + part for part in names.parts)


def _lowering_of(kind: OpKind) -> Callable[..., Any]:
    def lower(ctx: Any, *operands: Any, names: Names, how: How) -> Any:
        is_per_device = _is_per_device(ctx)
        _note_ranks(kind, how)
        arrays, weight = how.split(operands)
        if how.is_alone:
            return arrays
        program = _Program.of(ctx)
        base = program.base_name(names)
        weights = [Typed(value, ctx.avals_in[-1]) for value in weight]
        ctx = ctx.replace(avals_in=ctx.avals_in[: len(arrays)])
        with _before_earlier_finishes(program, operands, program.tickets_before()) as independent:
            values, tickets = [], []
            for place, (array, part) in enumerate(zip(arrays, names.parts, strict=True)):
                attributes = {
                    **_attributes(kind, names, how),
                    "name": base + part,
                    "priority": np.int64(how.priorities[place] if how.priorities else 0),
                    "is_awaited": np.int64(len(arrays) == 1),
                    "is_per_device": np.int64(is_per_device),
                }
                given = Typed(array, ctx.avals_in[place])
                value, ticket = _start(ctx, kind, given, attributes, [*weights, *independent.ends()])
                values.append(value)
                tickets.append(ticket)
            independent.wait_for(tickets)
        own_names = [base + part for part in names.parts]
        return _finish(ctx, kind, program, values, _Started(tickets, own_names, how, _given(names)), independent)

    return lower


def _lower_barrier(ctx: Any, *operands: Any, names: Names, how: How) -> Any:
    is_per_device = _is_per_device(ctx)
    _note_ranks(OpKind.BARRIER, how)
    if how.is_alone:
        return operands
    program = _Program.of(ctx)
    name = program.base_name(names)
    attributes = {
        **_attributes(OpKind.BARRIER, names, how),
        "name": name,
        "priority": np.int64(0),
        "is_awaited": np.int64(1),
        "is_per_device": np.int64(is_per_device),
    }
    with _before_earlier_finishes(program, operands, program.tickets_before()) as independent:
        call = ffi_lowering("ringtrain_start", has_side_effect=True)
        ends = independent.ends()
        avals_in = [*ctx.avals_in, *(end.aval for end in ends)]
        values = (*operands, *(end.value for end in ends))
        (ticket,) = call(ctx.replace(avals_in=avals_in, avals_out=[TICKET]), *values, **attributes)
        independent.wait_for([ticket])
    return _finish(
        ctx, OpKind.BARRIER, program, list(operands), _Started([ticket], [name], how, _given(names)), independent
    )


def _lower_exchange(ctx: Any, *operands: Any, ends: Ends) -> Any:
    _require_one_device(ctx)
    _note_ranks(OpKind.TRANSFER, None)
    waits.watcher.start()
    if not is_in_main(ir.InsertionPoint.current.block):
        raise NotImplementedError(
            "send, recv and sendrecv have no place in the order of the program inside a function that XLA may call at "
            f"several places: call them outside ({ends.place})"
        )
    program = _Program.of(ctx)
    sent, like = ends.split(operands)
    avals, of_like = ends.split(ctx.avals_in)
    if ends.source is None and ends.dest is None:
        return like
    sent, avals = (sent, avals) if ends.dest is not None else ([], [])
    of_received = of_like if ends.source is not None else []
    with _before_earlier_finishes(program, sent, program.tickets_before(is_message=True)) as independent:
        before = independent.ends()
        call = ffi_lowering("ringtrain_start", has_side_effect=True)
        context = ctx.replace(avals_in=[*avals, *(one.aval for one in before)], avals_out=[*of_received, TICKET])
        *received, ticket = call(
            context,
            *(*sent, *(one.value for one in before)),
            kind=np.int64(OpKind.TRANSFER.value),
            process_set=np.int64(ends.process_set.process_set_id or 0),
            source=np.int64(_NOWHERE if ends.source is None else ends.source),
            dest=np.int64(_NOWHERE if ends.dest is None else ends.dest),
            sendtag=np.int64(ends.sendtag),
            recvtag=np.int64(ends.recvtag),
            sent=np.int64(len(sent)),
            site=ends.place,
        )
        independent.wait_for([ticket])
    # The arrays to send stay until then. The ticket is a result, as a mark where nothing is received.
    values, typed = [*received, ticket], [*of_received, TICKET]
    others = [*independent.tickets(), ticket]
    call = ffi_lowering(
        "ringtrain_finish", has_side_effect=True, operand_output_aliases={place: place for place in range(len(values))}
    )
    results = call(
        ctx.replace(avals_in=[*typed, TICKET, *avals, *([TICKET] * len(others))], avals_out=typed),
        *(*values, ticket, *sent, *others),
        kind=np.int64(OpKind.TRANSFER.value),
        tickets=np.int64(1),
    )
    end = Typed(results[-1], TICKET)
    place = Place(end.value.owner, ir.InsertionPoint.current.block, [end])
    program.operations.append(_Operation(place, [ticket], scope=scope_of(place.block), is_message=True))
    return results[:-1] if ends.source is not None else like


def _attributes(kind: OpKind, names: Names, how: How) -> dict[str, Any]:
    return {
        "kind": np.int64(kind.value),
        "op": np.int64(how.op.value),
        "root": np.int64(how.root),
        "process_set": _number_of(how),
        "prescale": np.float64(how.prescale),
        "postscale": np.float64(how.postscale),
        "splits": ",".join(map(str, how.sent)),
        "codes": how.quantization.codes if how.quantization else "",
        "threshold": np.float64(how.quantization.threshold if how.quantization else 0.0),
        "site": names.place,
        "is_weighted": np.int64(how.is_weighted),
    }


def _number_of(how: How) -> Any:
    return np.int64(how.process_set.process_set_id or 0)


class _Started(NamedTuple):
    """The purpose of one `_finish`. On a GPU no host can read a ticket, so started operations are found by name."""

    tickets: list[Any]
    names: list[str]
    how: How
    given: frozenset[str]

    def names_in_one(self) -> str:
        """Each behind its length in bytes and a colon."""
        return "".join(f"{len(name.encode())}:{name}" for name in self.names)


def _start(ctx: Any, kind: OpKind, given: Typed, attributes: dict[str, Any], more: Sequence[Typed]) -> tuple[Any, Any]:
    """Returns the array to finish, and its ticket. An array that is only read stays until then.

    `more`: the weight, if there is one, and the ends that come before.
    """
    avals_in, values = [given.aval, *(one.aval for one in more)], [given.value, *(one.value for one in more)]
    if kind in _IN_PLACE:
        call = ffi_lowering("ringtrain_start", has_side_effect=True, operand_output_aliases={0: 0})
        value, ticket = call(ctx.replace(avals_in=avals_in, avals_out=[given.aval, TICKET]), *values, **attributes)
        return value, ticket
    call = ffi_lowering("ringtrain_start", has_side_effect=True)
    (ticket,) = call(ctx.replace(avals_in=avals_in, avals_out=[TICKET]), *values, **attributes)
    return given.value, ticket


def _finish(
    ctx: Any, kind: OpKind, program: _Program, values: list[Any], started: _Started, independent: _Independent
) -> Any:
    tickets = started.tickets
    # The last ticket is there twice: in the place of the second another one can be put later.
    others = [*independent.tickets(), tickets[-1]]
    is_in_place = kind in (*_IN_PLACE, OpKind.BARRIER)
    aliases = {place: place for place in range(len(values))} if is_in_place else {}
    call = ffi_lowering("ringtrain_finish", has_side_effect=True, operand_output_aliases=aliases)
    words = [TICKET] * (len(tickets) + len(others))
    results = call(
        ctx.replace(avals_in=[*ctx.avals_in, *words]),
        *(*values, *tickets, *others),
        kind=np.int64(kind.value),
        tickets=np.int64(len(tickets)),
        names=started.names_in_one(),
        process_set=_number_of(started.how),
    )
    end = Typed(results[0], ctx.avals_out[0])
    place = Place(results[0].owner, ir.InsertionPoint.current.block, [end])
    program.operations.append(_Operation(place, tickets, started.given, scope_of(place.block)))
    return results


class _Independent:
    """Within it, what starts an operation is put before whatever waits for others that it does not need."""

    def __init__(self, operations: list[_Operation], region: _Operation | None, starts: Sequence[Any]):
        self._operations = operations
        self._region = region
        self._starts = [Typed(ticket, TICKET) for ticket in starts]
        self._place = ir.InsertionPoint(operations[0].finish) if operations else None

    def __enter__(self) -> _Independent:
        if self._place is not None:
            self._place.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._place is not None:
            self._place.__exit__(*error)

    def wait_for(self, tickets: list[Any]) -> None:
        """Makes all of these operations finish only after those with these tickets were started."""
        for operation in self._operations:
            operands = operation.finish.operands
            last = len(operands) - 1
            joined = operands[last]
            with ir.InsertionPoint(operation.finish):
                for ticket in tickets:
                    joined = stablehlo.or_(joined, ticket)
            operands[last] = joined

    def ends(self) -> list[Typed]:
        """Returns what it must wait for before it starts: starts, and the end of the loop, or condition, before it."""
        return [*self._starts, *(self._region.place.ends if self._region else [])]

    def tickets(self) -> list[Any]:
        return [ticket for operation in self._operations for ticket in operation.tickets]


def _before_earlier_finishes(program: _Program, operands: Sequence[Any], starts: Sequence[Any]) -> _Independent:
    """Moves what the operands are made of before what waits for operations on which they do not depend.

    `starts`: tickets of the operations that start before.
    """
    earlier = program.here()
    if not earlier:
        return _Independent([], None, starts)
    order = {operation: place for place, operation in enumerate(ir.InsertionPoint.current.block.operations)}
    needed = _needed([*operands, *starts], order)
    # An operation that is needed must not come before one that waits, with all that it needs itself.
    after = max((order[one.finish] for one in earlier if one.finish in needed or not one.tickets), default=-1)
    independent = [one for one in earlier if order[one.finish] > after]
    if independent:
        first = order[independent[0].finish]
        for operation in sorted((one for one in needed if order[one] > first), key=order.__getitem__):
            operation.move_before(independent[0].finish)
    return _Independent(independent, next((one for one in reversed(earlier) if not one.tickets), None), starts)


def _needed(values: Iterable[Any], order: dict[Any, int]) -> set[Any]:
    """All operations of the block from which the values come."""
    needed: set[Any] = set()
    left = list(values)
    while left:
        owner = left.pop().owner
        if isinstance(owner, ir.Block) or owner not in order or owner in needed:
            continue
        needed.add(owner)
        left.extend(_read_by(owner))
    return needed


def _read_by(operation: Any) -> Iterable[Any]:
    """Also what is read within its regions, such as the branches of a condition."""
    yield from operation.operands
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _read_by(inner)


def _lower_require_finite(ctx: Any, array: Any, flags: Any, *, names: tuple[str, ...], ranks: tuple[int, ...]) -> Any:
    _note_ranks(None, None)
    call = ffi_lowering("ringtrain_require_finite", has_side_effect=True, operand_output_aliases={0: 0})
    return call(ctx, array, flags, names="\n".join(names), ranks=",".join(map(str, ranks)))


def _lower_report_differences(
    ctx: Any, array: Any, flags: Any, *, names: tuple[str, ...], before: str, after: str, rank: int
) -> Any:
    call = ffi_lowering("ringtrain_report_differences", has_side_effect=True, operand_output_aliases={0: 0})
    return call(ctx, array, flags, names="\n".join(names), before=before, after=after, rank=np.int64(rank))


def _is_per_device(ctx: Any) -> bool:
    """Whether each of several devices of this rank carries out the operation, with its own part of the arrays.

    Raises ValueError in a program for several devices that does not say what each of them does.
    """
    devices = private.count_devices(ctx)
    if devices > jax.local_device_count():
        raise ValueError(
            f"an operation over the ranks inside a program for {devices} devices of several ranks: such a program sums "
            "over the ranks itself, as by jnp.mean or jax.lax.psum. Call the operation outside of it"
        )
    if devices > 1 and not (private.is_per_device(ctx) and private.platforms_of(ctx) == ("cpu",)):
        raise ValueError(
            f"an operation over the ranks inside a program for {devices} devices of this rank: each of them would call "
            "it. On CPUs call it within jax.shard_map over all of these devices, where each carries it out with the "
            "same device of the other ranks; or call it outside of the program; or start one rank for each device"
        )
    return devices > 1


def _require_one_device(ctx: Any) -> None:
    if _is_per_device(ctx):
        raise ValueError(
            "send, recv and sendrecv inside a program for several devices of this rank: start a rank for each device, "
            "or call them outside of the program"
        )
