"""The ranks of a job without MPI meet at one server, which the launcher or rank 0 runs.

secret          a secret that only the processes of one job know
claim           a process claims its rank, which no other one of the host can have then
columns         the values of all ranks as JSON that compresses well
protocol        proofs and messages over a connection
conversation    messages that outlive their connection: a state machine
lasting         the connection of a process, made again when the network breaks it
listener        lets in processes that know the secret, and listens to many of them
server          gathers what the ranks say, and knows nothing of arrays; a rank's side

Of an elastic job, whose ranks stay connected with the starter (their side is job/elastic_client.py):

generations     who belongs to each generation: a state machine
elastic_server  the connections of all processes
"""
