"""`python -m ringtrain.doctor`: what ringtrain finds on this machine, what is wrong and how to mend it.

machine    everything else
ranks      the network of the job, and where its ranks run
gpu_facts  GPUs, the CUDA driver and NCCL
"""
