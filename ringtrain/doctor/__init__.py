"""`python -m ringtrain.doctor`: what ringtrain finds on this machine, what is wrong and how to mend it.

machine  everything but GPUs
gpus     GPUs, the CUDA driver and NCCL
"""
