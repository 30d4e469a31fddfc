"""The part of the measurement of JAX's steps that imports JAX, which the others do not need.

training  a model and a batch, and the steps of everybody who takes part
"""
