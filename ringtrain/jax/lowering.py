"""The operations inside a compiled program: a call of the core for each array, and one that waits for all of them.

Starting an operation never waits, so that each array is on its way as soon as it has its values. XLA may carry out
the calls of a program in any order, and in a small one does so one after the other, waiting in each. So where the
script calls several operations of which none needs another one's result, all of them start before the program waits for
any: then the ranks need not have them in the same order.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import mlir as rules  # the only place where JAX says how it compiles its own primitives
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.extend.core.primitives import closed_call_p
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

import ringtrain._core as _core
from ringtrain._core import OpKind
from ringtrain.engine.process_sets import global_process_set
from ringtrain.jax.ffi import ffi_lowering
from ringtrain.jax.primitives import KINDS, How, Names, barrier_p, require_finite_p
from ringtrain.job import session

# ------------------------------------------------------------------------------------------------- loops and conditions
# Loops, conditions and calls with operations in them: loops and conditions keep the place among all other operations
# that they have in the script.
#
# XLA carries out what does not need each other's results in any order, and in a small program one thing after the
# other: two ranks, one of which has more to do before its first loop, would each wait in another loop. And where an
# operation fails while a loop goes on, some ranks would have begun an operation of the loop that others never come to,
# which would then be taken for one of the next step. So a loop begins when all operations before it have ended, and
# what comes after it begins when it has ended. Operations in one round of a loop, or in one branch, are ordered only
# with those there.

_TICKET = jax.core.ShapedArray((1,), np.dtype(np.uint32))


class Typed(NamedTuple):
    """A value of MLIR, and what JAX calls its type."""

    value: Any
    aval: Any


class Place(NamedTuple):
    """Where all that comes before is over: `mark` is an operation of MLIR, which all of it comes before."""

    mark: Any
    block: Any
    ends: list[Typed]  # which are there when it is over


_Rule = Callable[..., Any]

# For rules whose code depends on what the program has already.
_takes = inspect.signature(mlir.register_lowering).parameters
_UNCACHED: dict[str, Any] = {"cacheable": False} if "cacheable" in _takes else {}


def _register_regions(
    primitives: Iterable[Primitive], before: Callable[[Any], Sequence[Place]], note: Callable[[Any, Place], None]
) -> None:
    """Have loops and conditions with some of the primitives in them compiled in their order.

    Args:
        before: what has a place before whatever is compiled now, by the context of a rule of JAX.
        note: is told of the place of a loop, or a condition, that has been compiled.
    """
    ours = frozenset(primitives)
    for primitive in (jax.lax.while_p, jax.lax.cond_p):
        rule = _in_order(_rule_of(primitive), ours, before, note)
        mlir.register_lowering(primitive, rule, platform="cpu", **_UNCACHED)
    # It becomes a loop, which would have its place in a function of its own.
    mlir.register_lowering(jax.lax.scan_p, _rule_of(jax.lax.scan_p), platform="cpu", **_UNCACHED)
    for primitive in _calls():
        for platform in ("cpu", "cuda"):
            mlir.register_lowering(primitive, _inlined(_rule_of(primitive), ours), platform=platform, **_UNCACHED)
    remat = _primitive_of(jax.checkpoint(_identity))  # its lines stand where it is called, unless they are cached
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(remat, _rule_of(remat), platform=platform, **_UNCACHED)


def _calls() -> set[Primitive]:
    """Returns the primitives that call a jitted function, or one with derivatives of its own, within a program."""
    with_jvp, with_vjp = jax.custom_jvp(_identity), jax.custom_vjp(_identity)
    with_jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    with_vjp.defvjp(lambda x: (x, None), lambda _, gradient: (gradient,))
    functions: tuple[Callable[[Any], Any], ...] = (jax.jit(_identity), with_jvp, with_vjp)
    return {closed_call_p, *map(_primitive_of, functions)}


def _identity(x: Any) -> Any:
    return x


def _primitive_of(function: Callable[[Any], Any]) -> Primitive:
    """Returns the primitive of a call of the function; its name differs between the versions of JAX."""
    primitive: Primitive = jax.make_jaxpr(function)(_TICKET).jaxpr.eqns[0].primitive
    return primitive


def _inlined(rule: _Rule, ours: frozenset[Primitive]) -> _Rule:
    """Compiles what is called as if its lines stood there, if it has operations in it.

    JAX compiles a function that is called twice once, so an operation in it would have one name for both calls. These
    may be under way at the same time, and in another order on another rank.
    """

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        called = params.get("jaxpr", params.get("call_jaxpr"))
        if not _has_any([called], ours):
            return rule(ctx, *operands, **params)
        closed: Any = called if hasattr(called, "jaxpr") else ClosedJaxpr(called, ())  # type: ignore[arg-type]
        return mlir.lower_fun(jaxpr_as_fun(closed), multiple_results=True)(ctx, *operands)

    return lower


def _rule_of(primitive: Primitive) -> _Rule:
    entry: Any = rules._lowerings[primitive]
    rule: _Rule = getattr(entry, "rule", entry)  # in older versions the entry is the rule
    return rule


def _in_order(
    rule: _Rule,
    ours: frozenset[Primitive],
    before: Callable[[Any], Sequence[Place]],
    note: Callable[[Any, Place], None],
) -> _Rule:
    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        if not _has_any(params.values(), ours):
            return rule(ctx, *operands, **params)
        ends = [end for place in before(ctx) for end in place.ends]
        first = _read_first(params)
        if ends and first is not None:
            ready = _after(ctx, Typed(operands[first], ctx.avals_in[first]), ends)
            operands = (*operands[:first], ready, *operands[first + 1 :])
        results = rule(ctx, *operands, **params)
        typed = [Typed(*one) for one in zip(results, ctx.avals_out, strict=True) if _is_of_xla(one[1])]
        over = _after(ctx, Typed(mlir.ir_constant(np.zeros(1, np.uint32)), _TICKET), typed)
        note(ctx, Place(over.owner, ir.InsertionPoint.current.block, [Typed(over, _TICKET)]))
        return results

    return lower


def _has_any(values: Iterable[Any], ours: frozenset[Primitive]) -> bool:
    """Whether a program among the values, or one within it, has one of our primitives."""
    for value in values:
        if isinstance(value, (tuple, list)):
            if _has_any(value, ours):
                return True
            continue
        program = getattr(value, "jaxpr", value)
        for equation in getattr(program, "eqns", ()):
            if equation.primitive in ours or _has_any(equation.params.values(), ours):
                return True
    return False


def _read_first(params: dict[str, Any]) -> int | None:
    """The place of an operand without which nothing begins: the index of a condition, what a loop's condition reads."""
    if "cond_jaxpr" not in params:
        return 0
    condition, consts = params["cond_jaxpr"].jaxpr, params["cond_nconsts"]
    read = {id(one) for equation in condition.eqns for one in equation.invars} | {id(one) for one in condition.outvars}
    for place, one in enumerate(condition.invars[consts:]):
        if id(one) in read and _is_of_xla(one.aval):
            return int(consts + params["body_nconsts"] + place)
    return None


def _is_of_xla(aval: Any) -> bool:
    """Whether it is an array as XLA has it, no keys of a random generator."""
    return hasattr(aval, "dtype") and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def _after(ctx: Any, given: Typed, ends: Sequence[Typed]) -> Any:
    """Returns its arguments once the ends exist: by an empty call, since XLA sees through its own barriers."""
    call = ffi_lowering("ringtrain_finish", has_side_effect=True, operand_output_aliases={0: 0})
    avals = [given.aval, *(end.aval for end in ends)]
    kind = np.int64(OpKind.BARRIER.value)
    context = ctx.replace(avals_in=avals, avals_out=[given.aval])
    (result,) = call(context, given.value, *(end.value for end in ends), kind=kind, tickets=np.int64(0))
    return result


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


# Whether a program was compiled that is right for the ranks of this generation only.
_is_for_these_ranks = False


def register() -> None:
    session.at_init(lambda _settings: _forget_programs())
    session.at_shutdown(_let_programs_end)
    for primitive, kind in KINDS.items():
        _register(primitive, _lowering_of(kind))
    _register(barrier_p, _lower_barrier)
    _register(require_finite_p, _lower_require_finite)
    _register_regions([*KINDS, barrier_p], lambda ctx: _Program.of(ctx).places(), _note_region)


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
        mlir.register_lowering(primitive, rule, platform=platform, **_UNCACHED)
    mlir.register_lowering(primitive, _refuse, **_UNCACHED)


def _refuse(ctx: Any, *operands: Any, **params: Any) -> Any:
    raise NotImplementedError(
        "ringtrain.jax works inside jit on CPUs and on NVIDIA's GPUs. On another device put the operation between two "
        "jitted functions, or have JAX compute on CPUs: JAX_PLATFORMS=cpu"
    )


class _Operation(NamedTuple):
    """One that is in the program, or a loop or condition with operations in it, which has no ticket."""

    place: Place
    tickets: list[Any]
    given: frozenset[str] = frozenset()  # names of its arrays, if the script names it

    @property
    def finish(self) -> Any:
        return self.place.mark


class _Program:
    """The state of a program while it is built. It is kept with what the program itself keeps."""

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

    def here(self) -> list[_Operation]:
        """Those beside what is compiled now."""
        block = ir.InsertionPoint.current.block
        return [one for one in self.operations if one.place.block == block]

    def places(self) -> list[Place]:
        """Of what is here, from the last loop or condition on, which comes after all before it."""
        here = self.here()
        last = max((number for number, one in enumerate(here) if not one.tickets), default=0)
        return [one.place for one in here[last:]]

    def base_name(self, names: Names) -> str:
        """Numbered by their order in the program, not in the process: some rank may have compiled more programs.

        A name that the script gives is numbered from its second use on, such as by a function that is called again.
        """
        if names.given is not None:
            own = _given(names)
            uses = sum(not own.isdisjoint(one.given) for one in self.here())
            return f"{names.given}#{uses}" if uses else names.given
        place = names.place.rpartition("/")[2] or "operation"
        number = self.names[place]
        self.names[place] += 1
        return f"{place}#{number}"


def _given(names: Names) -> frozenset[str]:
    return frozenset() if names.given is None else frozenset(names.given + part for part in names.parts)


def _lowering_of(kind: OpKind) -> Callable[..., Any]:
    def lower(ctx: Any, *operands: Any, names: Names, how: How) -> Any:
        _require_one_device(ctx)
        _note_ranks(kind, how)
        arrays, weight = how.split(operands)
        if how.is_alone:
            return arrays
        program = _Program.of(ctx)
        base = program.base_name(names)
        weights = [Typed(value, ctx.avals_in[-1]) for value in weight]
        ctx = ctx.replace(avals_in=ctx.avals_in[: len(arrays)])
        with _before_earlier_finishes(program, operands) as independent:
            values, tickets = [], []
            for place, (array, part) in enumerate(zip(arrays, names.parts, strict=True)):
                attributes = {
                    **_attributes(kind, names, how),
                    "name": base + part,
                    "priority": np.int64(how.priorities[place] if how.priorities else 0),
                    "is_awaited": np.int64(len(arrays) == 1),
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
    _require_one_device(ctx)
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
    }
    with _before_earlier_finishes(program, operands) as independent:
        call = ffi_lowering("ringtrain_start", has_side_effect=True)
        ends = independent.ends()
        avals_in = [*ctx.avals_in, *(end.aval for end in ends)]
        values = (*operands, *(end.value for end in ends))
        (ticket,) = call(ctx.replace(avals_in=avals_in, avals_out=[_TICKET]), *values, **attributes)
        independent.wait_for([ticket])
    return _finish(
        ctx, OpKind.BARRIER, program, list(operands), _Started([ticket], [name], how, _given(names)), independent
    )


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
        value, ticket = call(ctx.replace(avals_in=avals_in, avals_out=[given.aval, _TICKET]), *values, **attributes)
        return value, ticket
    call = ffi_lowering("ringtrain_start", has_side_effect=True)
    (ticket,) = call(ctx.replace(avals_in=avals_in, avals_out=[_TICKET]), *values, **attributes)
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
    words = [_TICKET] * (len(tickets) + len(others))
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
    program.operations.append(_Operation(place, tickets, started.given))
    return results


def _note_region(ctx: Any, place: Place) -> None:
    _Program.of(ctx).operations.append(_Operation(place, []))


class _Independent:
    """Within it, what starts an operation is put before whatever waits for others that it does not need."""

    def __init__(self, operations: list[_Operation], region: _Operation | None):
        self._operations = operations
        self._region = region
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
        """Returns what it must wait for before it starts: the end of the loop, or condition, before it."""
        return self._region.place.ends if self._region else []

    def tickets(self) -> list[Any]:
        return [ticket for operation in self._operations for ticket in operation.tickets]


def _before_earlier_finishes(program: _Program, operands: Sequence[Any]) -> _Independent:
    """Moves what the operands are made of before what waits for operations on which they do not depend."""
    earlier = program.here()
    if not earlier:
        return _Independent([], None)
    order = {operation: place for place, operation in enumerate(ir.InsertionPoint.current.block.operations)}
    needed = _needed(operands, order)
    # An operation that is needed must not come before one that waits, with all that it needs itself.
    after = max((order[one.finish] for one in earlier if one.finish in needed or not one.tickets), default=-1)
    independent = [one for one in earlier if order[one.finish] > after]
    if independent:
        first = order[independent[0].finish]
        for operation in sorted((one for one in needed if order[one] > first), key=order.__getitem__):
            operation.move_before(independent[0].finish)
    return _Independent(independent, next((one for one in reversed(earlier) if not one.tickets), None))


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
