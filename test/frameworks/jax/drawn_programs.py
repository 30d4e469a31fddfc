"""Programs of messages that are drawn: ranks run different ones, which match, or of which one has a mistake.

A program is a list of steps in the order of one thread for all ranks; a rank carries out its own part of each step.
NumPy carries out the same steps for all ranks at once, which says what every rank has at the end.
"""

from __future__ import annotations

import random
import re
import time
from typing import Any, NamedTuple

import numpy as np
from harness.frameworks import on_demand

import ringtrain

jax = on_demand("jax")
jnp = on_demand("jax.numpy")
hvd = on_demand("ringtrain.jax")

_REGISTERS = 3
_TAGS = 4
MISTAKES = ("no send", "no receive", "another tag", "another length")


class Step(NamedTuple):
    """Reads the register `read` and writes the register `write`."""

    kind: str  # message, swap, ring, sum, work, loop, branch
    read: int = 0
    write: int = 0
    source: int = 0  # or the shift of a ring
    dest: int = 0
    tag: int = 0
    rounds: int = 0
    inner: tuple[Step, ...] = ()
    mistake: str = ""


def drawn(size: int, draw: random.Random, tag: int, depth: int = 0) -> tuple[Step, ...]:
    kinds = ["message", "message", "message", "swap", "ring", "work", "sum"] + ["loop", "branch"] * (depth < 2)
    steps = []
    for _ in range(draw.randint(2, 7 if depth == 0 else 3)):
        read, write = draw.randrange(_REGISTERS), draw.randrange(_REGISTERS)
        kind = draw.choice(kinds)
        source, dest = draw.sample(range(size), 2)
        if kind == "ring":
            source = draw.randint(1, size - 1)
        inner = drawn(size, draw, tag, depth + 1) if kind in ("loop", "branch") else ()
        own_tag = tag + draw.randrange(_TAGS)
        steps.append(Step(kind, read, write, source, dest, own_tag, draw.randint(1, 3), inner))
    return tuple(steps)


def with_mistake(steps: tuple[Step, ...], draw: random.Random) -> tuple[Step, ...] | None:
    """Returns the same with a mistake in one message; None if there is none outside of branches."""
    places = [place for place, step in enumerate(steps) if step.kind in ("message", "loop")]
    draw.shuffle(places)
    for place in places:
        step = steps[place]
        if step.kind == "message":
            changed: Step | None = step._replace(mistake=draw.choice(MISTAKES))
        else:
            inner = with_mistake(step.inner, draw)
            changed = None if inner is None else step._replace(inner=inner)
        if changed is not None:
            return (*steps[:place], changed, *steps[place + 1 :])
    return None


def in_jax(steps: tuple[Step, ...], registers: tuple[Any, ...], flag: Any) -> tuple[Any, ...]:
    """Returns what this rank has in its registers at the end."""
    own = list(registers)
    for step in steps:
        if step.kind == "loop":
            own = list(jax.lax.fori_loop(0, step.rounds, lambda _, all, s=step: in_jax(s.inner, all, flag), tuple(own)))
        elif step.kind == "branch":
            own = list(jax.lax.cond(flag, lambda all, s=step: in_jax(s.inner, all, flag), lambda all: all, tuple(own)))
        else:
            own[step.write] = _carried_out(step, own[step.read], own[step.write])
    return tuple(own)


def _carried_out(step: Step, read: Any, write: Any) -> Any:
    rank, size = hvd.rank(), hvd.size()
    if step.kind == "work":
        return write * 3 + read + rank
    if step.kind == "sum":
        return write + hvd.allreduce(read, hvd.Sum)  # used on all ranks: JAX drops what a rank does not use
    if step.kind == "ring":
        before, after = (rank - step.source) % size, (rank + step.source) % size
        return write + hvd.sendrecv(read, read, before, after, step.tag, step.tag)
    if step.kind == "swap" and rank in (step.source, step.dest):
        other = step.dest if rank == step.source else step.source
        hvd.send(read, other, step.tag)
        return write - hvd.recv(read, other, step.tag)
    if step.kind == "message" and rank == step.source:
        if step.mistake == "another length":
            read = jnp.concatenate([read, read[:1]])
        if step.mistake != "no send":
            hvd.send(read, step.dest, step.tag + _TAGS * (step.mistake == "another tag"))
    if step.kind == "message" and rank == step.dest and step.mistake != "no receive":
        return write + hvd.recv(read, step.source, step.tag)
    return write


def in_numpy(steps: tuple[Step, ...], all_ranks: list[list[Any]], flag: bool) -> None:
    """Does the same for all ranks."""
    size = len(all_ranks)
    for step in steps:
        for _ in range(step.rounds if step.kind == "loop" else step.kind == "branch" and flag):
            in_numpy(step.inner, all_ranks, flag)
        read = [own[step.read] for own in all_ranks]
        write = [own[step.write] for own in all_ranks]
        for rank, own in enumerate(all_ranks):
            if step.kind == "work":
                own[step.write] = write[rank] * 3 + read[rank] + rank
            elif step.kind == "sum":
                own[step.write] = write[rank] + sum(read)
            elif step.kind == "ring":
                own[step.write] = write[rank] + read[(rank - step.source) % size]
            elif step.kind == "swap" and rank in (step.source, step.dest):
                own[step.write] = write[rank] - read[step.dest if rank == step.source else step.source]
            elif step.kind == "message" and rank == step.dest:
                own[step.write] = write[rank] + read[step.source]


def _registers(size: int, length: int) -> list[list[Any]]:
    return [[np.arange(length, dtype=np.uint32) + 10 * rank + n for n in range(_REGISTERS)] for rank in range(size)]


def _compiled(steps: tuple[Step, ...], own: list[Any]) -> Any:
    arrays = tuple(map(jnp.asarray, own))
    program = jax.jit(lambda registers, flag: in_jax(steps, registers, flag)).lower(arrays, jnp.asarray(True)).compile()
    return lambda flag: jax.block_until_ready(program(arrays, jnp.asarray(flag)))


def require_right(seed: int) -> None:
    """Draws a program that matches, and compares what this rank has at the end."""
    draw, size, rank = random.Random(seed), hvd.size(), hvd.rank()
    steps = drawn(size, draw, 2 * _TAGS * seed)
    length = draw.choice((1, 5, 3000, 30_000))
    program = _compiled(steps, _registers(size, length)[rank])
    for flag in (True, False):
        with hvd.errors():
            results = program(flag)
        all_ranks = _registers(size, length)
        in_numpy(steps, all_ranks, flag)
        for number, (result, right) in enumerate(zip(results, all_ranks[rank], strict=True)):
            assert np.array_equal(result, right), f"seed {seed}: register {number} of {steps}"


def require_found(seed: int) -> None:
    """Draws a program with a mistake, which ends on some rank within two seconds, with the lines of two ranks."""
    draw, size, rank = random.Random(seed), hvd.size(), hvd.rank()
    steps = None
    while steps is None:
        steps = with_mistake(drawn(size, draw, 2 * _TAGS * seed), draw)
    program = _compiled(steps, _registers(size, 5)[rank])
    _synchronize(f"before {seed}")
    begin = time.monotonic()
    found = None
    try:
        with hvd.errors():
            program(True)
    except (ringtrain.DeadlockError, ringtrain.MismatchError) as error:
        found = (time.monotonic() - begin, str(error))
    _synchronize(f"after {seed}")
    every = [one for one in ringtrain.allgather_object(found) if one is not None]
    assert every, f"seed {seed}: no error in {steps}"
    seconds, text = min(every)
    assert seconds < 2, f"seed {seed}: {seconds} s"
    assert len(re.findall(r"\.py:\d+", text)) >= 2, f"seed {seed}: {text}"


def _synchronize(name: str) -> None:
    """Returns when all ranks have come here, whatever messages some of them still wait for when others are here."""
    while True:
        try:
            ringtrain.allreduce(np.ones(1), op=ringtrain.Sum, name=name)
            return
        except ringtrain.DeadlockError:
            continue
