"""What is measured with torch: the only part of the bench, but for the peers, that imports it.

models        the networks
training      one of them in training
gpu_training  the same on a GPU
on_gpu        tensors on a GPU
stopwatch     the time that their work takes
"""
