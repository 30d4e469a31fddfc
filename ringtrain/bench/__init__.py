"""`python -m ringtrain.bench`: ringtrain and its peers measured in turn, in one run, on the same data.

cli            from the command line to a result, of several launches too
arguments      the command line
measurement    one launch: what a subcommand works with
ranks          the ranks that measure together
rounds         competitors, and the loop that times them round by round; how far apart the cores are
ringtrain_competitor
               ringtrain as a competitor
peers/         the other competitors, one file each
results        rows of rounds, their medians and paired ratios, JSON
report         tables and the PNG
models         gradient shapes
torch_training a model in training; torch_groups: groups of torch.distributed
arithmetic     the floor of a step

The other modules are a subcommand each; `collectives` is six.
docs/performance.md says what the columns mean.
"""
