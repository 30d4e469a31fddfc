"""Train a small network on handwritten digits that are in a DataFrame of Spark, in NumPy.

    python examples/spark_digits.py --ranks 2

Needs pyspark and Java, pyarrow and pandas, and scikit-learn (the digits). Each rank trains on one partition. All ranks
have the same network after each step, and rank 0 brings it back to the driver.
"""

import argparse
from collections.abc import Iterator

import numpy as np
import pyarrow
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

import ringtrain as hvd
import ringtrain.spark
from ringtrain.optim import SGD

Parameters = list[np.ndarray]
TEST_IMAGES = 360


def main() -> None:
    options = parse_options()
    spark = SparkSession.builder.master(f"local[{options.ranks}]").config("spark.ui.enabled", "false").getOrCreate()
    digits = load_digits()
    images, labels = digits.data / 16, digits.target
    table = pyarrow.table({"image": list(images[TEST_IMAGES:]), "label": labels[TEST_IMAGES:]})
    data = spark.createDataFrame(table.to_pandas()).repartition(options.ranks)

    network, *_ = ringtrain.spark.run_on(data, train, (options.epochs, options.batch_size, options.lr), batches=True)

    hits = np.mean(outputs_of(network, images[:TEST_IMAGES])[1].argmax(1) == labels[:TEST_IMAGES])
    print(f"test accuracy {hits:.3f} after training on {options.ranks} ranks", flush=True)
    spark.stop()


def train(batches: Iterator[pyarrow.RecordBatch], epochs: int, batch_size: int, lr: float) -> Parameters:
    """Return the network, which is the same on all ranks."""
    hvd.init()
    own = pyarrow.Table.from_batches(list(batches))
    images, labels = np.stack(own["image"].to_numpy()), own["label"].to_numpy()

    network = new_network(np.random.default_rng(hvd.rank()))
    hvd.broadcast_parameters(network, root_rank=0)
    optimizer = hvd.DistributedOptimizer(SGD(lr, momentum=0.9))

    # Partitions differ by some rows: all ranks take as many steps as the one with the fewest rows can.
    steps = int(hvd.allreduce(np.array(len(images) // batch_size), op=hvd.Min))
    shuffler = np.random.default_rng(hvd.rank())
    for epoch in range(epochs):
        order = shuffler.permutation(len(images))
        losses = []
        for step in range(steps):
            batch = order[step * batch_size : (step + 1) * batch_size]
            gradients, loss = gradients_and_loss(network, images[batch], labels[batch])
            optimizer.step(network, gradients)
            losses.append(loss)
        loss = float(hvd.allreduce(np.mean(losses)))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2}: loss {loss:.4f}")
    return network


def new_network(generator: np.random.Generator, hidden: int = 64) -> Parameters:
    """Return the weights and biases of two layers: 64 pixels, hidden units, 10 digits."""
    first, second = generator.normal(0, 0.18, (64, hidden)), generator.normal(0, 0.18, (hidden, 10))
    return [first, np.zeros(hidden), second, np.zeros(10)]


def outputs_of(network: Parameters, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden units of each image and its ten logits."""
    first, first_bias, second, second_bias = network
    hidden = np.maximum(images @ first + first_bias, 0)
    return hidden, hidden @ second + second_bias


def gradients_and_loss(network: Parameters, images: np.ndarray, labels: np.ndarray) -> tuple[Parameters, float]:
    """Return the gradients of the cross-entropy, averaged over the batch, and the cross-entropy."""
    hidden, logits = outputs_of(network, images)
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.mean(np.log(probabilities[rows, labels]))
    probabilities[rows, labels] -= 1
    of_logits = probabilities / len(labels)
    of_hidden = of_logits @ network[2].T * (hidden > 0)
    return [images.T @ of_hidden, of_hidden.sum(0), hidden.T @ of_logits, of_logits.sum(0)], float(loss)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="ranks, and partitions of the DataFrame")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images of a rank in a step")
    parser.add_argument("--lr", type=float, default=0.1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
