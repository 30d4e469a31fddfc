"""Where the ranks of a job without MPI find each other: one server, which the launcher or rank 0 runs.

secret      what the processes of one job know and nobody else
protocol    proofs and messages over a connection
server      gathers what the ranks say; knows nothing of arrays
member      a rank's side
"""
