"""Arrays of any library, as the core sees them.

adapter        what a library must be able to do, and which one made an array
numpy, cupy, torch, dlpack
               one module for each library; dlpack is for all others on CUDA devices
shared_memory  `ringtrain.empty`: arrays that an allreduce need not copy
"""
