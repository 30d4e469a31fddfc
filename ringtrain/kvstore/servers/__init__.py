"""Servers of key-value stores, and the processes that they are for.

roles             what a process is, by its environment
membership        who has which place, the rounds and the directory of keys: a state machine
scheduler         the connections of all processes
scheduler_client  a process's side of the scheduler
arrival           a process takes its place in a job
worker            a worker's part in a job
keys              the keys of a store, as workers know them, and the servers that hold them
server            a process that is a server or the scheduler; its snapshots
python_updates    what a server runs of the workers' Python
server_ranks      ranks that are set aside as servers
"""
