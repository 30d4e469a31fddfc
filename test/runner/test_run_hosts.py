"""ringrun on several simulated hosts: --check, hosts that cannot be reached, and what is left on the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.hosts import SimulatedHosts, hosts_or_skip
from harness.ringrun_job import ROOT, TIMEOUT_S, needs_mpi, on_each_network, processes_with, wait_until

from ringtrain.runner.check import HostReport, Pair, Reached, differences, table_of_pairs

SLEEP = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(600)"


@pytest.fixture(scope="module")
def four_hosts() -> Iterator[SimulatedHosts]:
    with hosts_or_skip(4, rate="1gbit") as hosts:
        yield hosts


def start(hosts: SimulatedHosts, *words: str, **more: str) -> subprocess.Popen[str]:
    command = hosts.command_on(0, [sys.executable, "-m", "ringtrain.run", *words])
    environment = {**os.environ, "PYTHONPATH": ROOT, **hosts.environment, **more}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def with_agent(hosts: SimulatedHosts, file: Path, script: str) -> dict[str, str]:
    """The variables for reaching `hosts` by a shell script, in which $AGENT is what reaches them otherwise."""
    (real,) = {value for value in hosts.environment.values() if value.endswith("agent.sh")}
    file.write_text(f"#!/bin/sh\nAGENT={real}\n{script}\n")
    file.chmod(0o755)
    return {name: str(file) for name, value in hosts.environment.items() if value == real}


# --- the table --------------------------------------------------------------------------------------------------------


def test_differences_are_reported_with_the_hosts() -> None:
    report = HostReport("n1", "3.11.7", "0.1.0", "MPICH 5.0.2")
    reached = [
        Reached("h1", report, ""),
        Reached("h2", report._replace(python="3.12.1", mpi="Open MPI 5.0.8"), ""),
        Reached("h3", None, "Permission denied (publickey)."),
    ]
    assert differences(reached) == [
        "h3 cannot be used: Permission denied (publickey).",
        "Python differs: 3.11.7 on h1; 3.12.1 on h2",
        "MPI differs: MPICH 5.0.2 on h1; Open MPI 5.0.8 on h2",
    ]
    assert differences(reached[:1]) == []


def test_a_pair_is_a_line() -> None:
    head, line = table_of_pairs(["h1", "h2"], [Pair(0, 1, 117.2, 116.8, 210.4, -0.034)]).splitlines()
    assert head.split()[:2] == ["first", "second"] and line.split() == ["h1", "h2", "117", "117", "210", "-0.03"]


# --- jobs -------------------------------------------------------------------------------------------------------------


@needs_mpi
def test_the_check_of_four_hosts_measures_each_pair(four_hosts: SimulatedHosts) -> None:
    begin = time.monotonic()
    with start(four_hosts, "-H", ",".join(f"{name}:2" for name in four_hosts.names), "--check") as process:
        printed, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, printed + errors
    assert time.monotonic() - begin < 30
    hosts, pairs, _ = printed.split("\n\n")
    assert [line.split()[0] for line in hosts.splitlines()[1:]] == four_hosts.names
    assert len(pairs.splitlines()) == 1 + 6
    for line in pairs.splitlines()[1:]:
        there, back, _, clock_ms = map(float, line.split()[2:])
        # a link of 1 Gbit/s carries at most 125; the hosts have one clock
        assert 5 < there < 130 and 5 < back < 130 and abs(clock_ms) < 20


@needs_mpi
def test_the_check_names_a_host_that_cannot_be_reached(four_hosts: SimulatedHosts) -> None:
    with start(four_hosts, "-H", f"{four_hosts.names[0]},{four_hosts.names[1]},nowhere", "--check") as process:
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert printed.splitlines()[-1].startswith("nowhere cannot be used: ") and "differs" not in printed


@needs_mpi
@pytest.mark.fast
def test_ranks_use_the_interface_and_fail_by_host(four_hosts: SimulatedHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGTRAIN_NETWORK", "mpi")
    script = """
import os, sys
from mpi4py import MPI
print(MPI.COMM_WORLD.allreduce(1), os.environ["GREETING"])
sys.exit(9 if MPI.COMM_WORLD.rank == 1 else 0)
"""
    words = ["-H", ",".join(four_hosts.names[:2]), "--network-interface", "eth0", "--ssh-port", "2222"]
    with start(four_hosts, *words, "--env", "GREETING=hello", "python", "-c", script) as process:
        printed, errors = process.communicate(timeout=TIMEOUT_S)
    assert sorted(printed.splitlines()) == ["[0] 2 hello", "[1] 2 hello"], errors
    assert process.returncode == 9
    assert f"the first to fail was rank 1 on {four_hosts.names[1]}, with exit code 9" in errors


# Words that launchers, shells and command lines might take for something else.
ODD = {
    "ODD_SPACES": "  a  b ",
    "ODD_LINES": "one\ntwo\n\n",
    "ODD_QUOTES": "'\"`$HOME\\",
    "ODD_UNICODE": "\u00fc \u2192 \u65e5\u672c \udcff",
    "ODD_EQUALS": "=a==b=",
    "ODD_EMPTY": "",
    "ODD_LISTS": "a,b;c:d|e {f,g}",
    "ODD_FLAG": "-x --help",
    "ODD_LONG": "x" * 100_000,
    "odd_lower": "%s %%",
}


@needs_mpi
@pytest.mark.fast
@on_each_network
def test_variables_travel_to_other_hosts_but_for_what_belongs_to_this_one(
    four_hosts: SimulatedHosts, tmp_path: Path
) -> None:
    login = f"PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME={tmp_path} HOSTNAME=theirs"
    agents = with_agent(four_hosts, tmp_path / "as_ssh", f'exec env -i {login} $AGENT "$@"')
    given = {**ODD, **{f"MANY_{number}": "1" for number in range(500)}}
    # not printed: ringrun breaks so long a line
    script = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["HOSTNAME"]).write_text(json.dumps(dict(os.environ)))
"""
    (reports := tmp_path / "found").mkdir()
    words = ["-H", ",".join(four_hosts.names[:2]), "--env", "SSH_MINE", "python", "-c", script, str(reports)]
    of_here = {"CUDA_VISIBLE_DEVICES": "7", "HOSTNAME": "ours", "SLURM_PROCID": "0", "SSH_MINE": "1"}
    with start(four_hosts, *words, **agents, **given, **of_here, PWD=os.getcwd()) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert sorted(path.name for path in reports.iterdir()) == ["ours", "theirs"], errors
    ranks = [json.loads((reports / name).read_text()) for name in ("ours", "theirs")]
    for found in ranks:
        assert {name: found.get(name) for name in given} == given
        assert found["SSH_MINE"] == "1" and found["PWD"] == os.getcwd()
    assert "CUDA_VISIBLE_DEVICES" not in ranks[1] and "SLURM_PROCID" not in ranks[1]


FOR_TORCHRUN = """
import os, torch
import torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print(int(ones.item()), dist.get_rank(), os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"])
dist.destroy_process_group()
"""


@needs_mpi
@on_each_network
def test_a_script_for_torchrun_meets_on_the_host_of_rank_0(four_hosts: SimulatedHosts) -> None:
    pytest.importorskip("torch")
    second, first = four_hosts.names[:2]  # where ringrun does not run
    with start(four_hosts, "-H", f"{first}:2,{second}", "python", "-c", FOR_TORCHRUN) as process:
        printed, errors = process.communicate(timeout=TIMEOUT_S)
    assert sorted(printed.splitlines()) == [f"[{rank}] 3 {rank} {rank % 2} {first}" for rank in range(3)], errors


@pytest.fixture
def second_link(four_hosts: SimulatedHosts) -> Iterator[None]:
    """A link eth1 between the first two hosts, beside that of all hosts."""
    first, second = four_hosts.names[:2]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=TIMEOUT_S)

    ip("-n", first, "link", "add", "eth1", "type", "veth", "peer", "name", "eth1", "netns", second)
    for index, name in enumerate((first, second), start=1):
        ip("-n", name, "address", "add", f"10.98.0.{index}/24", "dev", "eth1")
        ip("-n", name, "link", "set", "eth1", "up")
    yield
    ip("-n", first, "link", "delete", "eth1")


@needs_mpi
@pytest.mark.usefixtures("second_link")
@pytest.mark.parametrize(("used", "unused"), [("eth0", "eth1"), ("eth1", "eth0")])
@on_each_network
def test_ranks_talk_through_the_interface_that_is_given(four_hosts: SimulatedHosts, used: str, unused: str) -> None:
    script = """
import numpy, ringtrain as hvd
hvd.init()
print(hvd.allreduce(numpy.full(1 << 20, hvd.rank() + 1.0), op=hvd.Sum).sum())
"""
    before = {name: four_hosts.bytes_sent(1, name) for name in (used, unused)}
    words = ["-H", ",".join(four_hosts.names[:2]), "--network-interfaces", used, "python", "-c", script]
    with start(four_hosts, *words) as process:
        printed, errors = process.communicate(timeout=TIMEOUT_S)
    # UCX may say there, too, that nobody has taken the call to a round that had begun
    assert {f"[{rank}] {3.0 * (1 << 20)}" for rank in (0, 1)} <= set(printed.splitlines()), errors
    sent = {name: four_hosts.bytes_sent(1, name) - before[name] for name in (used, unused)}
    # half of the 8 MB at least
    assert sent[used] > 4 << 20 and sent[unused] < 1 << 20, sent


@needs_mpi
@pytest.mark.fast
def test_the_launcher_and_the_check_give_ssh_its_options(four_hosts: SimulatedHosts, tmp_path: Path) -> None:
    key, log = tmp_path / "key", tmp_path / "log"
    key.touch()
    agents = with_agent(four_hosts, tmp_path / "agent", f'echo "$@" >> {log}\nexec $AGENT "$@"')
    words = ["-H", ",".join(four_hosts.names[:2]), "-p", "2222", "-i", str(key)]
    for what in (["python", "-c", "pass"], ["--check"]):
        log.write_text("")
        with start(four_hosts, *words, *what, **agents) as process:
            printed, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, printed + errors
        calls = [line for line in log.read_text().splitlines() if four_hosts.names[1] in line]
        assert calls and all("-p2222" in line and f"-i{key}" in line for line in calls)


@needs_mpi
@pytest.mark.fast
@on_each_network
def test_ranks_that_do_not_start_in_time_are_named(four_hosts: SimulatedHosts, tmp_path: Path) -> None:
    agents = with_agent(four_hosts, tmp_path / "slow_agent", "sleep 600")
    begin = time.monotonic()
    words = ["-H", ",".join(four_hosts.names[:2]), "--start-timeout", "1.5", "python", "-c", "pass"]
    with start(four_hosts, *words, RINGRUN_TEST=str(tmp_path), **agents) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1 and time.monotonic() - begin < 15
    hosts = ",".join(f"{name}:1" for name in four_hosts.names[:2])
    assert f"did not start in 1.5 s; try ringrun -H {hosts} --check, or a longer start timeout" in errors
    wait_until(lambda: not processes_with("RINGRUN_TEST", str(tmp_path)), 10)


@needs_mpi
@pytest.mark.fast
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
@on_each_network
def test_nothing_is_left_on_any_host(four_hosts: SimulatedHosts, tmp_path: Path, sent: signal.Signals) -> None:
    names = ",".join(f"{name}:1" for name in four_hosts.names[:3])
    with start(four_hosts, "-H", names, "python", "-c", SLEEP, str(tmp_path)) as process:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
        os.kill(process.pid, sent)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == (143 if sent == signal.SIGTERM else -9)
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), 15)


def test_a_lost_host_is_named_and_the_exit_code_is_1(four_hosts: SimulatedHosts, tmp_path: Path) -> None:
    host = four_hosts.names[1]
    # as ssh ends when its connection does
    agent = with_agent(four_hosts, tmp_path / "ssh", '$AGENT "$@"; exit 255')
    words = ["-np", "2", "-H", f"{four_hosts.names[0]}:1,{host}:1", "--network", "mpi"]
    with start(four_hosts, *words, sys.executable, "-c", SLEEP, str(tmp_path), **agent) as process:
        wait_until(lambda: len([path for path in tmp_path.iterdir() if path.name.isdecimal()]) == 2, TIMEOUT_S)
        time.sleep(1)  # a daemon whose host is lost while it reports to its launcher is another case
        for pid in subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    last = errors.splitlines()[-1]
    assert process.returncode == 1 and "got lost: the launcher ended with exit code" in last, errors
    # Open MPI names the host or not
    assert last.endswith(f"; is {host} up, and the network to it?") or (host in last and "--check" in last), errors
