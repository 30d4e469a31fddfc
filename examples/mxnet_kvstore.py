"""Train a small network on handwritten digits through `mx.kv`, of which ringtrain's stores take the place.

    ringrun -np 2 python examples/mxnet_kvstore.py --kv-store dist_sync
    ringrun -np 2 python examples/mxnet_kvstore.py --kv-store ringtrain
    ringrun -np 2 python examples/mxnet_kvstore.py --kv-store dist_sync --gc-type 2bit --lr 0.02 --epochs 30
    ringlaunch -n 2 -s 1 python examples/mxnet_kvstore.py --kv-store dist_async --lr 0.02

Needs MXNet 1.9.1 and scikit-learn. `hvd.replace_kvstore()` is all that is not MXNet's own; scripts without it are run
by `python -m ringtrain.mxnet script.py`.
"""

import argparse
import time
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn import datasets

import ringtrain.mxnet as hvd

WANTED = 0.93


def main() -> None:
    options = parse_options()
    hvd.replace_kvstore()
    store = mx.kv.create(options.kv_store)
    mx.random.seed(options.seed + store.rank)
    images, labels, test_images, test_labels = load_data(store.rank, store.num_workers)

    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(64, activation="relu", in_units=64), gluon.nn.Dense(10, in_units=64))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    compression = {"type": options.gc_type, "threshold": options.gc_threshold} if options.gc_type != "none" else None
    trainer = gluon.Trainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": options.lr, "momentum": 0.9},
        kvstore=store,
        compression_params=compression,
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    # A store adds up, so each step divides by the batch of all workers.
    batch = options.batch_size // store.num_workers
    random = np.random.default_rng(options.seed)
    for epoch in range(options.epochs):
        order, losses, began_s = random.permutation(len(labels)), [], time.perf_counter()
        for start in range(0, len(order) - batch + 1, batch):
            chosen = order[start : start + batch]
            with autograd.record():
                loss = loss_of(net(mx.nd.array(images[chosen])), mx.nd.array(labels[chosen]))
            loss.backward()
            trainer.step(batch if "async" in store.type else batch * store.num_workers)
            losses.append(loss.mean())
        mx.nd.waitall()
        images_per_s = len(losses) * batch * store.num_workers / (time.perf_counter() - began_s)
        predicted = net(mx.nd.array(test_images)).argmax(axis=1).asnumpy()
        accuracy = float((predicted == test_labels).mean())
        if store.rank == 0:
            line = f"epoch {epoch + 1:2}: loss {mx.nd.stack(*losses).mean().asscalar():.4f} of worker 0"
            print(f"{line}, test accuracy {accuracy:.4f}, {images_per_s:,.0f} images/s", flush=True)
    store.barrier()
    if store.rank == 0:
        print(f"test accuracy {accuracy:.4f} with {store.num_workers} workers and {store.type}")
        assert accuracy > WANTED, f"the accuracy is {accuracy:.4f}, less than {WANTED}"


def load_data(rank: int, workers: int) -> tuple[Any, Any, Any, Any]:
    """Each worker has as many images, and all have those of the test."""
    digits = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype("float32")
    labels = digits.target[order].astype("float32")
    held_out = 360
    share = (len(labels) - held_out) // workers
    own = slice(held_out + rank * share, held_out + (rank + 1) * share)
    return images[own], labels[own], images[:held_out], labels[:held_out]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-store", default="dist_sync", help="dist_sync, dist_async, ringtrain, ...")
    parser.add_argument("--batch-size", type=int, default=64, help="images of all workers in a step (default: 64)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--gc-type", choices=["none", "2bit", "1bit"], default="none", help="gradients in fewer bits")
    parser.add_argument("--gc-threshold", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
