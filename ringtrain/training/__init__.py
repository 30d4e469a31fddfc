"""Distributed optimizers, for arrays of any library.

optimizer       DistributedOptimizer
gradient_batch  many gradients on their way at the same time
diloco          DiLoCo: ranks that train alone between outer steps
local_steps     the outer steps of it, for every framework
islands         ranks with fast links, which average the gradients of each step
difference_codes  differences of parameters in 8 or 4 bits
loggers         TensorBoard, Weights & Biases and MLflow
speed_sampler   batches whose parts follow the speeds of the ranks
replicas        whether all ranks have the same parameters, and no gradient is NaN
"""
