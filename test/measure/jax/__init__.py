"""A training step of JAX models, and JAX's own sharding, beside peers.

step            the subcommand
training, sharding  the programs
gloo, over_mpi4jax  the peers
"""
