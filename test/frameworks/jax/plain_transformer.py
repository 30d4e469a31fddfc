"""A tiny transformer in plain JAX, trained on the devices of all processes: data-parallel, then tensor-parallel.

The program knows nothing of what carries its collectives. The process has joined the others before it begins.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WIDTH, HEADS, CONTEXT, LETTERS, STEPS = 32, 4, 16, 50, 10
# As in Megatron: of two matrices in a row the first is split by columns and the second by rows.
TENSOR = {"qkv": (None, None, "i"), "mixed": ("i", None), "up": (None, "i"), "down": ("i", None)}


def train(parallel):
    mesh = Mesh(np.array(jax.devices()), ("i",))

    def place(array, *spec):
        return jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda part: array[part]
        )

    random = np.random.default_rng(0)
    shapes = {
        **{"letters": (LETTERS, WIDTH), "places": (CONTEXT, WIDTH), "scores": (WIDTH, LETTERS)},
        **{"qkv": (3, WIDTH, WIDTH), "mixed": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)},
    }
    params = {
        name: place(
            (random.normal(size=shape) * 0.2).astype("float32"), *(TENSOR.get(name, ()) if parallel == "tensor" else ())
        )
        for name, shape in shapes.items()
    }
    text = random.integers(0, LETTERS, (8, CONTEXT + 1)).astype("int32")
    batch = place(text, *(("i",) if parallel == "data" else ()))

    @jax.jit
    def step(params, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree_util.tree_map(lambda value, gradient: value - 0.1 * gradient, params, gradients), loss

    for _ in range(STEPS):
        params, loss = step(params, batch)
    if jax.process_index() == 0:
        print(f"{parallel}: loss {float(loss):.7f} on {jax.device_count()} devices", flush=True)


def loss_of(params, batch):
    text, following = batch[:, :-1], batch[:, 1:]
    hidden = params["letters"][text] + params["places"]
    hidden = hidden + attention(params, hidden)
    hidden = hidden + jax.nn.gelu(hidden @ params["up"]) @ params["down"]
    scores = jax.nn.log_softmax(hidden @ params["scores"])
    return -jnp.take_along_axis(scores, following[..., None], -1).mean()


def attention(params, hidden):
    pieces = hidden.shape[0]
    queries, keys, values = jnp.einsum("ptw,kwv->kptv", hidden, params["qkv"]).reshape(3, pieces, CONTEXT, HEADS, -1)
    scores = jnp.einsum("pqhw,pkhw->phqk", queries, keys)
    scores = jnp.where(jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("phqk,pkhw->pqhw", jax.nn.softmax(scores), values)
    return mixed.reshape(pieces, CONTEXT, WIDTH) @ params["mixed"]


if __name__ == "__main__":
    train("data")
    train("tensor")
