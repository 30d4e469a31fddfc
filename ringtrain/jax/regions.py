"""Programs within programs: loops, conditions, and functions with operations in them.

Loops and conditions keep the place among all other operations that they have in the script. XLA carries out what does
not need each other's results in any order, and in a small program one thing after the other: two ranks, one of which
has more to do before its first loop, would each wait in another loop. And where an operation fails while a loop goes
on, some ranks would have begun an operation of the loop that others never come to, which would then be taken for one of
the next step. So a loop begins when all operations before it have ended, and what comes after it begins when it has
ended. Operations in one round of a loop, or in one branch, are ordered only with those there.

Of anything else that has a program in it JAX compiles one function and calls it, or copies it, where that comes again,
such as a solver that is called twice. An operation in the function would have one name for all calls, which may be
under way at the same time, and in another order on another rank. So whatever has operations in it is compiled anew in
each place. That holds for every primitive that may have a program in it, also for those that nobody has thought of.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.extend.core.primitives import call_p, closed_call_p
from jax.interpreters import mlir, partial_eval
from jaxlib.mlir import ir

from ringtrain._core import OpKind
from ringtrain.jax import private
from ringtrain.jax.ffi import ffi_lowering

TICKET = jax.core.ShapedArray((1,), np.dtype(np.uint32))


class Typed(NamedTuple):
    """A value of MLIR, and what JAX calls its type."""

    value: Any
    aval: Any


class Place(NamedTuple):
    """Marks a point of a program: all operations before `mark`, one of MLIR, are over there."""

    mark: Any
    block: Any
    ends: list[Typed]  # which are there when it is over


class Program(Protocol):
    """The program that is compiled now."""

    def places(self) -> Sequence[Place]:
        """Returns what has a place before whatever is compiled now."""

    def note_region(self, place: Place) -> None:
        """Is told of the place of a loop, or a condition, that has been compiled."""


_Rule = Callable[..., Any]
_ProgramOf = Callable[[Any], Program]  # by the context of a rule of JAX

# For rules whose code depends on what the program has already.
_takes = inspect.signature(mlir.register_lowering).parameters
UNCACHED: dict[str, Any] = {"cacheable": False} if "cacheable" in _takes else {}

_PLATFORMS = ("cpu", "cuda")
# Primitives with several results that never have a program in them, and come often: JAX compiles them once.
_LEAVES = (
    *("threefry2x32", "threefry4x32", "philox2x32", "philox4x32", "iota_2x32_shape", "rng_bit_generator", "split"),
    *("unstack", "sort", "top_k", "device_put", "optimization_barrier"),
)


# Returns a ticket at the end of a branch, once the operations there have ended.
_end_p = Primitive("ringtrain_end")
_end_p.def_abstract_eval(lambda: TICKET)


def register_regions(
    primitives: Iterable[Primitive], kept: Iterable[Primitive], program_of: _ProgramOf
) -> Callable[[], None]:
    """Have whatever has some of the primitives in it compiled as said above.

    `kept`: those that JAX must not leave out where it needs no result of them, nor what they are in.

    Returns the function that does so for primitives of JAX, and of libraries, that are new since it was last called.
    """
    ours = frozenset(primitives)
    known = set(ours)
    mlir.register_lowering(_end_p, _end_of(program_of), platform="cpu", **UNCACHED)
    for primitive in kept:
        partial_eval.dce_rules[primitive] = _used
    for primitive in (jax.lax.while_p, jax.lax.cond_p):
        rule = _in_order(_rule_of(primitive), ours, program_of)
        mlir.register_lowering(primitive, rule, platform="cpu", **UNCACHED)
    for primitive in _calls():
        for platform in _PLATFORMS:
            mlir.register_lowering(primitive, _inlined(_rule_of(primitive), ours), platform=platform, **UNCACHED)
    known.update((jax.lax.while_p, jax.lax.cond_p, *_calls()))
    tables: dict[str | None, Mapping[Primitive, Any]] = {
        None: private.LOWERINGS,
        **{platform: private.PLATFORM_LOWERINGS[platform] for platform in _PLATFORMS},
    }
    lengths: list[int] = []

    def cover() -> None:
        if lengths == (lengths_now := [len(table) for table in tables.values()]):
            return
        lengths[:] = lengths_now
        new = {primitive for table in tables.values() for primitive in table if _may_have_a_program(primitive)} - known
        keep = frozenset(kept)
        for primitive in new | {jax.lax.while_p, jax.lax.cond_p, *_calls()}:
            _keep_with(primitive, keep)
        for primitive in new:
            for platform, table in tables.items():
                if primitive in table:
                    _register_anew(primitive, platform, table[primitive], ours)
        known.update(new)

    cover()
    return cover


def _used(*given: Any) -> Any:
    """A rule of JAX that keeps the last of what it is given, an equation; before 0.12 that is the second."""
    equation = given[-1]
    return [True] * len(equation.invars), equation


def _keep_with(primitive: Primitive, kept: frozenset[Primitive]) -> None:
    rule = partial_eval.dce_rules.get(primitive)
    if getattr(rule, "keeps", False):
        return

    def keep(used: Sequence[bool], *given: Any) -> Any:
        equation = given[-1]
        if _has_any(equation.params.values(), kept):
            return _used(equation)
        if rule is not None:
            return rule(list(used), *given)
        is_used = any(used) or bool(equation.effects)
        return [is_used] * len(equation.invars), equation if is_used else None

    keep.keeps = True  # type: ignore[attr-defined]
    partial_eval.dce_rules[primitive] = keep


def _may_have_a_program(primitive: Primitive) -> bool:
    """Whether it may have one, whatever it is: the results of a program are several, or may be."""
    return primitive.multiple_results and primitive.name not in _LEAVES


def _register_anew(primitive: Primitive, platform: str | None, entry: Any, ours: frozenset[Primitive]) -> None:
    kept = {"inline": entry.inline} if hasattr(entry, "inline") else {}
    rule = _anew(getattr(entry, "rule", entry), ours)
    mlir.register_lowering(primitive, rule, platform=platform, **kept, **UNCACHED)


def _anew(rule: _Rule, ours: frozenset[Primitive]) -> _Rule:
    """Compiles it without functions that JAX has compiled before, or would use again, if it has operations in it."""

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        if not _has_any(params.values(), ours):
            return rule(ctx, *operands, **params)
        with contextlib.ExitStack() as emptied:
            for cache in private.caches_of(ctx):
                emptied.enter_context(_emptied(cache))
            return rule(ctx, *operands, **params)

    return lower


@contextlib.contextmanager
def _emptied(cache: dict[Any, Any]) -> Iterator[None]:
    """Within it nothing is found that was there, and what is put there is forgotten after it.

    Keys that are types stay: they are those of ringtrain.
    """
    kept = {key: value for key, value in cache.items() if not isinstance(key, type)}
    for key in kept:
        del cache[key]
    try:
        yield
    finally:
        for key in [key for key in cache if not isinstance(key, type)]:
            del cache[key]
        cache.update(kept)


def _calls() -> set[Primitive]:
    """Returns the primitives that call one program, and do nothing else, whose lines may as well stand there."""
    with_jvp, with_vjp = jax.custom_jvp(_identity), jax.custom_vjp(_identity)
    with_jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    with_vjp.defvjp(lambda x: (x, None), lambda _, gradient: (gradient,))
    functions: list[Callable[[Any], Any]] = [jax.jit(_identity), with_jvp, with_vjp]
    if hasattr(jax.lax, "composite"):
        functions.append(jax.lax.composite(_identity, "ringtrain.identity"))
    return {call_p, closed_call_p, *map(_primitive_of, functions)}


def _identity(x: Any) -> Any:
    return x


def _primitive_of(function: Callable[[Any], Any]) -> Primitive:
    """Returns the primitive of a call of the function; its name differs between the versions of JAX."""
    primitive: Primitive = jax.make_jaxpr(function)(TICKET).jaxpr.eqns[0].primitive
    return primitive


def _inlined(rule: _Rule, ours: frozenset[Primitive]) -> _Rule:
    """Compiles what is called as if its lines stood there, if it has operations in it.

    So operations of several calls can start before the program waits for any.
    """

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        called = params.get("jaxpr", params.get("call_jaxpr"))
        if not _has_any([called], ours):
            return rule(ctx, *operands, **params)
        closed: Any = called if hasattr(called, "jaxpr") else ClosedJaxpr(called, ())  # type: ignore[arg-type]
        return mlir.lower_fun(jaxpr_as_fun(closed), multiple_results=True)(ctx, *operands)

    return lower


def _rule_of(primitive: Primitive) -> _Rule:
    entry: Any = private.LOWERINGS[primitive]
    rule: _Rule = getattr(entry, "rule", entry)  # in older versions the entry is the rule
    return rule


def _in_order(rule: _Rule, ours: frozenset[Primitive], program_of: _ProgramOf) -> _Rule:
    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        if not _has_any(params.values(), ours):
            return rule(ctx, *operands, **params)
        program = program_of(ctx)
        ends = [end for place in program.places() for end in place.ends]
        first = _read_first(params)
        if ends and first is not None:
            ready = _after(ctx, Typed(operands[first], ctx.avals_in[first]), ends)
            operands = (*operands[:first], ready, *operands[first + 1 :])
        whole = ctx.replace(avals_out=[*ctx.avals_out, TICKET])
        if "branches" in params:
            params["branches"] = tuple(map(_with_end, params["branches"]))
        else:
            whole = whole.replace(avals_in=[*ctx.avals_in, TICKET])
            operands = (*operands, mlir.ir_constant(np.zeros(1, np.uint32)))
            params["body_jaxpr"] = _with_end(params["body_jaxpr"], TICKET)
            params["cond_jaxpr"] = _with_end(params["cond_jaxpr"], TICKET, returns=False)
        *results, ended = _anew(rule, ours)(whole, *operands, **params)
        over = _after(ctx, Typed(mlir.ir_constant(np.zeros(1, np.uint32)), TICKET), [Typed(ended, TICKET)])
        program.note_region(Place(over.owner, ir.InsertionPoint.current.block, [Typed(over, TICKET)]))
        return results

    return lower


def _with_end(program: ClosedJaxpr, *carried: Any, returns: bool = True) -> ClosedJaxpr:
    """Returns a branch, or a part of a loop, with one more result: the operations after it wait for that one.

    XLA knows some results before a loop with operations has ended, such as how often it goes round.
    """
    function = jaxpr_as_fun(program)

    def with_end(*operands: Any) -> Any:
        results = function(*operands[: len(program.in_avals)])
        return (*results, _end_p.bind()) if returns else results

    return jax.make_jaxpr(with_end)(*program.in_avals, *carried)


def _end_of(program_of: _ProgramOf) -> _Rule:
    def lower(ctx: Any) -> Any:
        ends = [end for place in program_of(ctx).places() for end in place.ends]
        if len(ends) == 1 and ends[0].aval == TICKET:
            return [ends[0].value]
        return [_after(ctx, Typed(mlir.ir_constant(np.zeros(1, np.uint32)), TICKET), ends)]

    return lower


def scope_of(block: Any) -> Any:
    """Returns the block of MLIR if it has a place in the order of the program, as a loop and a branch have; else None.

    XLA puts the lines of functions and of all other regions where these are called. So operations there, also in loops
    there, may be under way at the same time as those of the whole program.
    """
    is_region = block.owner.operation.name != "func.func"
    return block if is_region and is_in_main(block) else None


def is_in_main(block: Any) -> bool:
    """Whether it belongs to the main function, or to a loop or a branch there."""
    owner = block.owner.operation
    while owner.name in ("stablehlo.while", "stablehlo.case", "stablehlo.if"):
        owner = ir.InsertionPoint(owner).block.owner.operation
    return owner.name == "func.func" and "private" not in str(owner.attributes["sym_visibility"])


def _has_any(values: Iterable[Any], ours: frozenset[Primitive]) -> bool:
    """Whether a program among the values, or one within it, has one of our primitives."""
    for value in values:
        if isinstance(value, Mapping):
            value = tuple(value.values())
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
