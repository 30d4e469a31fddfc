"""Joining and leaving the job, and this rank's place in it.

session      init(), shutdown(), rank(), size() and their like
launched_by  which launcher has started this process
rendezvous   the ranks come together in init(), within a time
mpi, ulfm    what the core must know of MPI
cores, gpus  what this rank may use of its host
"""
