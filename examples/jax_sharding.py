"""Train a small transformer in plain JAX on the devices of all ranks, split over data, over the model, or both.

    ringrun -np 4 python examples/jax_sharding.py --model-parallel 2

Needs jax. Only hvd.distributed.init() is of ringtrain: the mesh, the shardings and the compiled step are those of any
JAX program, and XLA decides which collectives they need. The transformer learns to write this file. With --gloo JAX's
own collectives run in place of those of ringtrain, on one host, for comparison.
"""

import argparse
import socket
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ringtrain.jax as hvd  # under mpirun and srun before jax

Params = dict[str, Any]
CHARACTERS = 128


def main() -> None:
    options = parse_options()
    join_with_gloo() if options.gloo else hvd.distributed.init()

    # Each process has one device. Those of a row of the mesh hold parts of one model, those of a column the same part.
    devices = np.array(jax.devices()).reshape(-1, options.model_parallel)
    mesh = Mesh(devices, ("data", "model"))
    params = {
        name: place(array, mesh, sharding_of(name))
        for name, array in new_transformer(options.width, options.layers).items()
    }
    with open(__file__, "rb") as file:
        text = np.frombuffer(file.read(), np.uint8).astype(np.int32)

    step = jax.jit(train_one_step, static_argnames="layers", donate_argnums=0)
    begun = last_s = time.perf_counter()
    characters = options.batch_size * len(devices) * options.context  # of a step
    for number in range(options.steps):
        batch = draw_batch(text, number, options.batch_size * len(devices), options.context)
        params, loss = step(params, place(batch, mesh, PartitionSpec("data")), options.lr, layers=options.layers)
        if jax.process_index() == 0 and (number + 1) % 20 == 0:
            line, now_s = f"step {number + 1:4}: loss {float(loss):.6f}", time.perf_counter()
            print(f"{line}, {20 * characters / (now_s - last_s):,.0f} characters/s", flush=True)
            last_s = now_s
    if jax.process_index() == 0:
        print(
            f"{1e3 * (time.perf_counter() - begun) / options.steps:.1f} ms a step on {devices.shape} devices",
            flush=True,
        )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model-parallel", type=int, default=1, metavar="N", help="ranks that share a model (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=100, help="updates of the parameters (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="pieces of text for each model (default %(default)s)")
    parser.add_argument("--context", type=int, default=32, help="characters of a piece (default %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="numbers for each character (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the transformer (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.3, help="learning rate (default %(default)s)")
    parser.add_argument("--gloo", action="store_true", help="run JAX's own collectives, for comparison")
    return parser.parse_args()


def join_with_gloo() -> None:
    """Tell all ranks where rank 0 listens, as jax.distributed needs it."""
    hvd.init()
    with socket.create_server(("", 0)) as free:
        port = hvd.broadcast_object(free.getsockname()[1], 0)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", hvd.size(), hvd.rank(), cluster_detection_method="deactivate")


def place(array: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Each process gives the part of its own device."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda part: array[part])


def sharding_of(name: str) -> PartitionSpec:
    """As in Megatron: of two matrices in a row the first is split by columns and the second by rows; XLA adds a sum."""
    if name.endswith(("queries", "keys", "values", "up")):
        return PartitionSpec(None, "model")
    if name.endswith(("mixed", "down")):
        return PartitionSpec("model", None)
    return PartitionSpec()


def new_transformer(width: int, layers: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)  # the same numbers on all ranks
    shapes = {"characters": (CHARACTERS, width), "places": (1024, width), "scores": (width, CHARACTERS)}
    for layer in range(layers):
        for name in ("queries", "keys", "values", "mixed"):
            shapes[f"{layer}.{name}"] = (width, width)
        shapes |= {f"{layer}.up": (width, 4 * width), f"{layer}.down": (4 * width, width)}
    return {name: (random.normal(size=shape) * shape[0] ** -0.5).astype(np.float32) for name, shape in shapes.items()}


def loss_of(params: Params, batch: jax.Array, layers: int) -> jax.Array:
    text, following = batch[:, :-1], batch[:, 1:]
    hidden = params["characters"][text] + params["places"][: text.shape[1]]
    for layer in range(layers):
        hidden = hidden + attention(params, layer, normalized(hidden))
        hidden = hidden + jax.nn.gelu(normalized(hidden) @ params[f"{layer}.up"]) @ params[f"{layer}.down"]
    scores = jax.nn.log_softmax(normalized(hidden) @ params["scores"])
    return -jnp.take_along_axis(scores, following[..., None], -1).mean()


def normalized(hidden: jax.Array) -> jax.Array:
    return hidden * jax.lax.rsqrt((hidden**2).mean(-1, keepdims=True) + 1e-5)


def attention(params: Params, layer: int, hidden: jax.Array, heads: int = 4) -> jax.Array:
    pieces, length, width = hidden.shape
    queries, keys, values = (
        (hidden @ params[f"{layer}.{name}"]).reshape(pieces, length, heads, width // heads)
        for name in ("queries", "keys", "values")
    )
    scores = jnp.einsum("pqhw,pkhw->phqk", queries, keys) * (width // heads) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("phqk,pkhw->pqhw", jax.nn.softmax(scores), values).reshape(pieces, length, width)
    result: jax.Array = mixed @ params[f"{layer}.mixed"]
    return result


def train_one_step(params: Params, batch: jax.Array, rate: float, layers: int) -> tuple[Params, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(params, batch, layers)
    return jax.tree.map(lambda value, gradient: value - rate * gradient, params, gradients), loss


def draw_batch(text: np.ndarray, number: int, pieces: int, context: int) -> np.ndarray:
    """Return int32[pieces, context + 1], the same on all ranks: each gives JAX the part that its device needs."""
    begins = np.random.default_rng(number).integers(0, len(text) - context, pieces)
    return np.stack([text[begin : begin + context + 1] for begin in begins])


if __name__ == "__main__":
    main()
