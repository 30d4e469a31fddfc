"""Messages between two ranks as a primitive of JAX, with its rules under grad, vmap and remat.

One primitive carries out `send`, `recv` and `sendrecv`: it sends some arrays to one rank and receives some from one.
It is linear. Its transpose sends the gradients of what was received back to their source, and receives those of what
was sent from their destination.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, partial_eval

from ringtrain import ops
from ringtrain.engine.handles import Handle, wait_for_all
from ringtrain.engine.process_sets import ProcessSet


class Ends(NamedTuple):
    """Where messages go and where they come from. Ranks of the world; None: nowhere, and from nowhere."""

    process_set: ProcessSet
    dest: int | None
    source: int | None
    sendtag: int
    recvtag: int
    sent: int  # how many of the operands are sent
    place: str  # the line of the script

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the arrays to send, and those whose shapes and dtypes the received ones have."""
        return list(operands[: self.sent]), list(operands[self.sent :])

    def of_gradients(self, sent: int) -> Ends:
        ends = self._replace(dest=self.source, source=self.dest, sendtag=self.recvtag, recvtag=self.sendtag)
        return ends._replace(sent=sent)


# (arrays to send, arrays like those to receive) -> (received arrays, or without a source the latter themselves).
exchange_p = Primitive("ringtrain_exchange")
exchange_p.multiple_results = True


@exchange_p.def_impl
def _exchange(*operands: Any, ends: Ends) -> list[Any]:
    sent, like = ends.split(operands)
    handles: list[Handle[Any]] = []
    if ends.source is not None:
        received = [np.empty(one.shape, one.dtype) for one in like]
        handles += [ops.recv_async(one, ends.source, ends.recvtag, ends.process_set) for one in received]
        like = received
    if ends.dest is not None:
        values = [np.asarray(one) for one in sent]
        handles += [ops.send_async(one, ends.dest, ends.sendtag, ends.process_set) for one in values]
    wait_for_all(handles)
    return [jnp.asarray(one) for one in like]


@exchange_p.def_abstract_eval
def _abstract_exchange(*operands: Any, ends: Ends) -> list[Any]:
    return [_like(one) for one in ends.split(operands)[1]]


def _like(array: Any) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(array.shape, array.dtype)


def register() -> None:
    ad.primitive_jvps[exchange_p] = _jvp
    ad.primitive_transposes[exchange_p] = _transpose
    batching.primitive_batchers[exchange_p] = _batch
    partial_eval.partial_eval_jaxpr_custom_rules[exchange_p] = _under_remat


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, ends: Ends) -> Any:
    """All tangents travel together: a rank does not know which of them are zero on another one."""
    results = exchange_p.bind(*primals, ends=ends)
    avals: list[Any] = [one.aval if type(one) is ad.Zero else _like(one) for one in tangents]
    moving = [jnp.issubdtype(one.dtype, jnp.inexact) for one in avals]
    own = [ad.instantiate_zeros(one) for one, moves in zip(tangents, moving, strict=True) if moves]
    derivatives = iter(exchange_p.bind(*own, ends=ends._replace(sent=sum(moving[: ends.sent]))))
    of_results = [
        next(derivatives) if moves else ad.Zero(one)
        for one, moves in zip(avals[ends.sent :], moving[ends.sent :], strict=True)
    ]
    return results, of_results


def _transpose(cotangents: Sequence[Any], *operands: Any, ends: Ends) -> list[Any]:
    whole = [ad.instantiate_zeros(one) for one in cotangents]
    specs = [one.aval if ad.is_undefined_primal(one) else one for one in operands]
    zeros = [jnp.zeros(one.shape, one.dtype) for one in specs]
    back = ends.of_gradients(0 if ends.source is None else len(whole))
    sent = whole if ends.source is not None else []
    if ends.sent:
        gradients = exchange_p.bind(*sent, *zeros[: ends.sent], ends=back)
        of_like = zeros[ends.sent :] if ends.source is not None else whole
    else:  # the zeros are what keeps the messages in the program
        gradients, of_like = [], exchange_p.bind(*sent, *zeros, ends=back) if sent else whole
    every = [*gradients, *of_like]
    return [one if ad.is_undefined_primal(given) else None for one, given in zip(every, operands, strict=True)]


def _batch(operands: Sequence[Any], dimensions: Sequence[Any], *, ends: Ends) -> Any:
    """One message of each whole batch, which is the first dimension on both ranks."""
    length = next(
        one.shape[dimension] for one, dimension in zip(operands, dimensions, strict=True) if dimension is not None
    )
    whole = [
        jnp.broadcast_to(one, (length, *one.shape)) if dimension is None else jnp.moveaxis(one, dimension, 0)
        for one, dimension in zip(operands, dimensions, strict=True)
    ]
    results = exchange_p.bind(*whole, ends=ends)
    return results, [0] * len(results)


def _under_remat(saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], equation: Any) -> Any:
    """Keeps what was received: messages are not repeated."""
    count = len(equation.outvars)
    if not any(unknown):
        return equation, None, [False] * count, [False] * count, []
    needed = [
        one
        for one, is_unknown, is_there in zip(equation.invars, unknown, instantiated, strict=True)
        if not is_unknown and not is_there
    ]
    return None, equation, [True] * count, [True] * count, needed
