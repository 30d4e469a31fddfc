"""Servers of key-value stores, and the processes that they are for.

roles        what a process is, by its environment
places       a place in a job, and the process that has it
roster       who has which place: a state machine
directory    the keys of the stores
rounds       what all workers say
serve        processes that are servers or the scheduler
command      the same by hand
python_updates
             what they run of the workers' Python
arrival      a process comes to its place
core         the server and the client of the core
scheduler    the connections of all processes
seat         a process's side of the scheduler
placement    at which servers the values of keys lie
keys         the keys of a store, as workers know them
counts       what a worker has asked of servers
membership   a worker's part in a job
ranks        ranks that are set aside as servers
snapshots    what a server keeps, in files
verbose      what they all say of themselves
"""
