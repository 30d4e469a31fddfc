"""The measurements of `python -m measure gpu`, on arrays of a library that is chosen on the command line.

measurement  the subcommand
part         what its parts have in common
aim          what a figure must reach
library      what is asked of an array library
submission   host time of a step
step         GPU time of a step
staged       an allreduce through host memory
copies       the bus between GPU and host
training     a training step with and without ringtrain
"""
