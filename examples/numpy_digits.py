"""Train a small network on handwritten digits, in NumPy, on any number of ranks.

    ringrun -np 2 python examples/numpy_digits.py

Needs scikit-learn (the digits), tqdm (the progress bar) and, for --plot, matplotlib. However many ranks share the
work, the same network comes out: every step uses the gradient of the whole batch.
"""

import argparse
import time

import numpy as np
from tqdm import tqdm

import ringtrain as hvd
from ringtrain.optim import SGD


def main() -> None:
    options = parse_options()
    hvd.init()
    train_images, test_images, train_labels, test_labels = load_data()

    # Every rank makes a network of its own; after the broadcast all have that of rank 0.
    network = new_network(np.random.default_rng(options.seed + hvd.rank()))
    hvd.broadcast_parameters(network, root_rank=0)

    # Each rank divides its gradients by the size of the whole batch, so their sum is the mean over the batch,
    # even when the batch cannot be cut into equal slices.
    optimizer = hvd.DistributedOptimizer(SGD(options.lr, momentum=0.9), op=hvd.Sum)

    shuffler = np.random.default_rng(options.seed)  # the same permutations on all ranks
    losses = []
    with tqdm(total=options.epochs * len(train_labels), unit=" images", disable=hvd.rank() != 0) as progress:
        for epoch in range(options.epochs):
            permutation, began_s = shuffler.permutation(len(train_labels)), time.perf_counter()
            for start in range(0, len(permutation), options.batch_size):
                batch = permutation[start : start + options.batch_size]
                mine = batch[hvd.rank() :: hvd.size()]
                gradients = gradients_of(network, train_images[mine], train_labels[mine], batch_size=len(batch))
                optimizer.step(network, gradients)
                progress.update(len(batch))
            images_per_s = len(train_labels) / (time.perf_counter() - began_s)
            loss, accuracy = evaluate(network, test_images, test_labels)
            losses.append(loss)
            if hvd.rank() == 0:
                line = f"epoch {epoch + 1:2}: test loss {loss:.4f}, test accuracy {accuracy:.3f}"
                progress.write(f"{line}, {images_per_s:,.0f} images/s")

    _, accuracy = evaluate(network, test_images, test_labels)
    if hvd.rank() == 0:
        if options.save:
            np.savez(options.save, *network)
        if options.plot:
            plot(losses, options.plot)
        print(f"test loss {bars(losses)} {losses[-1]:.4f}")
        print(f"test accuracy {accuracy:.3f} on {hvd.size()} ranks", flush=True)
    hvd.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, all ranks (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the order (default %(default)s)")
    parser.add_argument("--plot", metavar="FILE", help="draw the test loss of each epoch, such as loss.png")
    parser.add_argument("--save", metavar="FILE", help="save the weights, such as params.npz")
    return parser.parse_args()


def load_data() -> list[np.ndarray]:
    """Return training and test images, float64[count, 64] from 0 to 1, and training and test labels from 0 to 9."""
    # servers of kvstore_digits.py never come here, and start a second earlier
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    parts: list[np.ndarray] = train_test_split(images / 16, labels, test_size=0.2, random_state=0)
    return parts


def new_network(random: np.random.Generator) -> list[np.ndarray]:
    """Return the weights and biases of a network with one hidden layer: 64 pixels, 64 hidden units, 10 digits."""
    return [
        random.normal(scale=(2 / 64) ** 0.5, size=(64, 64)),
        np.zeros(64),
        random.normal(scale=(2 / 64) ** 0.5, size=(64, 10)),
        np.zeros(10),
    ]


def forward(network: list[np.ndarray], images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden units of each image and the probabilities of its ten digits."""
    hidden_weights, hidden_biases, digit_weights, digit_biases = network
    hidden = np.maximum(images @ hidden_weights + hidden_biases, 0)
    scores = hidden @ digit_weights + digit_biases
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, exponentials / exponentials.sum(axis=1, keepdims=True)


def gradients_of(
    network: list[np.ndarray], images: np.ndarray, labels: np.ndarray, batch_size: int
) -> list[np.ndarray]:
    """Return the gradients of the cross-entropy, summed over these images and divided by batch_size."""
    hidden, probabilities = forward(network, images)
    score_gradients = (probabilities - np.eye(10)[labels]) / batch_size
    hidden_gradients = (score_gradients @ network[2].T) * (hidden > 0)
    return [
        images.T @ hidden_gradients,
        hidden_gradients.sum(axis=0),
        hidden.T @ score_gradients,
        score_gradients.sum(axis=0),
    ]


def evaluate(network: list[np.ndarray], images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return the mean loss and the accuracy. Each rank looks at its share of the images."""
    mine = slice(hvd.rank(), None, hvd.size())
    _, probabilities = forward(network, images[mine])
    loss = -np.log(probabilities[np.arange(len(probabilities)), labels[mine]]).sum()
    hits = (probabilities.argmax(axis=1) == labels[mine]).sum()
    total_loss, total_hits = hvd.allreduce(np.array([loss, hits]), op=hvd.Sum, name="evaluation")
    return total_loss / len(labels), total_hits / len(labels)


def bars(losses: list[float]) -> str:
    """A bar for each loss, the highest one as high as the line."""
    return "".join("▁▂▃▄▅▆▇█"[round(7 * loss / max(losses))] for loss in losses)


def plot(losses: list[float], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    pyplot.plot(range(1, len(losses) + 1), losses, marker="o")
    pyplot.gca().xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    pyplot.xlabel("epoch")
    pyplot.ylabel("test loss")
    pyplot.title(f"Handwritten digits on {hvd.size()} ranks")
    pyplot.savefig(path)


if __name__ == "__main__":
    main()
