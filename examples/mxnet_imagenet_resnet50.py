"""Train a ResNet of MXNet's model zoo, or count the images that it takes in a second.

    ringrun -np 2 python examples/mxnet_imagenet_resnet50.py --benchmark 1 --num-layers 18 --image-shape 3,64,64
    ringrun -np 2 python examples/mxnet_imagenet_resnet50.py --benchmark 1 --kv-store dist_sync
    ringrun -np 8 python examples/mxnet_imagenet_resnet50.py --rec-train train.rec --rec-val val.rec

Needs MXNet 1.9.1. The flags are those of MXNet's and Horovod's scripts of this kind. Without files of records the
images are random numbers, the same in each step. With --kv-store a gluon.Trainer works through that store of
ringtrain instead of a DistributedTrainer. MXNet on a CPU cannot multiply matrices of float16: --dtype float16
computes in float32 and sends the gradients as float16.
"""

import argparse
import math
import time
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon

import ringtrain.mxnet as hvd


def main() -> None:
    options = parse_options()
    hvd.init()
    mx.random.seed(options.seed + hvd.rank())
    shape = tuple(map(int, options.image_shape.split(",")))
    version = int(options.network.removeprefix("resnet-v"))
    net = gluon.model_zoo.vision.get_resnet(version, options.num_layers, classes=options.num_classes)
    net.initialize(mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2))
    net.hybridize(static_alloc=True, static_shape=True)
    net(mx.nd.zeros((1, *shape)))  # tells the shapes of all parameters
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)

    train = batches_of(options, shape, options.rec_train)
    trainer, divisor = trainer_of(options, net)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    speeds = []
    for epoch in range(options.num_epochs):
        set_learning_rate(options, trainer, epoch)
        begun, seen = time.time(), 0
        for images, labels in train():
            with autograd.record():
                loss = loss_of(net(images), labels)
            loss.backward()
            trainer.step(divisor)
            seen += options.batch_size
        mx.nd.waitall()
        speed = seen / (time.time() - begun)
        # The first epoch makes room for all that the others need.
        speeds += [speed] if epoch or options.num_epochs == 1 else []
        total = sum(hvd.allgather_object(speed))
        if hvd.rank() == 0:
            line = f"epoch {epoch + 1:2}: loss {loss.mean().asscalar():.4f} of the last batch"
            print(f"{line}, {speed:.2f} samples/sec per rank, {total:.2f} samples/sec in total", flush=True)
    if options.rec_val:
        print_accuracy(options, net, shape)
    if options.scaling:
        print_scaling(options, net, train, loss_of, sum(speeds) / len(speeds))


def trainer_of(options: argparse.Namespace, net: Any) -> tuple[Any, int]:
    """And by what its steps divide."""
    arguments = {"learning_rate": options.lr, "momentum": options.momentum, "wd": options.wd}
    if options.kv_store.lower() == "none":
        sends_fp16 = options.fp16_allreduce or options.dtype == "float16"
        compression: Any = hvd.Compression.fp16 if sends_fp16 else hvd.Compression.none
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", arguments, compression=compression)
        return trainer, options.batch_size
    hvd.replace_kvstore()
    store = mx.kv.create(options.kv_store)
    return gluon.Trainer(net.collect_params(), "sgd", arguments, kvstore=store), options.batch_size * store.num_workers


def set_learning_rate(options: argparse.Namespace, trainer: Any, epoch: int) -> None:
    """From that of one rank to that of all, over some epochs (arXiv 1706.02677). A store keeps that of its start."""
    if options.kv_store.lower() != "none":
        return
    share = min(1.0, (epoch + 1) / max(1, options.warmup_epochs))
    trainer.set_learning_rate(options.lr * (1 + (hvd.size() - 1) * share))


def batches_of(options: argparse.Namespace, shape: tuple[int, ...], records: str) -> Any:
    """A function that goes over the images of this rank once."""
    if records:
        iterator = mx.io.ImageRecordIter(
            path_imgrec=records,
            data_shape=shape,
            batch_size=options.batch_size,
            shuffle=True,
            num_parts=hvd.size(),
            part_index=hvd.rank(),
        )

        def from_records() -> Any:
            iterator.reset()
            for batch in iterator:
                yield batch.data[0], batch.label[0]

        return from_records
    images = mx.nd.random.uniform(shape=(options.batch_size, *shape))
    labels = mx.nd.random.randint(0, options.num_classes, shape=(options.batch_size,)).astype("float32")
    return lambda: ((images, labels) for _ in range(options.batches))


def print_accuracy(options: argparse.Namespace, net: Any, shape: tuple[int, ...]) -> None:
    metric = mx.metric.Accuracy()
    for images, labels in batches_of(options, shape, options.rec_val)():
        metric.update([labels], [net(images)])
    accuracies = [accuracy for accuracy in hvd.allgather_object(metric.get()[1]) if not math.isnan(accuracy)]
    if hvd.rank() == 0 and accuracies:
        print(f"accuracy {sum(accuracies) / len(accuracies):.4f}")


def print_scaling(options: argparse.Namespace, net: Any, train: Any, loss_of: Any, speed: float) -> None:
    """The share of as many times the speed of rank 0 without the others, who wait."""
    alone = 0.0
    if hvd.rank() == 0:
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": options.lr}, kvstore=None)
        begun = time.time()
        for images, labels in train():
            with autograd.record():
                loss = loss_of(net(images), labels)
            loss.backward()
            trainer.step(options.batch_size)
        mx.nd.waitall()
        alone = options.batches * options.batch_size / (time.time() - begun)
    total = sum(hvd.allgather_object(speed))
    alone = hvd.broadcast_object(alone, root_rank=0)
    if hvd.rank() == 0:
        print(f"scaling: {total / (alone * hvd.size()):.1%} of {hvd.size()} times {alone:.2f} samples/sec")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmark", type=int, default=0, help="accepted: without records it is one")
    parser.add_argument("--network", choices=["resnet-v1", "resnet-v2"], default="resnet-v1")
    parser.add_argument("--num-layers", type=int, choices=[18, 34, 50, 101, 152], default=50)
    parser.add_argument("--num-classes", type=int, default=1000)
    parser.add_argument("--image-shape", default="3,224,224", help="channels, height and width (default: 3,224,224)")
    parser.add_argument("--batch-size", type=int, default=8, help="images of a rank in a step (default: 8)")
    parser.add_argument("--batches", type=int, default=5, help="steps of an epoch without records (default: 5)")
    parser.add_argument("--num-epochs", type=int, default=3)
    parser.add_argument("--warmup-epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.0125, help="for one rank")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=1e-4)
    parser.add_argument(
        "--dtype", choices=["float32", "float16"], default="float32", help="of the gradients on the way"
    )
    parser.add_argument("--fp16-allreduce", action="store_true", help="send the gradients as float16")
    parser.add_argument("--kv-store", default="None", help="None, dist_sync, ringtrain, ...")
    parser.add_argument("--gpus", default="", help="accepted: all runs on CPUs")
    parser.add_argument("--no-cuda", action="store_true", help="accepted")
    parser.add_argument("--rec-train", default="", help="a file of records")
    parser.add_argument("--rec-val", default="", help="a file of records, to count what is right at the end")
    parser.add_argument("--scaling", action="store_true", help="compare with rank 0 without the others")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
