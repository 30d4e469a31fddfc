"""Shares that follow the rates of the links: hand-computed ones, and exact data on ranks that have them."""

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from harness.exact import data_of_ranks, reference, require_equal
from harness.hosts import hosts_or_skip
from harness.ringrun_job import ROOT, TIMEOUT_S, needs_mpi
from harness.socket_ranks import started

import ringtrain as hvd
from ringtrain import doctor
from ringtrain.options import table

# No element, fewer than ranks, one cache line of the smallest slice and its neighbours, and several blocks.
COUNTS = [1, 2, 3, 63, 64, 65, 200, 100_003, 3_000_001]
ON_RINGS = {"RINGTRAIN_RING_FROM_KB": "0", "RINGTRAIN_RING_CHUNK_KB": "16"}
# In a ring rank 1 of three owns all of an array, and in an exchange nothing.
ONE_SLOW = {**ON_RINGS, "RINGTRAIN_LINK_RATES": "1000,1,1000"}


def shares(rates: str, operation: str = "allreduce") -> str:
    """The last words of the doctor on large arrays of ranks alone on their hosts."""
    hosts = 1 + rates.count(",")
    rows = doctor.algorithms([1] * hosts, table.resolve({"link_rates": rates}, {}))
    return [row["algorithm"] for row in rows if row["operation"] == operation][-1].partition("these own ")[2]


@pytest.mark.parametrize(
    ("rates", "ring", "exchange"),
    [
        # The slow host gets the sum of all others, and sends it: T each way, where equal shares are 1.5 T.
        ("1000,1000,100,1000", "0, 0, 100, 0 %", "33, 33, 0, 33 %"),
        ("1000,100,1000", "0, 100, 0 %", "50, 0, 50 %"),
        # With T = 1 and k on the slow links, rank 1 needs 2 - 1.5 k, and rank 3 2 - k: together 1, so k = 1.2.
        # In the exchange (k - 1) / 2 of the slow host and three times (1.5 k - 1) / 2 are 1, so k = 12 / 11.
        ("300,300,300,200", "0, 20, 0, 80 %", "32, 32, 32, 5 %"),
        # Every link of the ring is slow.
        ("1000,100,1000,100", "", "50, 0, 50, 0 %"),
        # Less than 5 percent are to be had.
        ("1000,1000,1000,990", "", ""),
        ("1000,100", "", ""),
        ("100,100,100", "", ""),
        ("0.1,100,1000000", "100, 0, 0 %", "0, 50, 50 %"),
    ],
)
def test_the_slowest_link_carries_least(rates: str, ring: str, exchange: str) -> None:
    assert (shares(rates), shares(rates, "allreduce of 16-bit floats")) == (ring, exchange)


def test_the_doctor_tells_the_shares_of_hosts_of_several_ranks() -> None:
    rows = doctor.algorithms([2, 2, 2, 2], table.resolve({"link_rates": "1000,1000,100,1000"}, {}))
    assert [row["algorithm"] for row in rows if row["operation"] == "allreduce"][-1] == (
        "shared memory in each host, and at the same time a ring between hosts; of an array these own 0, 0, 100, 0 %"
    )


# ------------------------------------------------------------------------------------------------------- exact data


def check_allreduces(process_set=None, members=None):
    members = members or list(range(hvd.size()))
    if hvd.rank() not in members:
        return
    own = members.index(hvd.rank())
    for dtype in ("f4", "f8", "i4", "f2", ml_dtypes.bfloat16):
        for op, number in (("sum", hvd.Sum), ("max", hvd.Max)):
            for count in COUNTS if dtype == "f4" else COUNTS[-3:-1]:
                arrays = data_of_ranks(len(members), (count,), np.dtype(dtype), seed=count, op=op)
                name = f"{op}.{np.dtype(dtype)}.{count}.{len(members)}"
                require_equal(
                    hvd.allreduce(arrays[own], op=number, name=name, process_set=process_set or hvd.global_process_set),
                    reference(op, arrays),
                )


def check_averages():
    arrays = data_of_ranks(hvd.size(), (100_003,), np.dtype("f4"), seed=5, op="average")
    require_equal(hvd.allreduce(arrays[hvd.rank()], name="average"), reference("average", arrays))
    # one of the weights is 0, and they are 4 together
    weights = [1, 0, 3, 0][: hvd.size()]
    mean = sum(weight * array for weight, array in zip(weights, arrays, strict=True)) / 4
    require_equal(hvd.allreduce(arrays[hvd.rank()], name="weighted", weight=weights[hvd.rank()]), mean.astype("f4"))
    several = [array.copy() for array in np.split(arrays[hvd.rank()][:99_999], 3)]
    expected = np.split(reference("sum", arrays)[:99_999], 3)
    for one, other in zip(hvd.grouped_allreduce(several, op=hvd.Sum, name="grouped"), expected, strict=True):
        require_equal(one, other)


def check_same_bits():
    """Of sums that round, on all ranks."""
    own = np.random.default_rng(hvd.rank()).standard_normal(1_000_003).astype("f4")
    total = hvd.allreduce(own, op=hvd.Sum, name="rounded")
    everybody = hvd.allgather(total[None], name="bits")
    assert all(np.array_equal(one, everybody[0]) for one in everybody)


def check_operations_with_shares_of_their_own():
    rows = hvd.size() * 5 + 1
    arrays = data_of_ranks(hvd.size(), (rows, 7001), np.dtype("f4"), seed=9)
    begin = sum(5 + (rank == 0) for rank in range(hvd.rank()))
    own = slice(begin, begin + 5 + (hvd.rank() == 0))
    require_equal(hvd.reducescatter(arrays[hvd.rank()], op=hvd.Sum, name="scattered"), reference("sum", arrays)[own])
    gathered = hvd.allgather(arrays[0][own], name="gathered")
    require_equal(gathered, arrays[0])


def check_all():
    check_allreduces()
    check_averages()
    check_same_bits()
    check_operations_with_shares_of_their_own()


@pytest.mark.ranks(3, hosts=(1, 1, 1), timeout=240, env=ONE_SLOW)
@pytest.mark.ranks(4, hosts=(2, 1, 1), timeout=240, env=ONE_SLOW)
def test_one_rank_owns_all_of_a_ring_and_nothing_of_an_exchange():
    check_all()


@pytest.mark.ranks(4, hosts=(1, 1, 1, 1), timeout=240, env={**ON_RINGS, "RINGTRAIN_LINK_RATES": "300,300,300,200"})
def test_process_sets_have_shares_of_their_own():
    check_allreduces()
    members = [0, 2, 3]  # whose last rank owns 80 percent
    few = hvd.add_process_set(hvd.ProcessSet(members))
    check_allreduces(few, members)
    assert hvd.remove_process_set(few)


@pytest.mark.ranks(3, hosts=(1, 1, 1), timeout=240, env={**ONE_SLOW, "RINGTRAIN_WIRE_FORMAT": "bf16"})
def test_sums_that_travel_in_16_bits_have_the_shares_of_an_exchange():
    check_allreduces()
    check_same_bits()


# ------------------------------------------------------------------------------------------------------- measurement

SUM = """
import numpy as np, ringtrain as hvd
hvd.init()
mine = np.arange(300_000, dtype=np.int64) + hvd.rank()
ranks = hvd.size()
total = ranks * np.arange(300_000) + ranks * (ranks - 1) // 2
assert (hvd.allreduce(mine, op=hvd.Sum, name="x") == total).all()
"""
SOCKETS = {"RINGTRAIN_NETWORK": "sockets"}


@pytest.fixture(scope="module")
def unequal_hosts():
    with hosts_or_skip(3, rate=["500mbit", "25mbit", "500mbit"]) as hosts:
        yield hosts


def test_the_links_are_measured(tmp_path, unequal_hosts):
    """Ranks 0 and 3 share a host."""
    with started(SUM, 4, tmp_path, unequal_hosts, RINGTRAIN_LINK_RATES="auto", **SOCKETS) as ranks:
        outputs = ranks.outputs()
    assert "link_rates=auto: the links of the hosts have" in outputs[0] and "own 0, 100, 0 % of" in outputs[0]
    assert "link_rates" not in "".join(outputs[1:])


@needs_mpi
def test_the_links_are_measured_over_mpi(unequal_hosts):
    slots = ",".join(f"{name}:2" for name in unequal_hosts.names)
    command = [*("-m", "ringtrain.run", "-np", "6", "-H", slots, "--network", "mpi", "--link-rates", "auto")]
    done = subprocess.run(
        unequal_hosts.command_on(0, [sys.executable, *command, sys.executable, "-c", SUM]),
        env={**os.environ, "PYTHONPATH": ROOT, **unequal_hosts.environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("own 0, 100, 0 % of an array") == 1


def test_equal_links_have_equal_shares(tmp_path):
    with (
        hosts_or_skip(3, rate="20mbit") as hosts,
        started(SUM, 3, tmp_path, hosts, RINGTRAIN_LINK_RATES="auto", **SOCKETS) as ranks,
    ):
        assert "each has an equal share of an array" in ranks.outputs()[0]


def test_ranks_on_one_host_measure_nothing(tmp_path):
    with started(SUM, 3, tmp_path, RINGTRAIN_LINK_RATES="auto", **SOCKETS) as ranks:
        assert "link_rates" not in "".join(ranks.outputs())


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "rates", ["0,1", "-1,1", "nan,1", "inf,1", "1,,1", "1;1", "fast", "", "1e3,1", "2000000,1", "1 ,2"]
)
def test_rates_that_are_none_are_refused(rates):
    with pytest.raises(ValueError, match=f"link_rates must be off, auto or the Mbit/s of each host.*not {rates}"):
        table.resolve({"link_rates": rates}, {})


def test_as_many_rates_as_hosts_are_needed(tmp_path, capsys, monkeypatch):
    text = "link_rates=1000,100 is for 2 hosts, but the ranks are on 1; give a rate for each host"
    with started(SUM, 2, tmp_path, RINGTRAIN_LINK_RATES="1000,100", **SOCKETS) as ranks:
        assert all(f"ValueError: {text}" in output for output in ranks.outputs([1, 1]))
    monkeypatch.setenv("RINGTRAIN_LINK_RATES", "1000,100")
    with pytest.raises(SystemExit):
        doctor.main(["--algorithms=2,2,2"])
    assert "is for 2 hosts, but the ranks are on 3" in capsys.readouterr().err


def test_rates_that_differ_between_ranks_are_refused(tmp_path):
    program = "import os, ringtrain as hvd\nhvd.init(link_rates='1,' + os.environ['RINGTRAIN_RANK'] + '1')"
    with started(program, 2, tmp_path, **SOCKETS) as ranks:
        text = "link_rates must be the same on all ranks: rank 0 has 1,01, rank 1 has 1,11"
        assert all(text in output for output in ranks.outputs([1, 1]))
