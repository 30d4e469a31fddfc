"""The compilation cache of JAX in a folder that the ranks share."""

import sys

from harness.frameworks import need
from harness.ringrun_job import ringrun

PROGRAM = """
import sys
import jax, jax.numpy as jnp
import ringtrain.jax as hvd
hvd.init()
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
seen = []
x = jax.device_put(jnp.ones(3))
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.rpartition("/")[2]))
step = jax.jit(lambda x: hvd.allreduce(jnp.sin(x) @ jnp.ones((3, 3)), hvd.Sum))
if hvd.rank() == 0:
    step.lower(x).compile()
hvd.barrier()
seen.clear()
step(x).block_until_ready()
print(hvd.rank(), "cache_hits" in seen, "cache_misses" in seen)
"""


def test_the_first_rank_compiles_and_the_others_read(tmp_path):
    need("jax")
    done = ringrun("-np", "3", "--no-prefix-output", sys.executable, "-c", PROGRAM, str(tmp_path))
    lines = sorted(done.stdout.splitlines())
    assert lines[1:] == ["1 True False", "2 True False"], done.stdout + done.stderr
    assert lines[0].startswith("0 ") and len(list(tmp_path.glob("jit__lambda*-cache"))) == 1
