"""The `ringrun` command: start a training script on many ranks with the MPI that this environment's mpi4py uses."""
