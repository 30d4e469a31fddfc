"""Train a small convolutional network on handwritten digits, in PyTorch, on ranks that come and go.

    ringrun -np 4 --min-np 1 python examples/elastic_torch_digits.py --chaos 10

Needs what torch_digits.py needs, whose network this is. Kill a rank with `kill -9 PID`, or have --chaos do it: the
others go on from the last commit with what is left of the epoch, and ringrun starts another one in its place.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from elastic_numpy import die_some_time
from torch.nn import functional
from torch.utils.data import DataLoader
from torch_digits import accuracy_of, load_data, new_network

import ringtrain.torch as hvd


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # the work is small, and the other ranks need their cores
    # All that takes time comes before init(): while a new rank comes, the others wait from there on.
    train_data, test_data = load_data()
    torch.manual_seed(options.seed)
    network = new_network()
    hvd.init()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=options.lr * hvd.size(), momentum=0.9),
        named_parameters=network.named_parameters(),
    )
    sampler = hvd.elastic.ElasticSampler(train_data, seed=options.seed)
    loader = DataLoader(train_data, batch_size=options.batch_size, sampler=sampler)
    if options.chaos:
        die_some_time(options.chaos * hvd.size())

    # All that must not be lost. The sampler knows which images of the epoch were seen.
    state = hvd.elastic.TorchState(network, optimizer, sampler=sampler, epoch=0, accuracies=[], began_s=time.time())
    if options.checkpoint:
        state.save_to(options.checkpoint, every_s=1.0)

    def fit_learning_rate() -> None:
        """A batch of all ranks is larger than that of one, and so may its steps be."""
        for group in optimizer.param_groups:
            group["lr"] = options.lr * hvd.size()

    state.register_reset_callbacks([fit_learning_rate])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < options.epochs:
            began_s = time.perf_counter()
            loss = torch.zeros(())  # the epoch may have no batches left, if a rank was lost at its end
            for number, (images, labels) in enumerate(loader):
                optimizer.zero_grad()
                loss = functional.cross_entropy(network(images), labels)
                loss.backward()
                optimizer.step()
                sampler.record_batch(number, options.batch_size)
                state.commit()
            images_per_s = len(sampler) * hvd.size() / (time.perf_counter() - began_s)
            accuracy = accuracy_of(network, test_data)
            state.accuracies.append((time.time() - state.began_s, accuracy))
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            if hvd.rank() == 0:
                line = f"epoch {state.epoch:2}: test accuracy {accuracy:.3f} on {hvd.size()} ranks"
                print(f"{line}, loss {loss.item():.4f} of the last batch, {images_per_s:,.0f} images/s", flush=True)
            state.commit()

    train(state)
    accuracy = accuracy_of(network, test_data)
    if hvd.rank() == 0:
        if options.save:
            Path(options.save).write_text(json.dumps(state.accuracies))
        if options.plot:
            plot(state.accuracies, options)
        print(f"test accuracy {accuracy:.3f} after {hvd.elastic.generation()} generations", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training images (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="images per step and rank (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of one rank (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the order (default %(default)s)")
    parser.add_argument("--chaos", type=float, metavar="SECONDS", help="kill a rank about so often")
    parser.add_argument("--checkpoint", metavar="FILE", help="go on from here when all ranks are lost")
    parser.add_argument("--save", metavar="FILE", help="save the accuracies, such as calm.json")
    parser.add_argument("--plot", metavar="FILE", help="draw the test accuracy over time, such as accuracy.png")
    parser.add_argument("--beside", metavar="FILE", help="draw the accuracies that --save has saved as well")
    return parser.parse_args()


def plot(accuracies: list[tuple[float, float]], options: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if options.beside:
        calm = json.loads(Path(options.beside).read_text())
        pyplot.plot(*zip(*calm, strict=True), marker="o", label="undisturbed")
    pyplot.plot(
        *zip(*accuracies, strict=True), marker="o", label="with ranks that die" if options.chaos else "this run"
    )
    pyplot.xlabel("seconds")
    pyplot.ylabel("test accuracy")
    pyplot.legend()
    pyplot.title("Handwritten digits on ranks that come and go")
    pyplot.savefig(options.plot)


if __name__ == "__main__":
    main()
