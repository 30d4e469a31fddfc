"""What the measurement of JAX's steps wants of JAX, which need not be installed for the others.

training  a model and a batch, and the steps of everybody who takes part
"""
