"""Two process sets, each with an allreduce of its own, and one over all ranks.

    ringrun -np 4 python examples/process_sets.py

A process set is a part of the ranks. Those of two sets that share no rank run at the same time.
"""

import sys

import numpy as np

import ringtrain as hvd


def main() -> None:
    hvd.init()
    if hvd.size() < 2:
        sys.exit("Two process sets need two ranks or more: ringrun -np 2 python examples/process_sets.py")

    # Every rank adds both sets, in the same order, also the one that it is not in.
    even = hvd.add_process_set(hvd.ProcessSet(list(range(0, hvd.size(), 2))))
    odd = hvd.add_process_set(hvd.ProcessSet(list(range(1, hvd.size(), 2))))
    mine = even if even.included() else odd

    ones = np.ones(4)
    in_my_set = hvd.allreduce(ones, op=hvd.Sum, name="ones", process_set=mine)
    in_the_world = hvd.allreduce(ones, op=hvd.Sum, name="ones")
    assert np.array_equal(in_my_set, np.full(4, mine.size()))
    assert np.array_equal(in_the_world, np.full(4, hvd.size()))

    # The root of a broadcast is a rank of the world, here the first rank of each set.
    first = hvd.rank() % 2
    word = hvd.broadcast_object(f"hello from rank {hvd.rank()}", root_rank=first, process_set=mine)
    assert word == f"hello from rank {first}"

    for rank, (size, said) in enumerate(hvd.allgather_object((mine.size(), word))):
        if hvd.rank() == 0:
            print(f"rank {rank}, in a set of {size}, heard: {said}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
