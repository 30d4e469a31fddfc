"""Jobs with servers whose processes die at random: all others end in time, and no push counts twice."""

from __future__ import annotations

from pathlib import Path

import kvstore_trials
import pytest
from harness.ringrun_job import needs_mpi
from kvstore_storm import storm

pytestmark = needs_mpi


# Workers are killed and stopped, servers stopped, the scheduler killed. test/simulate/ tries more interleavings.
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 5, 7])
def test_deaths_and_stops_lose_no_acknowledged_push_and_are_told_in_time(seed: int, tmp_path: Path) -> None:
    kvstore_trials.carry_out(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["auto", "off"])
def test_workers_that_are_killed_and_come_back_learn_and_count_each_push_once(memory: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    kills, accuracy = storm(tmp_path, seed=0, memory=memory, servers_return=False)
    assert kills["worker"] > 0 and accuracy > 0.8
