"""Joining and leaving the job, and this rank's place in it.

session         init(), shutdown(), rank(), size() and their like
network         chooses the network of this job, and joins it
world           the ranks of a job, and what they first tell each other
launched_by     which launcher has started this process
elastic_client  the side of this process in an elastic job: joins a generation at the rendezvous
sockets         jobs whose ranks talk over TCP; rendezvous/: where they meet
mpi             what the core must know of MPI; libmpi: which MPI library mpi4py uses
engine_process  a process of another engine, such as a worker of Dask, that is a rank for one call
lifecycle       what init() and shutdown() do, in order
host, gpus      the CPUs and addresses of this host, and the GPU of this rank
"""
