"""Where the ranks of a job without MPI find each other: one server, which the launcher or rank 0 runs.

secret      what the processes of one job know and nobody else
protocol    proofs and messages over a connection
door        lets in who knows the secret
hub         listens to many connections
server      gathers what the ranks say; knows nothing of arrays
member      a rank's side

Of an elastic job, whose ranks stay connected with whoever has started them:

generations      who belongs to each generation: a state machine
elastic_server   the connections of all processes
tether           a process's side
"""
