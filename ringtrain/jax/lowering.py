"""The operations inside a compiled program: a call of the core for each array, and one that waits for all of them.

What starts an operation never waits, so that each array is on its way as soon as it has its values. XLA may carry out
the calls of a program in any order, and in a small one does so one after the other, waiting in each. So where the
script calls several operations of which none needs another one's result, all of them start before the program waits for
any: then the ranks need not have them in the same order.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from ringtrain._core import OpKind
from ringtrain.jax.ffi import ffi_lowering
from ringtrain.jax.primitives import KINDS, How, Names, barrier_p, require_finite_p
from ringtrain.job import session
from ringtrain.process_sets import global_process_set

_IN_PLACE = (OpKind.ALLREDUCE, OpKind.BROADCAST)
_TICKET = jax.core.ShapedArray((1,), np.dtype(np.uint32))


# Whether a program was compiled that is right for the ranks of this generation only.
_is_for_these_ranks = False


def register() -> None:
    session.at_init(lambda _settings: _forget_programs())
    for primitive, kind in KINDS.items():
        _register(primitive, _lowering_of(kind))
    _register(barrier_p, _lower_barrier)
    _register(require_finite_p, _lower_require_finite)


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
    takes = inspect.signature(mlir.register_lowering).parameters
    options: dict[str, Any] = {"cacheable": False} if "cacheable" in takes else {}
    mlir.register_lowering(primitive, rule, platform="cpu", **options)
    mlir.register_lowering(primitive, _refuse, **options)


def _refuse(ctx: Any, *operands: Any, **params: Any) -> Any:
    raise NotImplementedError(
        "ringtrain.jax works inside jit on CPUs. On another device put the operation between two jitted functions, or "
        "have JAX compute on CPUs: JAX_PLATFORMS=cpu"
    )


class _Operation(NamedTuple):
    """One that is in the program."""

    finish: Any  # of MLIR
    block: Any
    tickets: list[Any]


class _Program:
    """What is known of a program while it is built. It is kept with what the program itself keeps."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.operations: list[_Operation] = []

    @staticmethod
    def of(ctx: Any) -> _Program:
        kept = ctx.module_context.keepalives
        for one in kept:
            if isinstance(one, _Program):
                return one
        program = _Program()
        kept.append(program)
        return program

    def base_name(self, names: Names) -> str:
        """Numbered by their order in the program, not in the process: some rank may have compiled more programs."""
        if names.given is not None:
            return names.given
        place = names.place.rpartition("/")[2] or "operation"
        number = self.names[place]
        self.names[place] += 1
        return f"{place}#{number}"


def _lowering_of(kind: OpKind) -> Callable[..., Any]:
    def lower(ctx: Any, *operands: Any, names: Names, how: How) -> Any:
        _require_one_device(ctx)
        _note_ranks(kind, how)
        if how.is_alone:
            return operands
        program = _Program.of(ctx)
        base = program.base_name(names)
        with _before_earlier_finishes(program, operands) as independent:
            values, tickets = [], []
            for place, (operand, part) in enumerate(zip(operands, names.parts, strict=True)):
                attributes = {
                    **_attributes(kind, names, how),
                    "name": base + part,
                    "priority": np.int64(how.priorities[place] if how.priorities else 0),
                    "is_awaited": np.int64(len(operands) == 1),
                }
                value, ticket = _start(ctx, kind, operand, ctx.avals_in[place], attributes)
                values.append(value)
                tickets.append(ticket)
            independent.wait_for(tickets)
        return _finish(ctx, kind, program, values, tickets, independent)

    return lower


def _lower_barrier(ctx: Any, *operands: Any, names: Names, how: How) -> Any:
    _require_one_device(ctx)
    _note_ranks(OpKind.BARRIER, how)
    if how.is_alone:
        return operands
    program = _Program.of(ctx)
    attributes = {
        **_attributes(OpKind.BARRIER, names, how),
        "name": program.base_name(names),
        "priority": np.int64(0),
        "is_awaited": np.int64(1),
    }
    with _before_earlier_finishes(program, operands) as independent:
        call = ffi_lowering("ringtrain_start", has_side_effect=True)
        (ticket,) = call(ctx.replace(avals_out=[_TICKET]), *operands, **attributes)
        independent.wait_for([ticket])
    return _finish(ctx, OpKind.BARRIER, program, list(operands), [ticket], independent)


def _attributes(kind: OpKind, names: Names, how: How) -> dict[str, Any]:
    return {
        "kind": np.int64(kind.value),
        "op": np.int64(how.op.value),
        "root": np.int64(how.root),
        "process_set": np.int64(how.process_set.process_set_id or 0),
        "prescale": np.float64(how.prescale),
        "postscale": np.float64(how.postscale),
        "splits": ",".join(map(str, how.sent)),
        "site": names.place,
    }


def _start(ctx: Any, kind: OpKind, operand: Any, aval: Any, attributes: dict[str, Any]) -> tuple[Any, Any]:
    """What is to be finished, and the ticket. What is only read stays as it is until then."""
    if kind in _IN_PLACE:
        call = ffi_lowering("ringtrain_start", has_side_effect=True, operand_output_aliases={0: 0})
        value, ticket = call(ctx.replace(avals_in=[aval], avals_out=[aval, _TICKET]), operand, **attributes)
        return value, ticket
    call = ffi_lowering("ringtrain_start", has_side_effect=True)
    (ticket,) = call(ctx.replace(avals_in=[aval], avals_out=[_TICKET]), operand, **attributes)
    return operand, ticket


def _finish(
    ctx: Any, kind: OpKind, program: _Program, values: list[Any], tickets: list[Any], independent: _Independent
) -> Any:
    # The last ticket is there twice: in the place of the second another one can be put later.
    others = [*independent.tickets(), tickets[-1]]
    is_in_place = kind in (*_IN_PLACE, OpKind.BARRIER)
    aliases = {place: place for place in range(len(values))} if is_in_place else {}
    call = ffi_lowering("ringtrain_finish", has_side_effect=True, operand_output_aliases=aliases)
    words = [_TICKET] * (len(tickets) + len(others))
    results = call(
        ctx.replace(avals_in=[*ctx.avals_in, *words]),
        *(*values, *tickets, *others),
        kind=np.int64(kind.value),
        tickets=np.int64(len(tickets)),
    )
    program.operations.append(_Operation(results[0].owner, ir.InsertionPoint.current.block, tickets))
    return results


class _Independent:
    """Within it, what starts an operation is put before whatever waits for others that it does not need."""

    def __init__(self, operations: list[_Operation]):
        self._operations = operations
        self._place = ir.InsertionPoint(operations[0].finish) if operations else None

    def __enter__(self) -> _Independent:
        if self._place is not None:
            self._place.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._place is not None:
            self._place.__exit__(*error)

    def wait_for(self, tickets: list[Any]) -> None:
        """Have all of these operations finished only after what has these tickets was started."""
        for operation in self._operations:
            operands = operation.finish.operands
            last = len(operands) - 1
            joined = operands[last]
            with ir.InsertionPoint(operation.finish):
                for ticket in tickets:
                    joined = stablehlo.or_(joined, ticket)
            operands[last] = joined

    def tickets(self) -> list[Any]:
        return [ticket for operation in self._operations for ticket in operation.tickets]


def _before_earlier_finishes(program: _Program, operands: Sequence[Any]) -> _Independent:
    """Moves what the operands are made of before what waits for operations on which they do not depend."""
    block = ir.InsertionPoint.current.block
    earlier = [operation for operation in program.operations if operation.block == block]
    if not earlier:
        return _Independent([])
    order = {operation: place for place, operation in enumerate(block.operations)}
    needed = _needed(operands, order)
    places_of_finishes = [order[one.finish] for one in earlier if one.finish in needed]
    # An operation that is needed must not come before one that waits, with all that it needs itself.
    after = max(places_of_finishes, default=-1)
    independent = [one for one in earlier if order[one.finish] > after]
    if independent:
        first = order[independent[0].finish]
        for operation in sorted((one for one in needed if order[one] > first), key=order.__getitem__):
            operation.move_before(independent[0].finish)
    return _Independent(independent)


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


def _require_one_device(ctx: Any) -> None:
    devices = _devices(ctx.module_context.axis_context)
    if devices > 1:
        raise ValueError(
            f"an operation over the ranks inside a program for {devices} devices of this rank: each of them would call "
            "it. Sum over the local devices first and call it outside, or start one rank for each device"
        )


def _devices(axis_context: Any) -> int:
    """However this version of JAX says it; what it does not say is one."""
    mesh, environment = getattr(axis_context, "mesh", None), getattr(axis_context, "axis_env", None)
    return max(
        int(getattr(mesh, "size", 1)),
        int(getattr(environment, "nreps", 1)),
        int(getattr(axis_context, "num_devices", 1) or 1),
    )
