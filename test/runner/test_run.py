"""ringrun: hosts, flags, the exact argument list of each launcher, and real launches with this environment's MPI."""

from __future__ import annotations

import itertools
import os
import pwd
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from harness.ringrun_job import TIMEOUT_S, needs_mpi, on_each_network, ringrun

from ringtrain.options import table
from ringtrain.record.folders import private_folder
from ringtrain.runner import command, launchers, mpi_library
from ringtrain.runner.flags import build_parser, option_variables
from ringtrain.runner.hosts import Host, UsageError, parse_hosts, read_hostfile
from ringtrain.runner.job import Job, environment_of_ranks
from ringtrain.runner.launchers import Hydra, IntelHydra, OpenMpi, Srun, launcher_of_mpi
from ringtrain.runner.mpi_library import MpiNotFound, with_home

TRAIN = ["python", "train.py", "--lr", "0.1"]


def parse(*words: str) -> Any:
    return build_parser().parse_args(words)


# --- hosts ------------------------------------------------------------------------------------------------------------


def test_hosts_of_the_command_line() -> None:
    assert parse_hosts("h1:2,node-7.cluster.org:16,10.0.0.3") == [
        Host("h1", 2),
        Host("node-7.cluster.org", 16),
        Host("10.0.0.3", 1),
    ]
    assert parse_hosts("me@h1:2,fe80::1,[::1]:4,me@[::1]") == [
        *(Host("me@h1", 2), Host("fe80::1", 1)),
        *(Host("::1", 4), Host("me@::1", 1)),
    ]
    for host in (Host("h1", 2), Host("fe80::1", 2), Host("me@::1", 3)):
        assert parse_hosts(str(host)) == [host]  # as the starter is told them


def test_a_host_without_a_slot_is_left_out(tmp_path: Path) -> None:
    assert parse_hosts("h1:0,h2:1") == [Host("h2", 1)]
    with pytest.raises(UsageError, match="-H h1:0: no host has a slot"):
        parse_hosts("h1:0")
    (file := tmp_path / "hosts").write_text("\ufeffh1 slots=0\nh2 slots=1\n", encoding="utf-8")
    assert read_hostfile(str(file)) == [Host("h2", 1)]


@pytest.mark.parametrize(
    "text", ["", "h1:", "1:2:3", "@h1", "[h1]", "h1:-1", "h1:two", "h1,,h2", "h1:2:3", "-x", "h1;rm", "h1 h2"]
)
def test_a_malformed_host_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a host"):
        parse_hosts(text)


def test_hosts_of_a_hostfile(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(
        "# the cluster\nh1 slots=2\n\nh2:3  # fast\n  h3\nh4   slots = 4\nh3 slots=1 max_slots=8\nh5:2 ifname=ib0"
    )
    hosts = [Host("h1", 2), Host("h2", 3), Host("h3", 2), Host("h4", 4), Host("h5", 2)]
    assert read_hostfile(str(hostfile)) == hosts


def test_a_host_that_is_named_twice_has_the_slots_of_both() -> None:
    assert parse_hosts("h1,h2:2,h1:3") == [Host("h1", 4), Host("h2", 2)]


@pytest.mark.parametrize(
    ("content", "message"),
    [("h1 slots=2\nh2 slot=2\n", "hosts, line 2"), ("# none\n", "names no host"), (None, "No such file")],
)
def test_a_bad_hostfile_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    hostfile = tmp_path / "hosts"
    if content is not None:
        hostfile.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_hostfile(str(hostfile))


# --- flags ------------------------------------------------------------------------------------------------------------


def test_everything_from_the_first_word_is_the_command() -> None:
    arguments = parse("-np", "4", "--verbose", "python", "train.py", "-np", "9", "--dry-run", "-H", "x")
    assert arguments.num_proc == 4 and arguments.verbose and not arguments.dry_run and arguments.hosts is None
    assert arguments.command == ["python", "train.py", "-np", "9", "--dry-run", "-H", "x"]


@pytest.mark.parametrize("flag", ["-np", "-n", "--num-proc"])
def test_the_names_of_num_proc(flag: str) -> None:
    assert parse(flag, "3", "x").num_proc == 3


def test_an_option_flag_sets_its_variable_and_keeps_the_text() -> None:
    arguments = parse("--fusion-threshold-mb", "0.50", "--shared-memory", "off", "x")
    variables = option_variables(arguments)
    assert variables == {"RINGTRAIN_FUSION_THRESHOLD_MB": "0.50", "RINGTRAIN_SHARED_MEMORY": "off"}
    assert option_variables(parse("x")) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--fusion-treshold-mb", "3", "-np", "2"],
            r"arguments: --fusion-treshold-mb; did you mean --fusion-threshold-mb\?$",
        ),
        (["--something=else"], "unrecognized arguments: --something=else$"),
        (["-np", "0", "x"], 'whole number from 1, not "0"'),
        (["-np", "-1", "x"], "-np"),
        (["-np", "two", "x"], 'whole number from 1, not "two"'),
        (["-np"], "expected one argument"),
        (["--fusion-threshold-mb", "4097", "x"], 'a number from 0 to 4096, not "4097"'),
        (["--fusion-threshold-mb", "nan", "x"], "a number from 0 to 4096"),
        (["--fusion-threshold-mb", "much", "x"], "a number from 0 to 4096"),
        (["--shared-memory", "maybe", "x"], "maybe"),
        (["--launcher", "carrier-pigeon", "x"], "carrier-pigeon"),
        (["--no-such-flag", "x"], "--no-such-flag"),
        (["--nproc-per-node=2", "x"], "arguments: --nproc-per-node=2; say -np N, the number of ranks on all hosts$"),
        (["--nproc_per_node", "2", "x"], "say -np N"),
        (["-np", "2", "-x", "NAME", "x"], "arguments: -x; say --env NAME=VALUE, or --env NAME$"),
        (["--rdzv-endpoint=h1:29500", "x"], "ringrun needs no place where the ranks meet: leave it out$"),
        (["--mca", "btl", "tcp", "x"], "words for the launcher itself go into --mpi-args"),
    ],
)
def test_a_bad_flag_is_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(*words)


def test_the_help_shows_every_option_with_its_default() -> None:
    text = "".join(build_parser().format_help().split())
    assert all("".join(option.meaning.split()) in text for option in table.TABLE)
    assert "(default:128)" in text and "(default:auto)" in text


# --- the job ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "num_proc", "hosts"),
    [
        (["-np", "4", *TRAIN], 4, []),
        (["-np", "4", "--", *TRAIN], 4, []),
        (["-H", "h1:2,h2:3", *TRAIN], 5, [Host("h1", 2), Host("h2", 3)]),
        (["-np", "3", "-H", "h1:2,h2:3", *TRAIN], 3, [Host("h1", 2), Host("h2", 3)]),
    ],
)
def test_the_number_of_ranks_is_given_or_the_sum_of_the_slots(
    words: list[str], num_proc: int, hosts: list[Host]
) -> None:
    job = command.build_job(parse(*words), {"PATH": "/bin"})
    assert (job.command, job.num_proc, job.hosts) == (TRAIN, num_proc, hosts)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-np", "2"], "no command"),
        (["-np", "2", "--"], "no command"),
        (TRAIN, "how many ranks"),
        (["-np", "6", "-H", "h1:2,h2:3", *TRAIN], "-np 6 is more than the 5 slots of h1:2,h2:3"),
        (["-H", "h1", "--hostfile", "hosts", *TRAIN], "not with both"),
        (["--hostfile", "/no/such/file", *TRAIN], "/no/such/file"),
        (["-np", "2", __file__, "--x"], f"is a script and not a program: write python {__file__} --x"),
    ],
)
def test_a_job_that_cannot_be_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        command.build_job(parse(*words), {"PATH": "/bin"})


def test_python_is_this_python_even_when_its_folder_is_not_on_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("venv", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "python").touch(mode=0o755)
    venv, other = str(tmp_path / "venv"), str(tmp_path / "other")
    monkeypatch.setattr(sys, "executable", venv + "/python")
    assert environment_of_ranks({"PATH": other})["PATH"] == f"{venv}:{other}"
    assert environment_of_ranks({"PATH": f"{venv}:{other}"})["PATH"] == f"{venv}:{other}"
    assert environment_of_ranks({"PATH": f"/nowhere:{venv}"})["PATH"] == f"/nowhere:{venv}"
    assert environment_of_ranks({})["PATH"] == f"{venv}:{os.defpath}"


def test_a_script_that_can_be_executed_is_a_program(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").touch(mode=0o755)
    assert command.build_job(parse("-np", "2", str(script)), {"PATH": "/bin"}).command == [str(script)]


def test_without_a_home_that_exists_a_launcher_gets_a_private_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Open MPI obeys `.openmpi` there, so no other user may write to it."""
    user = pwd.getpwuid(os.geteuid())
    assert with_home({"HOME": "/somewhere"}) == {"HOME": "/somewhere"}
    assert with_home({"HOME": "", "A": "b"}) == {"HOME": user.pw_dir, "A": "b"}
    unknown = pwd.struct_passwd((*user[:5], "/no/such/home", user.pw_shell))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    private_folder.cache_clear()
    assert with_home({}) == {"HOME": str(tmp_path / f"ringtrain-{os.geteuid()}")}
    private_folder.cache_clear()


@pytest.mark.parametrize("module", ["ringtrain.run", "ringtrain.launch"])
def test_a_current_folder_that_was_removed_is_named(module: str, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    words = {"ringtrain.run": "-np 1", "ringtrain.launch": "--launcher local -n 1 -s 1"}[module]
    script = f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && exec {sys.executable} -m {module} {words} true"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert "the current folder has been removed" in done.stderr and done.returncode == 2, done.stderr


@pytest.mark.parametrize(
    ("before", "text"),
    [("true", "loopback down"), ("ip link set lo up; ip addr del 127.0.0.1/8 dev lo", "gives loopback its address")],
)
@pytest.mark.parametrize("words", [["--network", "sockets"], ["--min-np", "2"]], ids=["ranks", "elastic"])
def test_a_host_without_loopback_is_told_so_at_once(words: list[str], before: str, text: str) -> None:
    try:
        subprocess.run(["unshare", "--net", "ip", "link"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    script = "import ringtrain as hvd; hvd.init()"
    inside = ["unshare", "--net", "sh", "-c", f'{before}; exec "$@"', "sh", sys.executable, "-m", "ringtrain.run"]
    command = [*inside, "-np", "2", *words, sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert text in done.stdout + done.stderr and done.returncode != 0, done


def test_plain_python_in_a_job_of_slurm_with_several_tasks_says_so() -> None:
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
    command = [sys.executable, "-c", "import ringtrain as hvd; hvd.init(); print(hvd.size())"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert done.stdout == "1\n" and "2 tasks (SLURM_NTASKS): start the script with srun" in done.stderr, done


@needs_mpi
def test_a_job_needs_no_home() -> None:
    without = {name: value for name, value in os.environ.items() if name != "HOME"}
    words = [sys.executable, "-m", "ringtrain.run", "-np", "2", "python", "-c", "import ringtrain; ringtrain.init()"]
    done = subprocess.run(words, env=without, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr


# --- argument lists ---------------------------------------------------------------------------------------------------

ENVIRONMENT = {
    "BASH_FUNC_module%%": "() {  eval `modulecmd`\n}",
    "CUDA_VISIBLE_DEVICES": "0",
    "DISPLAY": ":0",
    "HF_HOME": "/data/hf",
    "HOME": "/home/me",
    "HOROVOD_CYCLE_TIME": "1",
    "HOSTNAME": "h0",
    "LD_LIBRARY_PATH": "/lib",
    "NCCL_DEBUG": "INFO",
    "OLDPWD": "/",
    "OMPI_MCA_btl": "tcp,self",
    "PATH": "/bin",
    "PWD": "/work",
    "RINGTRAIN_MAILBOX_KB": "64",
    "SLURM_JOB_NAME": "mine",
    "SLURM_PROCID": "0",
    "UCX_TLS": "tcp",
}
PASSED_ON = ["HF_HOME", "HOME", "HOROVOD_CYCLE_TIME", "LD_LIBRARY_PATH", "NCCL_DEBUG", "PATH", "PWD"]
PASSED_ON += ["RINGTRAIN_MAILBOX_KB", "SLURM_JOB_NAME", "UCX_TLS"]
EXPORTS = [word for name in PASSED_ON for word in ("-x", name)]
TWO_HOSTS = [Host("h1", 2), Host("h2", 2)]


def job(num_proc: int, hosts: list[Host], **more: str) -> Job:
    return Job(TRAIN, num_proc, hosts, {**ENVIRONMENT, **more})


@pytest.fixture
def as_user_with_four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(launchers, "physical_cores", lambda: 4)


@pytest.mark.usefixtures("as_user_with_four_cores")
@pytest.mark.parametrize(
    ("num_proc", "hosts", "placement"),
    [
        (4, [], []),
        (5, [], ["--map-by", ":OVERSUBSCRIBE"]),
        (4, TWO_HOSTS, ["-H", "h1:2,h2:2"]),
        (8, [Host("h1", 8)], ["-H", "h1:8"]),
    ],
)
def test_the_arguments_of_open_mpi(num_proc: int, hosts: list[Host], placement: list[str]) -> None:
    assert OpenMpi("/v/mpirun").arguments(job(num_proc, hosts)) == [
        "/v/mpirun", "-np", str(num_proc), *placement, "--bind-to", "none", *EXPORTS, *TRAIN
    ]  # fmt: skip


@pytest.mark.usefixtures("as_user_with_four_cores")
def test_open_mpi_is_allowed_to_run_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert OpenMpi("/v/mpirun").arguments(job(2, [])) == [
        "/v/mpirun", "-np", "2", "--allow-run-as-root", "--bind-to", "none", *EXPORTS, *TRAIN
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("hosts", "placement"),
    [([], []), (TWO_HOSTS, ["-hosts", "h1:2,h2:2"]), ([Host("h1", 4)], ["-hosts", "h1"])],
)
def test_the_arguments_of_hydra(hosts: list[Host], placement: list[str]) -> None:
    expected = ["/v/mpiexec.hydra", "-genvlist", ",".join(PASSED_ON), *placement, "-np", "4", *TRAIN]
    assert Hydra("/v/mpiexec.hydra").arguments(job(4, hosts)) == expected
    if len(hosts) < 2:
        expected[2] = ",".join(sorted([*PASSED_ON, "I_MPI_PIN"]))
        assert IntelHydra("/v/mpiexec.hydra").arguments(job(4, hosts)) == expected


def test_intel_mpi_gets_a_section_for_each_host() -> None:
    hosts = [Host("h1", 3), Host("h2", 2), Host("h3", 2)]
    assert IntelHydra("/v/mpiexec.hydra").arguments(job(4, hosts)) == [
        *("/v/mpiexec.hydra", "-genvlist", ",".join(sorted([*PASSED_ON, "I_MPI_PIN"]))),
        *("-host", "h1", "-np", "3", *TRAIN),
        *(":", "-host", "h2", "-np", "1", *TRAIN),
    ]


def test_intel_mpi_binds_nothing_and_uses_slurm_unless_told_otherwise() -> None:
    intel = IntelHydra("/v/mpiexec.hydra")
    assert intel.environment(job(4, [])) == {**ENVIRONMENT, "I_MPI_PIN": "0"}
    assert intel.environment(job(4, [], I_MPI_PIN="1"))["I_MPI_PIN"] == "1"
    assert intel.environment(job(4, [], SLURM_JOB_ID="7"))["I_MPI_HYDRA_BOOTSTRAP"] == "slurm"
    assert Hydra("/v/mpiexec.hydra").environment(job(4, [])) == ENVIRONMENT


@pytest.mark.parametrize(
    ("hosts", "placement"),
    [([], []), (TWO_HOSTS, ["--nodes=2", "--nodelist=h1,h2", "--ntasks-per-node=2"])],
)
def test_the_arguments_of_srun(hosts: list[Host], placement: list[str]) -> None:
    assert Srun("/usr/bin/srun", "pmix").arguments(job(4, hosts)) == [
        "/usr/bin/srun", "--ntasks=4", "--mpi=pmix", "--cpu-bind=none", "--export=ALL", *placement, *TRAIN
    ]  # fmt: skip


def test_variables_that_the_user_names_travel_in_any_case() -> None:
    asked_for = job(2, TWO_HOSTS)._replace(exported=("CUDA_VISIBLE_DEVICES", "DISPLAY"))
    names = sorted([*PASSED_ON, "CUDA_VISIBLE_DEVICES", "DISPLAY"])
    assert Hydra("/v/mpiexec.hydra").arguments(asked_for)[2] == ",".join(names)
    words = OpenMpi("/v/mpirun").arguments(asked_for)
    assert [word for before, word in itertools.pairwise(words) if before == "-x"] == names


def test_srun_refuses_hosts_of_unequal_slots() -> None:
    with pytest.raises(UsageError, match="same number of slots"):
        Srun("/usr/bin/srun", "pmix").arguments(job(5, [Host("h1", 2), Host("h2", 3)]))


# --- which launcher ---------------------------------------------------------------------------------------------------


def make_program(folder: Path, name: str, version: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\necho {shlex.quote(version)}\n")
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def beside_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder that stands for the one of sys.executable; PATH holds only the folder `on_path`."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python_bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "on_path"))
    return tmp_path / "python_bin"


def test_a_launcher_is_found_beside_python_then_beside_the_library_then_on_path(
    beside_python: Path, tmp_path: Path
) -> None:
    library = str(tmp_path / "mpi" / "lib" / "release" / "libmpi.so.40")
    version = "mpirun (Open MPI) 5.0.11"
    assert mpi_library.find_launcher("Open MPI", library) is None
    for folder in (tmp_path / "on_path", tmp_path / "mpi" / "bin", beside_python):
        expected = make_program(folder, "mpirun", version)
        assert mpi_library.find_launcher("Open MPI", library) == expected


def test_the_launcher_of_another_mpi_is_passed_over(beside_python: Path, tmp_path: Path) -> None:
    make_program(beside_python, "mpirun", "mpirun (Open MPI) 5.0.11")
    make_program(beside_python, "mpiexec.hydra", "Intel(R) MPI Library for Linux* OS, Version 2021.18")
    expected = make_program(tmp_path / "on_path", "mpirun", "HYDRA build details:")
    assert mpi_library.find_launcher("MPICH", None) == expected


@pytest.mark.parametrize(
    ("library", "program", "version", "expected"),
    [
        ("Open MPI", "mpirun", "mpirun (Open MPI) 4.1.6", OpenMpi),
        ("MPICH", "mpiexec.hydra", "HYDRA build details:", Hydra),
        ("MVAPICH", "mpiexec", "HYDRA build details:", Hydra),
        ("Intel MPI", "mpiexec.hydra", "Intel(R) MPI Library for Linux* OS", IntelHydra),
    ],
)
def test_each_library_has_its_launcher(
    beside_python: Path, library: str, program: str, version: str, expected: type
) -> None:
    make_program(beside_python, program, version)
    assert type(launcher_of_mpi("auto", library, None, os.environ)) is expected


def test_srun_is_chosen_by_name_or_where_the_allocation_has_no_mpirun(beside_python: Path, tmp_path: Path) -> None:
    srun = make_program(tmp_path / "on_path", "srun", "slurm 24.05")
    allocation = {**os.environ, "SLURM_JOB_ID": "7"}
    for choice in ("auto", "srun"):
        chosen = launcher_of_mpi(choice, "MPICH", None, allocation)
        assert isinstance(chosen, Srun) and (chosen.path, chosen.process_manager) == (srun, "pmi2")
    with pytest.raises(UsageError, match="only inside a Slurm allocation"):
        launcher_of_mpi("srun", "MPICH", None, os.environ)
    with pytest.raises(MpiNotFound, match="no mpirun of MPICH"):
        launcher_of_mpi("mpirun", "MPICH", None, allocation)
    make_program(beside_python, "mpirun", "mpirun (Open MPI) 5.0.11")
    assert isinstance(launcher_of_mpi("auto", "Open MPI", None, allocation), OpenMpi)


# --- the command itself, with this environment's MPI ------------------------------------------------------------------


@needs_mpi
def test_ranks_of_one_world_are_started() -> None:
    script = "from mpi4py import MPI; w = MPI.COMM_WORLD; print('sum', w.size, w.allreduce(w.rank), flush=True)"
    result = ringrun("-np", "2", "python", "-c", script)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0] sum 2 1", "[1] sum 2 1"]


@needs_mpi
@on_each_network
def test_more_ranks_than_cores_are_started_and_the_launcher_is_detected() -> None:
    count = len(os.sched_getaffinity(0)) + 1
    if count > 9:
        pytest.skip("too many cores to have one rank more")
    script = "from ringtrain.job.launched_by import detect; print(*detect()[1:], flush=True)"
    result = ringrun("-np", str(count), "python", "-c", script)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == sorted(
        f"[{rank}] {rank} {count} {rank} {count}" for rank in range(count)
    )


@needs_mpi
@on_each_network
def test_slots_on_this_host_are_used() -> None:
    result = ringrun("-H", "localhost:2", "python", "-c", "print('rank', flush=True)")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0] rank", "[1] rank"]


@needs_mpi
@on_each_network
def test_python_is_this_python_although_path_does_not_name_it() -> None:
    result = ringrun("-np", "2", "python", "-c", "import sys; print(sys.prefix, flush=True)", PATH="/usr/bin:/bin")
    assert sorted(result.stdout.splitlines()) == [f"[0] {sys.prefix}", f"[1] {sys.prefix}"], result.stderr


@needs_mpi
def test_the_exit_code_of_a_rank_is_returned() -> None:
    assert ringrun("-np", "2", "python", "-c", "raise SystemExit(7)").returncode == 7


@needs_mpi
@on_each_network
def test_a_dry_run_prints_a_line_that_a_shell_can_run() -> None:
    result = ringrun("-np", "2", "--dry-run", "python", "-c", "print('a b', flush=True)")
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    ran = subprocess.run(["sh", "-c", line], check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ran.stdout.count("a b") == 2, ran.stderr


@needs_mpi
def test_bad_input_is_one_sentence_and_exit_code_2() -> None:
    result = ringrun("-np", "3", "-H", "h1:2", "python")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == "ringrun: -np 3 is more than the 2 slots of h1:2; give the hosts more\n"


@needs_mpi
@pytest.mark.parametrize("words", [["-H", "no-such-host.invalid:2"], ["-np", "2", "--network-interface", "nosuch0"]])
def test_ranks_that_never_start_are_told_with_what_was_asked_for(words: list[str]) -> None:
    if words[0] == "-np" and mpi_library.probe()["library"] != "Open MPI":
        pytest.skip("this launcher does not look at the interface on one host")
    result = ringrun(*words, "python", "-c", "pass")
    assert result.returncode == 1, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ringrun: ranks 0-1 did not start; try ") and words[-1] in last
    assert ("--check" in last) == (words[0] == "-H")


def test_ringrun_refuses_to_be_a_rank() -> None:
    result = ringrun("-np", "2", "python", PMI_RANK="1", PMI_SIZE="2", MPI_LOCALRANKID="1")
    assert result.returncode == 2 and "itself was started as rank 1" in result.stderr
