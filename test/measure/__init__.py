"""Measurements for developers of ringtrain: run `python -m measure` in test/.

gpu          what is promised of GPUs, each figure beside its peer or its floor
negotiation  what simulated ranks say to agree on a step
faults/      ranks that die, stop or raise: the words of the tests of faults, and many random ones
elastic      processes of elastic trainings that are killed at random, as many as one likes
hosts        any command on simulated hosts
links        loss over seconds on slow links: DiLoCo beside data parallelism
ray_kills    actors of Ray that are killed, many times
process      what this process costs while it does nothing
idle, submission, parameters, pending, overlap, kvstore_job
             a subcommand each, on real ranks
jax/         a step of JAX, and JAX's own sharding, beside peers
kvstore_worker, torch_hooks  what these subcommands run in a rank
"""

from harness import rooms

rooms.put_on_path()
