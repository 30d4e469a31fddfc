"""Connections of live ranks that the network resets, and cables that are pulled, on simulated hosts."""

import pytest
from harness.hosts import HostsUnavailable
from measure.broken_links import long_fault, lost_link, short_faults

pytestmark = pytest.mark.slow


def carried_out(trial, seed):
    try:
        return trial(seed)
    except HostsUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_a_job_does_not_notice_connections_that_break_for_a_while(seed):
    assert carried_out(short_faults, seed) == ""


def test_a_cable_that_stays_away_is_an_error_in_time_on_all_ranks():
    assert carried_out(long_fault, 1) == ""


def test_one_of_two_networks_may_be_lost_during_allreduces_and_is_used_again():
    assert carried_out(lost_link, 1) == ""
