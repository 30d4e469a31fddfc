"""Autotune: it finds what is faster, keeps what is not, and changes nothing that the ranks have not agreed on."""

import time

import numpy as np
import pytest
from harness.exact import require_equal
from harness.simulation import simulate_autotune

import ringtrain as hvd
from ringtrain.options import table


def simulate(speed):
    return simulate_autotune(64, 128, thresholds=[1, 8, 64], mailboxes=[32, 64, 128], speed=speed)


def test_it_finds_the_fastest():
    gigabytes = {1: 1.0, 8: 3.0, 64: 2.0}
    threshold, mailbox, operations, report = simulate(
        lambda threshold, mailbox: 1e9 * gigabytes[threshold] * (2 if mailbox == 32 else 1)
    )
    assert (threshold, mailbox) == (8, 32)
    assert operations < 10_000
    assert "2.00 GB/s before, goes at 6.00 GB/s now (fusion_threshold_mb 64 -> 8, mailbox_kb 128 -> 32)" in report


def test_it_keeps_what_is_as_good_as_anything():
    threshold, mailbox, _, report = simulate(lambda threshold, mailbox: 1e9 if threshold == 64 else 1.02e9)
    assert (threshold, mailbox) == (64, 128)
    assert "nothing is clearly faster" in report


def test_a_winner_by_chance_is_given_back():
    calls = iter(range(10**6))
    # fast for as long as the two knobs are tried, slow in the final comparison
    threshold, mailbox, _, _ = simulate(lambda threshold, _: 2e9 if threshold == 8 and next(calls) < 700 else 1e9)
    assert (threshold, mailbox) == (64, 128)


def train_until(path):
    gradients = [np.ones(size, np.float32) for size in (3, 100_000, 7_000, 1_000_000)]
    deadline = time.monotonic() + 60
    is_written = False
    while not is_written and time.monotonic() < deadline:
        for i, gradient in enumerate(gradients):
            gradient[...] = hvd.rank() + i
        handles = [hvd.allreduce_async_(g, op=hvd.Sum, name=f"gradient{i}") for i, g in enumerate(gradients)]
        for i, handle in enumerate(handles):
            total = hvd.size() * (hvd.size() - 1) / 2 + i * hvd.size()
            require_equal(handle.wait(), np.full(gradients[i].shape, total, np.float32))
        is_written = bool(hvd.allreduce(np.int32(path.exists()), op=hvd.Max, name="is written"))
    assert is_written


@pytest.mark.ranks(3, initialised=False)
def test_results_stay_exact_while_sizes_change_and_the_findings_are_kept(tmp_path):
    path = tmp_path / "tuned.txt"
    hvd.init(autotune=True, autotune_file=str(path), mailbox_kb=128)
    hvd.barrier()
    train_until(path)
    assert path.read_text().startswith("fusion_threshold_mb=")  # mailbox_kb was set, so it is left alone
    hvd.shutdown()


def test_findings_of_a_former_job_are_used_except_for_set_options(tmp_path):
    path = tmp_path / "tuned.txt"
    settings = table.resolve({"autotune": True, "autotune_file": str(path)}, environ={})
    assert settings["autotune"] == "on"
    assert table.read_tuned(settings, []) == {}
    path.write_text("mailbox_kb=64\nfusion_threshold_mb=16\n")
    assert table.read_tuned(settings, ["mailbox_kb"]) == {"autotune": "off", "fusion_threshold_mb": "16"}
    path.write_text("mailbox_kb=-1\n")
    with pytest.raises(ValueError, match=r"mailbox_kb must be .* which autotune_file names"):
        table.read_tuned(settings, [])


def test_horovods_variable_switches_it_on():
    assert table.resolve({}, environ={"HOROVOD_AUTOTUNE": "1"})["autotune"] == "on"
    assert table.resolve({}, environ={"HOROVOD_AUTOTUNE": "0"})["autotune"] == "off"
