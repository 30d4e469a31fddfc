"""Tests of the AArch64 wheel alone, beside those that run on every processor; `make aarch64` runs them."""

import platform
import sys

import pytest
from harness.ringrun_job import ringrun
from wheel_training import TRAIN

import ringtrain as hvd
from ringtrain import _core

pytestmark = [
    pytest.mark.fast,
    pytest.mark.skipif(platform.machine() != "aarch64", reason="`make aarch64` runs this in an emulator"),
]


@pytest.mark.ranks(1)
def test_one_rank_chooses_neon():
    assert hvd.size() == 1 and _core.simd_in_use() == "neon"


def test_ringrun_trains_on_two_ranks():
    done = ringrun("-np", "2", sys.executable, "-c", TRAIN)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] trained on 2", "[1] trained on 2"]), done
