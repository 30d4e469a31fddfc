"""Messages inside jit: how long an exchange of two ranks takes, beside mpi4py or mpi4jax, and many drawn programs.

In test/:
    ringrun -np 2 python -m measure.jax.messages [--halo 512] [--rounds 9]
    mpirun -np 2 python -m measure.jax.messages --mpi4jax     # the same with mpi4jax alone
    ringrun -np 3 python -m measure.jax.messages --programs 10000 [--mistakes 300] [--first 0]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Floats, exchanges in a round.
SIZES = {"4 B": (1, 200), "64 KB": (16_384, 100), "1 MB": (262_144, 20), "4 MB": (1_048_576, 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--halo", type=int, default=512, help="rows and columns")
    parser.add_argument("--mpi4jax", action="store_true")
    parser.add_argument("--programs", type=int, default=0)
    parser.add_argument("--mistakes", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    if options.programs or options.mistakes:
        draw(options.first, options.programs, options.mistakes)
    elif options.mpi4jax:
        time_mpi4jax(options)
    else:
        time_ringtrain(options)


def draw(first: int, programs: int, mistakes: int) -> None:
    import ringtrain.jax as hvd

    sys.path.insert(0, str(Path(__file__).parents[2] / "frameworks" / "jax"))
    drawn_programs = importlib.import_module("drawn_programs")

    hvd.init()
    for kind, count, check in (
        ("that match", programs, drawn_programs.require_right),
        ("with a mistake", mistakes, drawn_programs.require_found),
    ):
        begun = time.monotonic()
        for seed in range(first, first + count):
            check(seed)
            if seed % 100 == 99:
                jax.clear_caches()
                if hvd.rank() == 0:
                    print(f"{seed + 1 - first} programs {kind}, {time.monotonic() - begun:.0f} s", flush=True)


def time_ringtrain(options: argparse.Namespace) -> None:
    import ringtrain.jax as hvd

    hvd.init()
    from mpi4py import MPI

    rank, size, comm = hvd.rank(), hvd.size(), MPI.COMM_WORLD
    exchange = lambda x, source, dest, tag: hvd.sendrecv(x, x, source, dest, tag, tag)  # noqa: E731
    ways = of_jit(exchange, rank, size, options.halo)
    if size == 2:
        for name, (floats, times) in SIZES.items():
            sent, received = np.ones(floats, np.float32), np.empty(floats, np.float32)

            def of_mpi(times: int = times, sent: Any = sent, received: Any = received) -> None:
                for _ in range(times):
                    comm.Sendrecv(sent, 1 - rank, 0, received, 1 - rank, 0)

            ways[f"{name}, Sendrecv of mpi4py"] = (of_mpi, times)
    report(ways, options.rounds, hvd.barrier, rank)


def time_mpi4jax(options: argparse.Namespace) -> None:
    import mpi4jax
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    def exchange(x: Any, source: int | None, dest: int | None, tag: int) -> Any:
        nobody = MPI.PROC_NULL
        ends = (nobody if one is None else one for one in (source, dest))
        result = mpi4jax.sendrecv(x, x, *ends, sendtag=tag, recvtag=tag, comm=comm)
        return result[0] if isinstance(result, tuple) else result

    ways = of_jit(exchange, comm.Get_rank(), comm.Get_size(), options.halo)
    report(ways, options.rounds, comm.Barrier, comm.Get_rank())


Exchange = Callable[[Any, Any, Any, int], Any]
Ways = dict[str, tuple[Callable[[], None], int]]


def of_jit(exchange: Exchange, rank: int, size: int, points: int) -> Ways:
    ways: Ways = {}
    if size == 2:
        for name, (floats, times) in SIZES.items():
            x = jnp.ones(floats, jnp.float32)
            one = jax.jit(lambda x: exchange(x, 1 - rank, 1 - rank, 0))
            many = jax.jit(
                lambda x, n=times: jax.lax.fori_loop(0, n, lambda _, y: exchange(y, 1 - rank, 1 - rank, 0), x)
            )
            ways[f"{name}, a program each"] = (functools.partial(repeat, one, x, times), times)
            ways[f"{name}, a loop in a program"] = (functools.partial(repeat, many, x, 1), times)
    plate = jnp.ones((points // size, points), jnp.float32)
    above, below = rank - 1 if rank > 0 else None, rank + 1 if rank < size - 1 else None

    def step(u: Any) -> Any:
        first, last = exchange(u[-1], above, below, 0), exchange(u[0], below, above, 1)
        padded = jnp.pad(jnp.concatenate([first[None], u, last[None]]), ((0, 0), (1, 1)))
        around = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
        return u + 0.125 * (around - 4 * u)

    steps = jax.jit(lambda u: jax.lax.fori_loop(0, 100, lambda _, u: step(u), u))
    ways[f"a step of {points} x {points} points"] = (functools.partial(repeat, steps, plate, 1), 100)
    return ways


def repeat(program: Callable[[Any], Any], x: Any, times: int) -> None:
    for _ in range(times):
        x = program(x)
        x.block_until_ready()


def report(ways: Ways, rounds: int, barrier: Callable[[], Any], rank: int) -> None:
    """Of each round all ways, one after the other."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, (work, count) in ways.items():
            barrier()
            begun = time.perf_counter()
            work()
            if number > 0:
                times[name].append(1e6 * (time.perf_counter() - begun) / count)
    if rank == 0:
        for name, every in times.items():
            print(f"{name:34} shortest {min(every):8.1f} us, median {statistics.median(every):8.1f}", flush=True)


if __name__ == "__main__":
    main()
