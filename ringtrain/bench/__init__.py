"""`python -m ringtrain.bench`: ringtrain and its peers measured in turn, in one run, on the same data.

command     from the command line to a result
flags       the command line
launches    several launches of one measurement, merged
session     one launch: what a measurement works with
job         the ranks that measure together
rounds      competitors, and the loop that times them round by round, with its bar
ringtrain_competitor  ringtrain as a competitor
peers/      the other competitors, one file each
results     rows of rounds, their medians and paired ratios, JSON
report      tables
plot        the PNG
models      gradient shapes
scaling_model  a step among many ranks, as arithmetic
torch/      torch models in training
arithmetic  the floor, and what is computed beside communication
core_distance  how far apart the cores are
memory_use  what ringtrain itself takes
busy_core   a neighbour that keeps a core busy

The other modules are a subcommand each; `collectives` is five.
docs/performance.md says what the columns mean.
"""
