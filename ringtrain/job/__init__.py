"""Joining and leaving the job, and this rank's place in it.

session         init(), shutdown(), rank(), size() and their like
network         which network this job has, and joining it
world           the ranks of a job, and what they tell each other first
launched_by     which launcher has started this process
elastic_client  jobs whose processes come and go: the generation that this process is in
sockets         jobs whose ranks talk over TCP; rendezvous/: where they meet
mpi             what the core must know of MPI; libmpi: its library, described in a process of its own too
before_init     what init() has loaded before it begins
host, gpus      what this rank may use of its host, and the addresses of it
"""
