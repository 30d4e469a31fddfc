"""Train a small convolutional network on handwritten digits, with MXNet's Gluon or Module.

    ringrun -np 2 python examples/mxnet_mnist.py
    ringrun -np 2 python examples/mxnet_mnist.py --mode module
    ringrun -np 2 python examples/mxnet_mnist.py --mnist FOLDER

Needs MXNet 1.9.1 (`pip install "ringtrain[mxnet]"`). The flags are those of Horovod's mxnet_mnist.py. The images are
the 1,797 digits of scikit-learn, or with --mnist those of MNIST, of which FOLDER has the four idx files. MXNet on a CPU
cannot multiply matrices of float16: --dtype float16 computes in float32 and sends the gradients as float16.
"""

import argparse
import time
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import ringtrain.mxnet as hvd

WANTED = 0.96


def main() -> None:
    options = parse_options()
    hvd.init()
    mx.random.seed(options.seed + hvd.rank())
    train, test = load_mnist(options) if options.mnist else load_digits(options)
    accuracy = train_gluon(options, train, test) if options.mode == "gluon" else train_module(options, train, test)
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.4f} on {hvd.size()} ranks")
        assert accuracy > WANTED, f"the accuracy is {accuracy:.4f}, less than {WANTED}"


def train_gluon(options: argparse.Namespace, train: Any, test: Any) -> float:
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(20, 3, padding=1, activation="relu"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Conv2D(50, 3, padding=1, activation="relu"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Dense(256, activation="relu"),
        gluon.nn.Dense(10),
    )
    net.initialize(mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2))
    net.hybridize()

    # The shapes of the parameters are known after the first batch: then they are broadcast.
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": options.lr * hvd.size(), "momentum": options.momentum},
        compression=compression_of(options),
        gradient_predivide_factor=options.gradient_predivide_factor,
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    accuracy = 0.0
    for epoch in range(options.epochs):
        began_s = time.perf_counter()
        train.reset()
        losses = []
        for batch in train:
            with autograd.record():
                loss = loss_of(net(batch.data[0]), batch.label[0])
            loss.backward()
            trainer.step(options.batch_size)
            losses.append(loss.mean())
        mx.nd.waitall()
        images_per_s = len(losses) * options.batch_size * hvd.size() / (time.perf_counter() - began_s)
        mean = hvd.allreduce(mx.nd.stack(*losses).mean(), name="loss").asscalar()  # of all ranks
        accuracy = evaluate(net, test)
        if hvd.rank() == 0:
            line = f"epoch {epoch + 1:2}: loss {mean:.4f}, test accuracy {accuracy:.4f}"
            print(f"{line}, {images_per_s:,.0f} images/s", flush=True)
    return accuracy


def evaluate(net: Any, data: Any) -> float:
    metric = mx.metric.Accuracy()
    data.reset()
    for batch in data:
        metric.update([batch.label[0]], [net(batch.data[0])])
    return float(metric.get()[1])


def train_module(options: argparse.Namespace, train: Any, test: Any) -> float:
    layer = mx.sym.var("data")
    for number, channels in enumerate((20, 50)):
        layer = mx.sym.Convolution(layer, num_filter=channels, kernel=(3, 3), pad=(1, 1), name=f"convolution{number}")
        layer = mx.sym.Pooling(mx.sym.relu(layer), pool_type="max", kernel=(2, 2), stride=(2, 2))
    layer = mx.sym.relu(mx.sym.FullyConnected(layer, num_hidden=256, name="hidden"))
    layer = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(layer, num_hidden=10, name="out"), name="softmax")
    module = mx.mod.Module(layer)
    module.bind(train.provide_data, train.provide_label)
    module.init_params(mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2))
    parameters, states = module.get_params()
    hvd.broadcast_parameters(parameters, root_rank=0)
    hvd.broadcast_parameters(states, root_rank=0)
    module.set_params(parameters, states)
    optimizer = mx.optimizer.create(
        "sgd",
        learning_rate=options.lr * hvd.size(),
        momentum=options.momentum,
        rescale_grad=1 / options.batch_size,  # gradients become averages over the ranks
    )
    distributed = hvd.DistributedOptimizer(optimizer, options.gradient_predivide_factor)
    loss, batches, began_s = mx.metric.CrossEntropy(), 0, time.perf_counter()

    def count_batch(_: Any) -> None:
        nonlocal batches
        batches += 1

    def print_epoch(epoch: int, *_: Any) -> None:
        nonlocal batches, began_s
        images_per_s = batches * options.batch_size * hvd.size() / (time.perf_counter() - began_s)
        accuracy = dict(module.score(test, "acc"))["accuracy"]
        if hvd.rank() == 0:
            line = f"epoch {epoch + 1:2}: loss {loss.get()[1]:.4f} of rank 0, test accuracy {accuracy:.4f}"
            print(f"{line}, {images_per_s:,.0f} images/s", flush=True)
        batches, began_s = 0, time.perf_counter()

    module.fit(
        train,
        eval_metric=loss,
        num_epoch=options.epochs,
        optimizer=distributed,
        kvstore=None,
        batch_end_callback=count_batch,
        epoch_end_callback=print_epoch,
    )
    return float(dict(module.score(test, "acc"))["accuracy"])


def compression_of(options: argparse.Namespace) -> Any:
    if options.fp16_allreduce or options.dtype == "float16":
        return hvd.Compression.fp16
    return hvd.Compression.none


def load_mnist(options: argparse.Namespace) -> tuple[Any, Any]:
    """Each rank has a share of the images, and all have those of the test."""
    common = {"input_shape": (1, 28, 28), "batch_size": options.batch_size, "flat": False}
    train = mx.io.MNISTIter(
        image=f"{options.mnist}/train-images-idx3-ubyte",
        label=f"{options.mnist}/train-labels-idx1-ubyte",
        shuffle=True,
        num_parts=hvd.size(),
        part_index=hvd.rank(),
        **common,
    )
    test = mx.io.MNISTIter(
        image=f"{options.mnist}/t10k-images-idx3-ubyte", label=f"{options.mnist}/t10k-labels-idx1-ubyte", **common
    )
    return train, test


def load_digits(options: argparse.Namespace) -> tuple[Any, Any]:
    from sklearn import datasets

    digits = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, None] / 16).astype("float32")
    labels = digits.target[order].astype("float32")
    held_out = 360
    # As many for each rank, which all take as many steps.
    share = (len(labels) - held_out) // hvd.size()
    own = slice(held_out + hvd.rank() * share, held_out + (hvd.rank() + 1) * share)
    train = mx.io.NDArrayIter(
        images[own],
        labels[own],
        options.batch_size,
        shuffle=True,
        last_batch_handle="discard",
        label_name="softmax_label",
    )
    test = mx.io.NDArrayIter(images[:held_out], labels[:held_out], 60, label_name="softmax_label")
    return train, test


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["gluon", "module"], default="gluon")
    parser.add_argument("--mnist", metavar="FOLDER", help="where the idx files of MNIST are")
    parser.add_argument("--batch-size", type=int, default=32, help="images of a rank in a step (default: 32)")
    parser.add_argument(
        "--dtype", choices=["float32", "float16"], default="float32", help="of the gradients on the way"
    )
    parser.add_argument("--epochs", type=int, default=15, help="passes over the images (default: 15)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate for one rank (default: 0.01)")
    parser.add_argument("--momentum", type=float, default=0.9, help="(default: 0.9)")
    parser.add_argument("--no-cuda", action="store_true", help="accepted: all runs on CPUs")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send the gradients as float16")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0, help="see DistributedTrainer")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
