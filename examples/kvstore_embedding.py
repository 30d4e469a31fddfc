"""Learn vectors of words of which each step touches a few, in NumPy, with servers that hold all of them.

    ringlaunch -n 2 -s 2 --launcher local python examples/kvstore_embedding.py

Needs nothing but NumPy: the text is made up. Each sentence is about one of many topics, and every topic has words of
its own. Skip-grams with negative samples bring words together that stand beside each other, so at last the nearest
words of a word are those of its topic. Workers pull the rows of a batch, and push gradients of these rows alone.
"""

import argparse
import time

import numpy as np

from ringtrain import kvstore

NEGATIVES = 4


def main() -> None:
    options = parse_options()
    store = kvstore.create("dist_async")
    random = np.random.default_rng(options.seed)
    words = options.topics * options.words_of_topic
    inputs = random.uniform(-0.5, 0.5, (words, options.size)).astype(np.float32)
    store.set_optimizer("sgd", learning_rate=options.lr)
    # the vector of each word, and that of each word as a neighbour of others
    store.init(["words", "neighbours"], [inputs, np.zeros_like(inputs)])

    chance = np.random.default_rng((options.seed, store.rank))
    begin, rows_pulled = time.monotonic(), 0
    told_at, losses = begin, []
    for _ in range(options.steps):
        topic = chance.integers(0, options.topics, (options.batch_size, 1))
        of_topic = topic * options.words_of_topic + chance.integers(0, options.words_of_topic, (options.batch_size, 2))
        noise = chance.integers(0, words, (options.batch_size, NEGATIVES))
        centres, others = of_topic[:, 0], np.concatenate([of_topic[:, 1:], noise], axis=1)
        mine, theirs = kvstore.RowSparse(), kvstore.RowSparse()
        store.row_sparse_pull(["words", "neighbours"], out=[mine, theirs], row_ids=[centres, others.ravel()])
        rows_pulled += len(mine.rows) + len(theirs.rows)

        of_centres = mine.rows[np.searchsorted(mine.indices, centres)]
        of_others = theirs.rows[np.searchsorted(theirs.indices, others)]
        scores = np.einsum("bd,bnd->bn", of_centres, of_others)
        wrong = (1 / (1 + np.exp(-scores)) - (np.arange(1 + NEGATIVES) == 0)).astype(np.float32)
        gradients = np.einsum("bn,bnd->bd", wrong, of_others)
        of_neighbours = wrong[:, :, None] * of_centres[:, None, :]
        # rows that are there several times are added up
        store.push("words", kvstore.RowSparse(centres, gradients))
        store.push("neighbours", kvstore.RowSparse(others.ravel(), of_neighbours.reshape(-1, options.size)))
        losses.append(-np.log1p(-np.abs(wrong).clip(max=0.999)).sum(1).mean())
        if store.rank == 0 and (now := time.monotonic()) >= told_at + 2:
            pairs_per_s = len(losses) * options.batch_size / (now - told_at)
            print(f"second {now - begin:.0f}: loss {np.mean(losses):.4f}, {pairs_per_s:,.0f} pairs/s", flush=True)
            told_at, losses = now, []
    store.wait()
    store.barrier()
    if store.rank == 0:
        share = rows_pulled / options.steps / (2 * words)
        print(f"{options.steps:,} steps of worker 0, each of {share:.1%} of the rows", flush=True)
        right = share_of_topic(store.pull("words"), options)
        print(f"{right:.0%} of the nearest words are of the same topic", flush=True)


def share_of_topic(vectors: np.ndarray, options: argparse.Namespace) -> float:
    """How many of the 10 nearest words of some words are of their topic."""
    directions = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    asked = np.random.default_rng(0).choice(len(vectors), 200, replace=False)
    nearest = np.argsort(-(directions[asked] @ directions.T), axis=1)[:, 1:11]
    return float((nearest // options.words_of_topic == asked[:, None] // options.words_of_topic).mean())


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=5000, help="of each worker (default %(default)s)")
    add("--topics", type=int, default=20, help="of sentences (default %(default)s)")
    add("--words-of-topic", type=int, default=200, help="default %(default)s")
    add("--size", type=int, default=16, help="of a vector (default %(default)s)")
    add("--batch-size", type=int, default=24, help="pairs of words in a step of a worker (default %(default)s)")
    add("--lr", type=float, default=0.2, help="learning rate (default %(default)s)")
    add("--seed", type=int, default=1, help="of the vectors and the text (default %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
