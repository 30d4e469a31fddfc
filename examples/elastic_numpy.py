"""Train a small network on handwritten digits, in NumPy, on ranks that come and go.

    ringrun -np 4 --min-np 1 python examples/elastic_numpy.py --chaos 3

Needs scikit-learn (the digits), tqdm (of numpy_digits.py, whose network this is) and, for --plot, matplotlib. Kill a
rank with `kill -9 PID`, or have --chaos do it: the others go on from the last commit, ringrun starts another one in its
place, and the same network comes out. To compare the two, save a run without --chaos and give it to the other one:

    ringrun -np 4 --min-np 1 python examples/elastic_numpy.py --save calm.npz
    ringrun -np 4 --min-np 1 python examples/elastic_numpy.py --chaos 3 --beside calm.npz --plot loss.png
"""

import argparse
import os
import random
import signal
import threading
import time

import numpy as np
from numpy_digits import evaluate, gradients_of, load_data, new_network

import ringtrain as hvd
from ringtrain.optim import SGD


def main() -> None:
    options = parse_options()
    # All that takes time comes before init(): while a new rank comes, the others wait from there on.
    train_images, test_images, train_labels, test_labels = load_data()
    network = new_network(np.random.default_rng(options.seed))
    hvd.init()
    optimizer = hvd.DistributedOptimizer(SGD(options.lr, momentum=0.9), op=hvd.Sum)
    if options.chaos:
        die_some_time(options.chaos * hvd.size())

    # All that must not be lost: arrays stay where they are, the optimizer has its momentum, the rest are objects.
    state = hvd.elastic.ArrayState(
        network=network, optimizer=optimizer, epoch=0, begin=0, losses=[], began_s=time.time(), generations=1
    )
    if options.checkpoint:
        state.save_to(options.checkpoint, every_s=1.0)

    @hvd.elastic.run
    def train(state: hvd.elastic.ArrayState) -> None:
        state.generations = max(state.generations, hvd.elastic.generation())
        while state.epoch < options.epochs:
            first, began_s = state.begin, time.perf_counter()  # a loss of ranks has interrupted some epochs
            # The same batches whichever ranks take part: each rank has its share of them, and the gradients are summed.
            order = np.random.default_rng([options.seed, state.epoch]).permutation(len(train_labels))
            while state.begin < len(order):
                batch = order[state.begin : state.begin + options.batch_size]
                mine = batch[hvd.rank() :: hvd.size()]
                gradients = gradients_of(state.network, train_images[mine], train_labels[mine], batch_size=len(batch))
                time.sleep(options.pause)
                optimizer.step(state.network, gradients)
                state.begin += options.batch_size
                state.commit()
            images_per_s = (len(order) - first) / (time.perf_counter() - began_s)
            loss, accuracy = evaluate(state.network, test_images, test_labels)
            state.epoch, state.begin = state.epoch + 1, 0
            state.losses.append((time.time() - state.began_s, loss))
            if hvd.rank() == 0:
                line = (
                    f"epoch {state.epoch:2}: test loss {loss:.4f}, test accuracy {accuracy:.3f} on {hvd.size()} ranks"
                )
                print(f"{line}, {images_per_s:,.0f} images/s", flush=True)
            state.commit()

    train(state)
    _, accuracy = evaluate(state.network, test_images, test_labels)
    if hvd.rank() == 0:
        if options.save:
            np.savez(options.save, *state.network, losses=state.losses)
        if options.plot:
            plot(state.losses, options)
        print(f"test accuracy {accuracy:.3f} after {state.generations} generations", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, all ranks (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the order (default %(default)s)")
    parser.add_argument(
        "--pause", type=float, default=0.02, help="seconds of each step, to watch (default %(default)s)"
    )
    parser.add_argument("--chaos", type=float, metavar="SECONDS", help="kill a rank about so often")
    parser.add_argument("--checkpoint", metavar="FILE", help="go on from here when all ranks are lost")
    parser.add_argument("--save", metavar="FILE", help="save the weights and the losses, such as calm.npz")
    parser.add_argument("--plot", metavar="FILE", help="draw the test loss over time, such as loss.png")
    parser.add_argument("--beside", metavar="FILE", help="draw the losses that --save has saved as well")
    return parser.parse_args()


def die_some_time(mean_s: float) -> None:
    """As a rank does whose memory is full or whose machine is taken away, but for the last one."""

    def die() -> None:
        if hvd.is_initialized() and hvd.size() > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        die_some_time(mean_s)

    timer = threading.Timer(random.expovariate(1 / mean_s), die)
    timer.daemon = True
    timer.start()


def plot(losses: list[tuple[float, float]], options: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if options.beside:
        pyplot.plot(*np.load(options.beside)["losses"].T, marker="o", label="undisturbed")
    own = "with ranks that die" if options.chaos else "this run"
    pyplot.plot(*zip(*losses, strict=True), marker="o", label=own)
    pyplot.xlabel("seconds")
    pyplot.ylabel("test loss")
    pyplot.legend()
    pyplot.title("Handwritten digits on ranks that come and go")
    pyplot.savefig(options.plot)


if __name__ == "__main__":
    main()
