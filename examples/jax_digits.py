"""Train a small network on handwritten digits, in JAX with optax, on any number of ranks.

    ringrun -np 2 python examples/jax_digits.py

Needs jax, optax, scikit-learn (the digits), tqdm (the progress bar) and, for --plot, matplotlib. Each step is one
compiled program, in which the gradients are averaged over the ranks. The code for several ranks is in
main() and in resume(); the rest is plain JAX.
"""

import argparse
import os
import pickle
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import ringtrain.jax as hvd

Params = list[dict[str, jax.Array]]


def main() -> None:
    options = parse_options()
    hvd.init()
    train_images, test_images, train_labels, test_labels = load_data()

    # A batch of all ranks is larger than that of one, and so may its steps be: after a gentle start, by as much.
    steps = options.epochs * (len(train_labels) // (options.batch_size * hvd.size()))
    rate = optax.warmup_cosine_decay_schedule(options.lr, options.lr * hvd.size() ** 0.5, steps // 10, steps)
    optimizer = hvd.distribute(
        optax.adamw(rate),
        backward_passes_per_step=options.accumulate,
        average_aggregated_gradients=True,
        compression=hvd.Compression.bf16 if options.bf16 else hvd.Compression.none,
    )

    # Every rank makes a network of its own; after resume() all have that of rank 0.
    params = new_network(jax.random.key(options.seed + hvd.rank()))
    params, state, accuracies = resume(options.checkpoint, params, optimizer.init(params))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels, options.bf16)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    shuffler = np.random.default_rng(options.seed)  # the same permutations on all ranks
    permutations = [shuffler.permutation(len(train_labels)) for _ in range(options.epochs)]
    per_epoch = len(train_labels) // (options.batch_size * hvd.size())
    done = len(accuracies)
    total = options.epochs * per_epoch
    with tqdm(total=total, initial=done * per_epoch, unit=" steps", disable=hvd.rank() != 0) as progress:
        for epoch in range(done, options.epochs):
            # Each rank trains on its own part of the images, another one in each epoch.
            mine, began_s = permutations[epoch][hvd.rank() :: hvd.size()], time.perf_counter()
            for batch in np.split(mine[: per_epoch * options.batch_size], per_epoch):
                params, state, loss = step(params, state, train_images[batch], train_labels[batch])
                progress.update()
            images_per_s = hvd.size() * per_epoch * options.batch_size / (time.perf_counter() - began_s)
            accuracies.append(accuracy_of(params, test_images, test_labels))
            if hvd.rank() == 0:
                line = f"epoch {epoch + 1:2}: loss {loss:.3f}, test accuracy {accuracies[-1]:.3f}"
                progress.write(f"{line}, {images_per_s:,.0f} images/s")
                save(options.checkpoint, params, state, accuracies)

    hvd.check_replicas(params)
    accuracy = accuracy_of(params, test_images, test_labels)
    if hvd.rank() == 0:
        plot(options.plot, accuracies)
        print(f"test accuracy {accuracy:.3f} on {hvd.size()} ranks", flush=True)
    hvd.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training images (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="images per step and rank (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate of one rank (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the order (default %(default)s)")
    parser.add_argument("--bf16", action="store_true", help="compute and send the gradients in 16 bits")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="update once in N steps")
    parser.add_argument("--checkpoint", metavar="FILE", help="save each epoch here, and go on from here if it exists")
    parser.add_argument("--plot", metavar="FILE", help="draw the test accuracy of each epoch, such as accuracy.png")
    return parser.parse_args()


def load_data() -> list[np.ndarray]:
    """Return training and test images, float32[count, 64] from 0 to 1, and training and test labels from 0 to 9."""
    images, labels = load_digits(return_X_y=True)
    parts: list[np.ndarray] = train_test_split(images.astype(np.float32) / 16, labels, test_size=0.2, random_state=0)
    return parts


def new_network(key: jax.Array) -> Params:
    sizes = [64, 128, 128, 10]
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"weight": jax.random.normal(one, (rows, columns)) * (2 / rows) ** 0.5, "bias": jnp.zeros(columns)}
        for one, rows, columns in zip(keys, sizes, sizes[1:], strict=False)
    ]


def scores_of(params: Params, images: jax.Array) -> jax.Array:
    *hidden, last = params
    for layer in hidden:
        images = jax.nn.relu(images @ layer["weight"] + layer["bias"])
    return images @ last["weight"] + last["bias"]


def loss_of(params: Params, images: jax.Array, labels: jax.Array, in_16_bits: bool) -> jax.Array:
    if in_16_bits:
        params, images = jax.tree.map(lambda array: array.astype(jnp.bfloat16), (params, images))
    scores = scores_of(params, images).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, labels))


def accuracy_of(params: Params, images: np.ndarray, labels: np.ndarray) -> float:
    """Each rank looks at its share of the images, and all count their hits together."""
    mine = slice(hvd.rank(), None, hvd.size())
    hits = (scores_of(params, jnp.asarray(images[mine])).argmax(axis=1) == labels[mine]).sum()
    return float(hvd.allreduce(hits, op=hvd.Sum, name="hits")) / len(labels)


def resume(path: str | None, params: Params, state: Any) -> tuple[Params, Any, list[float]]:
    """Rank 0 reads the checkpoint, if there is one, and the others get everything from rank 0.

    So it does not matter how many ranks there were before, nor where the others run. Returns the parameters, the state
    of the optimizer, and the test accuracies of the epochs that are done.
    """
    accuracies: list[float] = []
    if hvd.rank() == 0 and path is not None and os.path.exists(path):
        with open(path, "rb") as file:
            params, leaves, accuracies = pickle.load(file)
        state = jax.tree.unflatten(jax.tree.structure(state), leaves)
    params, state = hvd.broadcast_parameters((params, state), root_rank=0)
    return params, state, hvd.broadcast_object(accuracies, root_rank=0)


def save(path: str | None, params: Params, state: Any, accuracies: list[float]) -> None:
    if path is None:
        return
    on_host = jax.tree.map(np.asarray, (params, jax.tree.leaves(state)))
    with open(f"{path}.part", "wb") as file:
        pickle.dump((*on_host, accuracies), file)
    os.replace(f"{path}.part", path)  # a job that is stopped now leaves the old checkpoint or the new one, whole


def plot(path: str | None, accuracies: list[float]) -> None:
    if path is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    pyplot.plot(range(1, len(accuracies) + 1), accuracies, marker="o")
    pyplot.gca().xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    pyplot.xlabel("epoch")
    pyplot.ylabel("test accuracy")
    pyplot.title(f"Handwritten digits on {hvd.size()} ranks")
    pyplot.savefig(path)


if __name__ == "__main__":
    main()
