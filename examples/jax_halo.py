"""Compute how a plate cools, in plain JAX: each rank has some rows, and asks its neighbours for theirs inside jit.

    ringrun -np 4 python examples/jax_halo.py --plot heat.png

Needs jax, and matplotlib for --plot. A step of the heat equation needs one row of the rank above and one of the rank
below, which `hvd.sendrecv` brings within the compiled loop. The numbers are the same, bit for bit, with any number of
ranks.
"""

import argparse
import hashlib
import time

import jax
import jax.numpy as jnp
import numpy as np

import ringtrain.jax as hvd

COLD = 0.0  # around the plate


def main() -> None:
    options = parse_options()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    rows = options.points // size
    if rows * size != options.points:
        raise SystemExit(f"{options.points} rows cannot be split evenly over {size} ranks: give other --points")

    plate = jnp.asarray(hot_plate(options.points)[rank * rows : (rank + 1) * rows])
    cool = jax.jit(cooled, static_argnums=1)
    cool(plate, options.steps).block_until_ready()  # compiles
    hvd.barrier()
    begun = time.perf_counter()
    plate = cool(plate, options.steps).block_until_ready()
    step_us = 1e6 * (time.perf_counter() - begun) / options.steps

    whole = np.asarray(hvd.gather(plate, root_rank=0))
    if rank == 0:
        bits = hashlib.sha256(whole.tobytes()).hexdigest()[:16]
        print(
            f"{options.points} x {options.points} points after {options.steps} steps: mean {whole.mean():.6f}",
            flush=True,
        )
        print(f"bits {bits}, {step_us:.0f} us a step on {size} ranks", flush=True)
        if options.plot:
            draw(whole, options.plot)


def cooled(plate: jax.Array, steps: int) -> jax.Array:
    plate = jax.lax.fori_loop(0, steps, lambda _, plate: step(plate), plate)
    return plate


def step(plate: jax.Array) -> jax.Array:
    """One step of explicit Euler: each point moves half of the way to the mean of its four neighbours."""
    rank, size = hvd.rank(), hvd.size()
    above = rank - 1 if rank > 0 else None
    below = rank + 1 if rank < size - 1 else None
    edge = jnp.full_like(plate[0], COLD)
    first = hvd.sendrecv(plate[-1], edge, source=above, dest=below, sendtag=0, recvtag=0)
    last = hvd.sendrecv(plate[0], edge, source=below, dest=above, sendtag=1, recvtag=1)
    padded = jnp.pad(jnp.concatenate([first[None], plate, last[None]]), ((0, 0), (1, 1)), constant_values=COLD)
    vertical = padded[:-2, 1:-1] + padded[2:, 1:-1]
    horizontal = padded[1:-1, :-2] + padded[1:-1, 2:]
    return plate + 0.125 * (vertical + horizontal - 4 * plate)


def hot_plate(points: int) -> np.ndarray:
    """Cold, with a hot ring and a hot square."""
    y, x = np.meshgrid(*2 * [np.linspace(-1, 1, points)], indexing="ij")
    radius = np.hypot(x, y)
    hot = ((radius > 0.5) & (radius < 0.7)) | ((abs(x) < 0.2) & (abs(y) < 0.2))
    return hot.astype(np.float32) * 100


def draw(plate: np.ndarray, file: str) -> None:
    import matplotlib.pyplot as plt

    figure, (before, after) = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
    for axes, values, title in ((before, hot_plate(len(plate)), "at first"), (after, plate, "at the end")):
        axes.imshow(values, cmap="inferno", vmin=0, vmax=100)
        axes.set_title(title)
        axes.axis("off")
    figure.savefig(file, dpi=100)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--points", type=int, default=512, metavar="N", help="rows and columns of the plate (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="(%(default)s)")
    parser.add_argument("--plot", metavar="FILE", help="draw the plate at first and at the end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
