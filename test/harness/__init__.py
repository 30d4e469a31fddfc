"""`@pytest.mark.ranks(1, 2, 4)`: the body of a test runs as SPMD code in that many processes under the real mpirun.

protocol   what pytest and the ranks say to each other
worker     the program of each rank
spec       which tests share a job, and the command that starts it
processes  ending a job so that nothing of it stays
job        one job: start, run a test, close
report     from the answers of the ranks to a passed, skipped or failed test
plugin     the pytest hooks
compiling  libraries that tests need (no part of the above, as those that follow)
gpu_double doubles of the CUDA driver and of NCCL
mpi_double a double of MPI
simulation the core's agreement among ranks, without a job
floors     the checker behind test_floors.py
"""
