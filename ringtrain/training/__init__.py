"""Distributed optimizers, for arrays of any library.

optimizer       DistributedOptimizer
gradient_batch  many gradients on their way at the same time
loggers         TensorBoard, Weights & Biases and MLflow
speed_sampler   batches whose parts follow the speeds of the ranks
replicas        whether all ranks have the same parameters, and no gradient is NaN
"""
