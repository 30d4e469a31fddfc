"""Python ends while a thread of the core runs code of Python."""

import os

from harness.forked import forks_of
from harness.socket_ranks import free_port

forks = forks_of("numpy", "ringtrain.ops.reductions", "ringtrain.record.flight_recorder")

LIMIT_S = 60
RANKS = 4

_ASKED = """
import threading
import numpy as np
import ringtrain as hvd
from ringtrain.record import flight_recorder

begun = threading.Event()

def describe(question):
    begun.set()
    while True:  # gives up the GIL again and again, until it does not get it back
        pass

flight_recorder._on_stall = describe
hvd.init()
if hvd.rank() == 0:
    hvd.allreduce(np.ones(2))
assert begun.wait(60)
raise ValueError("a bad batch")
"""


def test_a_script_that_fails_while_its_rank_is_asked_where_it_is_ends_with_one(forks, tmp_path):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    place["RINGTRAIN_STALL_WARNING_TIME_S"] = "0.2"
    ranks = [
        forks.start(["-c", _ASKED], {**os.environ, **place, "RANK": str(rank)}, tmp_path / f"output-{rank}")
        for rank in range(RANKS)
    ]
    texts = [process.ends(LIMIT_S) for process in ranks]
    assert [process.returncode for process in ranks] == [1] * RANKS, texts
    assert all("a bad batch" in text for text in texts[1:]), texts
