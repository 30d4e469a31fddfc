"""Loops, conditions and calls with operations in them.

Loops and conditions keep the place among all other operations that they have in the script.

XLA carries out what does not need each other's results in any order, and in a small program one thing after the other:
two ranks, one of which has more to do before its first loop, would each wait in another loop. And where an operation
fails while a loop goes on, some ranks would have begun an operation of the loop that others never come to, which would
then be taken for one of the next step. So a loop begins when all operations before it have ended, and what comes after
it begins when it has ended. What is in one round of a loop, or in one branch, is in an order only with what is there.
"""

from __future__ import annotations

import inspect
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

from ringtrain._core import OpKind
from ringtrain.jax.ffi import ffi_lowering

TICKET = jax.core.ShapedArray((1,), np.dtype(np.uint32))


class Typed(NamedTuple):
    """A value of MLIR, and what JAX calls its type."""

    value: Any
    aval: Any


class Place(NamedTuple):
    """Where all that comes before is over: `mark` is an operation of MLIR, which all of it comes before."""

    mark: Any
    block: Any
    ends: list[Typed]  # which are there when it is over


Rule = Callable[..., Any]

# For rules whose code depends on what the program has already.
_takes = inspect.signature(mlir.register_lowering).parameters
UNCACHED: dict[str, Any] = {"cacheable": False} if "cacheable" in _takes else {}


def register(
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
        mlir.register_lowering(primitive, rule, platform="cpu", **UNCACHED)
    # It becomes a loop, which would have its place in a function of its own.
    mlir.register_lowering(jax.lax.scan_p, _rule_of(jax.lax.scan_p), platform="cpu", **UNCACHED)
    for primitive in _calls():
        for platform in ("cpu", "cuda"):
            mlir.register_lowering(primitive, _inlined(_rule_of(primitive), ours), platform=platform, **UNCACHED)
    remat = _primitive_of(jax.checkpoint(_identity))  # its lines stand where it is called, unless they are cached
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(remat, _rule_of(remat), platform=platform, **UNCACHED)


def _calls() -> set[Primitive]:
    """What calls a jitted function, or one with derivatives of its own, within a program."""
    with_jvp, with_vjp = jax.custom_jvp(_identity), jax.custom_vjp(_identity)
    with_jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    with_vjp.defvjp(lambda x: (x, None), lambda _, gradient: (gradient,))
    functions: tuple[Callable[[Any], Any], ...] = (jax.jit(_identity), with_jvp, with_vjp)
    return {closed_call_p, *map(_primitive_of, functions)}


def _identity(x: Any) -> Any:
    return x


def _primitive_of(function: Callable[[Any], Any]) -> Primitive:
    """What a call of the function is in a program; its name differs between the versions of JAX."""
    primitive: Primitive = jax.make_jaxpr(function)(TICKET).jaxpr.eqns[0].primitive
    return primitive


def _inlined(rule: Rule, ours: frozenset[Primitive]) -> Rule:
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


def _rule_of(primitive: Primitive) -> Rule:
    entry: Any = rules._lowerings[primitive]
    rule: Rule = getattr(entry, "rule", entry)  # in older versions the entry is the rule
    return rule


def _in_order(
    rule: Rule, ours: frozenset[Primitive], before: Callable[[Any], Sequence[Place]], note: Callable[[Any, Place], None]
) -> Rule:
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
        over = _after(ctx, Typed(mlir.ir_constant(np.zeros(1, np.uint32)), TICKET), typed)
        note(ctx, Place(over.owner, ir.InsertionPoint.current.block, [Typed(over, TICKET)]))
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
    """What is given, once the ends are there: by a call that does nothing, since XLA sees through its own barriers."""
    call = ffi_lowering("ringtrain_finish", has_side_effect=True, operand_output_aliases={0: 0})
    avals = [given.aval, *(end.aval for end in ends)]
    kind = np.int64(OpKind.BARRIER.value)
    context = ctx.replace(avals_in=avals, avals_out=[given.aval])
    (result,) = call(context, given.value, *(end.value for end in ends), kind=kind, tickets=np.int64(0))
    return result
