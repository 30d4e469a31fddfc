"""ringtrain and your own mpi4py code in one program.

    ringrun -np 4 python examples/mpi4py_interop.py

Two trainings, one on the even and one on the odd ranks of MPI.COMM_WORLD, each a ringtrain job of its own. All the
while the program's own messages travel over COMM_WORLD: ringtrain works on a copy of the communicator that it is
given, so that the two never mix.
"""

import numpy as np
from mpi4py import MPI

import ringtrain as hvd


def main() -> None:
    everyone = MPI.COMM_WORLD
    half = everyone.Split(color=everyone.rank % 2, key=everyone.rank)
    hvd.init(comm=half)
    assert (hvd.rank(), hvd.size()) == (half.rank, half.size)

    # The gradients are on their way while this program talks over its own communicators.
    gradient = np.full(1000, float(everyone.rank))
    handle = hvd.allreduce_async(gradient, op=hvd.Average, name="gradient")
    sum_of_ranks = everyone.allreduce(everyone.rank)
    names = half.allgather(f"rank {everyone.rank}")
    average = hvd.synchronize(handle)

    assert sum_of_ranks == everyone.size * (everyone.size - 1) // 2
    assert np.allclose(average, np.mean([int(name.split()[1]) for name in names]))

    # ringtrain returns an ordinary array; mpi4py can carry it between the two trainings.
    average_of_all = np.empty_like(average)
    everyone.Allreduce(average / everyone.size, average_of_all, op=MPI.SUM)
    assert np.allclose(average_of_all, (everyone.size - 1) / 2)

    if half.rank == 0:
        print(f"{' and '.join(names)}: average {average[0]:g}, of all ranks {average_of_all[0]:g}", flush=True)
    hvd.shutdown()
    half.Free()


if __name__ == "__main__":
    main()
