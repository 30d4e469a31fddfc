"""Shares that follow the links, in jobs whose hosts change."""

from elastic_ranks import elastic_job
from harness.hosts import hosts_or_skip

# The sum of the numbers of the ranks, in slices of which a slow host owns all.
SUMS = """
import numpy as np
import ringtrain as hvd

hvd.init()

@hvd.elastic.run
def train(state):
    for step in range(200 if hvd.size() == 4 else 5):
        numbers = np.full(100_003, hvd.rank() + 1, np.int64)
        total = hvd.size() * (hvd.size() + 1) // 2
        assert (hvd.allreduce(numbers, op=hvd.Sum, name="sum") == total).all()
        print("step", step, hvd.size(), flush=True)
        state.commit()

train(hvd.elastic.ObjectState())
print("well", flush=True)
"""


def test_the_links_are_measured_again_when_a_host_is_lost(tmp_path):
    with (
        hosts_or_skip(4, rate=["500mbit", "500mbit", "25mbit", "500mbit"]) as hosts,
        elastic_job(SUMS, tmp_path, 4, hosts=hosts, RINGTRAIN_LINK_RATES="auto", RINGTRAIN_RING_FROM_KB="0") as job,
    ):
        first = [job.process(member) for member in job.formed(1).members]
        first[0].wait_for("step 3 4")
        first[1].kill()
        texts = [job.process(member).ends() for member in job.formed(2).members]
    assert "own 0, 0, 100, 0 % of an array" in texts[0] and "own 0, 100, 0 % of an array" in texts[0]
    assert all("step 4 3\nwell" in text for text in texts)
