"""Measurements on GPUs with torch.

gpu_training  a network in training
on_gpu        tensors
stopwatch     the time that their work takes
"""
