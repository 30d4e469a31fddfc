"""ringrun: hosts and sizes from batch systems, flags from a file, variables, and what they make of the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.ringrun_job import needs_mpi, ringrun

from ringtrain.job.launched_by import expand_counts, expand_node_list
from ringtrain.options import table
from ringtrain.runner import batch_scripts, command, flags, launch_command
from ringtrain.runner.batch_scripts import again_as_ringrun
from ringtrain.runner.hosts import Host, Lsf, Pbs, Sge, Slurm, UsageError, detect_allocation, remote_shell
from ringtrain.runner.job import Job
from ringtrain.runner.launchers import Hydra, IntelHydra, Launcher, OpenMpi, Srun

TRAIN = ["python", "train.py"]
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[01-02],m5", "SLURM_TASKS_PER_NODE": "4(x2),2"}


def parse(*words: str) -> Any:
    return flags.parse(words)


# --- allocations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n1,m-2", ["n1", "m-2"]),
        ("n[1-3,7],m5", ["n1", "n2", "n3", "n7", "m5"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[1,3].org", ["r1n1.org", "r1n3.org", "r2n1.org", "r2n3.org"]),
    ],
)
def test_a_node_list_of_slurm_is_expanded(text: str, names: list[str]) -> None:
    assert expand_node_list(text) == names


def test_counts_of_slurm_are_expanded() -> None:
    assert expand_counts("4(x2),3") == [4, 4, 3] and expand_counts("16") == [16]


def test_slurm_counts_tasks_if_they_were_asked_for_and_cpus_otherwise() -> None:
    cpus = {**SLURM, "SLURM_JOB_CPUS_PER_NODE": "16(x3)"}
    tasks = {**cpus, "SLURM_NTASKS": "10"}
    assert Slurm().read(cpus) == [Host("n01", 16), Host("n02", 16), Host("m5", 16)]
    assert Slurm().read(tasks) == [Host("n01", 4), Host("n02", 4), Host("m5", 2)]


def test_a_garbled_allocation_of_slurm_is_refused() -> None:
    with pytest.raises(UsageError, match="SLURM_TASKS_PER_NODE does not fit"):
        detect_allocation({**SLURM, "SLURM_TASKS_PER_NODE": "4", "SLURM_NTASKS": "4"})


def test_pbs_names_a_host_for_each_rank(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn1\nn2\nn1\n")
    assert Pbs().read({"PBS_NODEFILE": str(nodes)}) == [Host("n1", 3), Host("n2", 1)]
    with pytest.raises(UsageError, match="cannot be read"):
        Pbs().read({"PBS_NODEFILE": str(tmp_path / "none")})


def test_lsf_lists_hosts_and_slots() -> None:
    assert Lsf().read({"LSB_MCPU_HOSTS": "n1 4 n2 8"}) == [Host("n1", 4), Host("n2", 8)]
    for garbled in ("n1", "n1 four"):
        with pytest.raises(UsageError, match="LSB_MCPU_HOSTS"):
            Lsf().read({"LSB_MCPU_HOSTS": garbled})


def test_lsf_may_name_a_file_with_a_host_for_each_rank(tmp_path: Path) -> None:
    (hosts := tmp_path / "hosts").write_text("n1\nn1\nn2\n")
    assert Lsf().read({"LSB_DJOB_HOSTFILE": str(hosts)}) == [Host("n1", 2), Host("n2", 1)]


def test_sge_has_a_file_with_the_slots_of_each_host_and_queue(tmp_path: Path) -> None:
    (hosts := tmp_path / "pe_hostfile").write_text("n1 3 main.q@n1 UNDEFINED\nn2 1 main.q@n2 0\nn1 1 big.q@n1 <NULL>\n")
    assert Sge().read({"PE_HOSTFILE": str(hosts)}) == [Host("n1", 4), Host("n2", 1)]
    hosts.write_text("n1 many\n")
    with pytest.raises(UsageError, match="has no hosts and slots; give the hosts with -H"):
        detect_allocation({"PE_HOSTFILE": str(hosts)})


def program_in(folder: Path, name: str, script: str = "exit 0") -> str:
    """A PATH that has it."""
    (program := folder / name).write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(folder)


def test_launchers_reach_the_hosts_of_a_job_as_its_batch_system_does(tmp_path: Path) -> None:
    path = program_in(tmp_path, "qrsh")
    program_in(tmp_path, "blaunch")
    for variable, line, hydra in (("PE_HOSTFILE", "qrsh -inherit", "sge"), ("LSB_JOBID", "blaunch", "lsf")):
        environ = {variable: "1", "PATH": path}
        job = Job(TRAIN, 2, [Host("n1", 1), Host("n2", 1)], environ)
        of_open_mpi = OpenMpi("mpirun").environment(job)
        assert of_open_mpi["PRTE_MCA_plm_ssh_agent"] == of_open_mpi["OMPI_MCA_plm_rsh_agent"] == line
        assert Hydra("mpiexec").environment(job)["HYDRA_LAUNCHER"] == hydra
        assert IntelHydra("mpiexec").environment(job)["I_MPI_HYDRA_BOOTSTRAP"] == hydra
        assert remote_shell(environ, ["-p22"], ["-oX=1"]) == line.split()
        assert remote_shell({**environ, "RINGTRAIN_SSH_AGENT": "my sh"}, ["-p22"]) == ["my", "sh", "-p22"]
        own = job._replace(environment={**environ, "PRTE_MCA_plm_ssh_agent": "ssh"})
        assert "OMPI_MCA_plm_rsh_agent" not in OpenMpi("mpirun").environment(own)
        elsewhere = job._replace(environment={variable: "1", "PATH": "/no/such/folder"})
        assert "PRTE_MCA_plm_ssh_agent" not in OpenMpi("mpirun").environment(elsewhere)
        assert remote_shell({"PATH": path}, ["-p22"])[0] == "ssh"


# --- batch jobs of SGE ------------------------------------------------------------------------------------------------


def test_the_parallel_environment_has_to_be_said_where_there_are_several(tmp_path: Path) -> None:
    job = Job(TRAIN, 2, [], {"PATH": program_in(tmp_path, "qconf", "echo mpi; echo smp")})
    again = again_as_ringrun(["-np", "2"])
    with pytest.raises(UsageError, match='this cluster has mpi, smp: --mpi-args="-pe NAME 4"'):
        batch_scripts.sge_script(job, again)
    named = job._replace(launcher_arguments=("-pe", "smp", "2"))
    assert "#$ -pe smp 2" in batch_scripts.sge_script(named, again).splitlines()
    program_in(tmp_path, "qconf", "echo mpi")
    assert "#$ -pe mpi 2" in batch_scripts.sge_script(job, again).splitlines()
    with pytest.raises(UsageError, match="leaves the hosts to SGE"):
        batch_scripts.sge_script(named._replace(hosts=[Host("n1", 2)]), again)
    with pytest.raises(UsageError, match="needs the name of a parallel environment"):
        batch_scripts.sge_script(job._replace(environment={"PATH": "/no/such/folder"}), again)


def test_outside_of_batch_systems_nothing_is_found() -> None:
    assert detect_allocation({"PATH": "/bin"}) is None


def test_an_allocation_gives_the_hosts_and_the_number_of_ranks() -> None:
    environ = {"PATH": "/bin", "LSB_MCPU_HOSTS": "n1 4 n2 4"}
    job = command.build_job(parse(*TRAIN), environ)
    assert (job.num_proc, job.hosts, job.hosts_are_allotted) == (8, [Host("n1", 4), Host("n2", 4)], True)
    given = command.build_job(parse("-np", "2", "-H", "n2:2", *TRAIN), environ)
    assert (given.num_proc, given.hosts, given.hosts_are_allotted) == (2, [Host("n2", 2)], False)
    with pytest.raises(UsageError, match="more than the 8 slots of n1:4,n2:4, the allocation of LSF"):
        command.build_job(parse("-np", "9", *TRAIN), environ)


def test_srun_is_not_told_what_it_has_allotted_itself() -> None:
    job = Job(TRAIN, 10, [Host("n01", 4), Host("m5", 2)], {}, hosts_are_allotted=True)
    assert not [word for word in Srun("srun", "pmix").arguments(job) if word.startswith("--node")]


# --- the file of --config-file ----------------------------------------------------------------------------------------


MORE = ["--network-interface", "eth0", "--network-interface", "eth1", "--stall-check"]


def test_a_config_file_holds_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "# the cluster\nnp: 4\nH: h1:2,h2:2\nenv: [GREETING=good day, 'A=1, 2']  # a list\nfusion_threshold_mb: 64\n"
        "autotune: on\nverbose: true\nprefix-output: off\nshared-memory: off\noutput-filename: logs\n"
        "network-interfaces: [ib0, ib1]\nstart-timeout:\nstall-check: no\nparams:\n  cycle_time_ms: 5\n"
    )
    arguments = parse("--config-file", str(config), "--fusion-threshold-mb", "32", "--env", "MORE=1", *MORE, *TRAIN)
    assert (arguments.num_proc, arguments.hosts, arguments.fusion_threshold_mb) == (4, "h1:2,h2:2", "32")
    assert (arguments.verbose, arguments.prefix_output, arguments.output_filename) == (True, False, "logs")
    assert arguments.env == ["GREETING=good day", "A=1, 2", "MORE=1"] and arguments.command == TRAIN
    assert (arguments.network_interfaces, arguments.start_timeout) == ("eth0,eth1", 120)
    assert arguments.of_horovod == [("--no-stall-check", ""), ("--cycle-time-ms", "5"), ("--stall-check", "")]
    variables = flags.option_variables(arguments)
    expected = {"FUSION_THRESHOLD_MB": "32", "AUTOTUNE": "on", "SHARED_MEMORY": "off"}
    assert variables == {f"RINGTRAIN_{name}": value for name, value in expected.items()}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("# none\nnp 4\nhosts h1:2\n", 'config, line 2: write a name, a colon and a value, as in "num-proc: 4"'),
        ("- np: 4\n", "config, line 1: write a name"),
        ("verbose: loudly\n", "line 1: verbose takes true or false"),
        ("verbose: [true, true]\n", "line 1: verbose takes one value"),
        ("np: 2\nenv: 'open\n", "config, line 3: this is not YAML: .*end of stream"),
        ("np: 2\n\x00", "config: this is not YAML: .*special characters"),
        ("config-file: other\n", "cannot name another"),
        ("np: 4\nno-such-flag: 1\n", "config, line 2: .*--no-such-flag"),
        ("np: two\n", 'config, line 1: .*whole number from 1, not "two"'),
        ("np: 2\nnp: 3\n", "config, line 2: np is there twice"),
        ("no-prefix-output: on\n", 'config, line 1: write "prefix-output: false"'),
        ("\nfusion-threshold-mb: 9999\n", "config, line 2: .*a number from 0 to 4096"),
        ("np: 2\nparams:\n  cycle_time: 5\n", "config, line 3: horovodrun's file has no params.cycle_time"),
        ("params:\n  deep:\n    deeper: 5\n", "config, line 2: params.deep has no section of its own"),
        ("np: 2\nhosts: [h1:2, h2:2]\n", "config, line 2: hosts takes one value"),
        ("params:\n  cycle_time_ms: [1, 2]\n", "config, line 2: params.cycle_time_ms takes one value"),
        ("env: [[1]]\n", "config, line 1: env takes texts or numbers"),
        ("controller: pigeon\n", "config, line 1: horovodrun's file has no controller: pigeon"),
        ("np: 2\nmin-np: [1, 2]\n", "config, line 2: min-np takes one value"),
        ("blacklist-cooldown-range: 10\n", "config, line 1: .*expected 2 arguments"),
        (None, "No such file"),
    ],
)
def test_a_bad_config_file_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    config = tmp_path / "config"
    if content is not None:
        config.write_text(content)
    with pytest.raises(UsageError, match=message):
        parse("--config-file", str(config), *TRAIN)


# --- variables, interfaces, ssh ---------------------------------------------------------------------------------------


def test_every_option_is_a_flag() -> None:
    for option in table.TABLE:
        choice = option.choices[-1] if option.choices else ""
        value = {"number": f"{option.default}", "choice": choice, "steps": "5-7", "rates": "1000,100"}
        text = value.get(option.type, "some/path")
        name = option.name.replace("_", "-")
        is_switch = sorted(option.choices) == ["off", "on"]
        words = [f"--{name}"] if is_switch else [f"--{name}", text]
        text = "on" if is_switch else text
        variables = flags.option_variables(parse(*words, *TRAIN))
        assert variables == {table.environment_name(option.name): text}
    off = flags.option_variables(parse("--no-autotune", *TRAIN))
    assert off == {"RINGTRAIN_AUTOTUNE": "off"}


@pytest.mark.parametrize("build_parser", [flags.build_parser, launch_command.build_parser])
@pytest.mark.parametrize("name", table.GONE)
def test_the_flag_of_an_option_that_is_gone_is_taken_and_rank_0_says_why(
    name: str, build_parser: Callable[[], argparse.ArgumentParser]
) -> None:
    flag = f"--{name.replace('_', '-')}"
    variables = flags.option_variables(build_parser().parse_args(["-n", "2", flag, "5", *TRAIN]))
    assert variables == {table.environment_name(name): "5"}
    assert "has no effect any more: TCP " in table.misspelt(variables)[0]
    assert flag not in build_parser().format_help()


def test_the_file_may_have_an_option_that_is_gone(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("np: 2\nkv-resend-ms: 100\n")
    assert parse("--config-file", str(config), *TRAIN).kv_resend_ms == "100"


@pytest.mark.parametrize("text", ["foo", "", "3-", "4-3", "-1", "1-2-3"])
def test_steps_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f'--timeline-steps: must be steps such as 100-110, not "{text}"'):
        parse(f"--timeline-steps={text}", *TRAIN)


def test_variables_are_given_or_taken_from_here() -> None:
    environ = {"PATH": "/bin", "HERE": "1", "HOME": "/home/ada"}
    job = command.build_job(parse("-np", "2", "--env", "HERE", "--env", "A=b=c", "--env", "EMPTY=", *TRAIN), environ)
    assert job.exported == ("A", "EMPTY", "HERE") and job.environment["A"] == "b=c" and job.environment["EMPTY"] == ""
    arguments = OpenMpi("mpirun").arguments(job)
    exported = [arguments[i + 1] for i, word in enumerate(arguments) if word == "-x"]
    assert exported == ["A", "EMPTY", "HERE", "HOME", "PATH"]


@pytest.mark.parametrize("text", ["NOT_HERE", "=1", ""])
def test_a_variable_without_a_value_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write NAME=VALUE"):
        command.build_job(parse("-np", "2", "--env", text, *TRAIN), {"PATH": "/bin"})


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf"])
def test_a_start_timeout_is_a_number_of_seconds(text: str) -> None:
    with pytest.raises(UsageError, match="number of seconds"):
        parse("--start-timeout", text, *TRAIN)


def test_each_launcher_is_told_the_interface_and_the_port_in_its_own_words() -> None:
    job = Job(TRAIN, 2, [Host("h1", 1), Host("h2", 1)], {}, network_interfaces="ib0,eth1", ssh_port=2222)
    open_mpi = OpenMpi("mpirun")
    arguments = open_mpi.arguments(job)
    at = arguments.index("--mca")
    assert arguments[at : at + 3] == ["--mca", "btl_tcp_if_include", "ib0,eth1"]
    assert open_mpi.environment(job)["PRTE_MCA_plm_ssh_args"] == "-p2222"
    assert open_mpi.environment(job)["NCCL_SOCKET_IFNAME"] == "ib0,eth1"
    for hydra, variable in (
        (Hydra("mpiexec"), "HYDRA_LAUNCHER_EXTRA_ARGS"),
        (IntelHydra("mpiexec"), "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"),
    ):
        assert hydra.arguments(job)[3:5] == ["-iface", "ib0"]
        assert hydra.environment(job)[variable] == "-p2222"
        assert hydra.environment(job)["FI_TCP_IFACE"] == "ib0"
    with pytest.raises(UsageError, match="does not use ssh"):
        Srun("srun", "pmix").arguments(job)


LAUNCHERS = [OpenMpi("mpirun"), Hydra("mpiexec"), IntelHydra("mpiexec"), Srun("srun", "pmix")]


def test_the_port_and_the_key_stand_before_what_the_user_gives_to_ssh() -> None:
    own = "-i /home/me/key -p22"
    job = Job(TRAIN, 2, [Host("h1", 1), Host("h2", 1)], {}, ssh_port=2222, ssh_identity_file="/my/key")
    for launcher, name in (
        (OpenMpi("mpirun"), "PRTE_MCA_plm_ssh_args"),
        (OpenMpi("mpirun"), "OMPI_MCA_plm_rsh_args"),
        (Hydra("mpiexec"), "HYDRA_LAUNCHER_EXTRA_ARGS"),
        (IntelHydra("mpiexec"), "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"),
    ):
        with_both = job._replace(environment={name: own})
        assert launcher.environment(with_both)[name] == f"-p2222 -i/my/key {own}"  # ssh takes the first port
        assert launcher.environment(with_both._replace(ssh_port=None))[name] == f"-i/my/key {own}"
        neither = with_both._replace(ssh_port=None, ssh_identity_file=None)
        assert launcher.environment(neither)[name] == own
        assert name not in launcher.environment(neither._replace(environment={}))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_words_for_the_launcher_come_before_the_command(launcher: Launcher) -> None:
    job = Job(TRAIN, 2, [], {}, launcher_arguments=("--more", "a b"), binding_arguments=("--bind-to", "core"))
    arguments = launcher.arguments(job)
    command_at = arguments.index(TRAIN[0])
    assert 0 < arguments.index("--more") < command_at and 0 < arguments.index("--bind-to") < command_at
    assert arguments[arguments.index("--more") + 1] == "a b"
    assert "none" not in arguments and "--cpu-bind=none" not in arguments
    assert "I_MPI_PIN" not in launcher.environment(job)


def test_intel_mpi_gets_the_words_once_for_all_hosts() -> None:
    job = Job(TRAIN, 2, [Host("h1", 1), Host("h2", 1)], {}, launcher_arguments=("-genv", "A", "1"))
    arguments = IntelHydra("mpiexec").arguments(job)
    assert arguments[:6] == ["mpiexec", "-genvlist", "I_MPI_PIN", "-genv", "A", "1"] and arguments.count("-genv") == 1


@pytest.mark.parametrize(
    "words", [("--bind-to", "core"), ("--map-by", "slot"), ("--map-by", "slot", "--bind-to", "core")]
)
def test_open_mpi_gets_no_option_twice(words: tuple[str, ...]) -> None:
    many = Job(TRAIN, 1000, [], {}, launcher_arguments=words)
    arguments = OpenMpi("mpirun").arguments(many)
    assert arguments.count("--bind-to") == arguments.count("--map-by") == 1
    assert all(word in arguments for word in words)


def test_variables_among_the_words_for_open_mpi_win() -> None:
    environ = {"A": "here", "B": "here", "HOME": "/home/ada"}
    job = Job(TRAIN, 2, [], environ, ("A",), launcher_arguments=("-x", "A=a=b", "-x", "B"))
    arguments = OpenMpi("mpirun").arguments(job)
    assert [arguments[at + 1] for at, word in enumerate(arguments) if word == "-x"] == ["HOME", "A=a=b", "B"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_tcp_only_leaves_the_fast_fabrics_out(launcher: Launcher) -> None:
    job = Job(TRAIN, 2, [], {"FI_PROVIDER": "mine"}, has_tcp_only=True)
    environment = launcher.environment(job)
    assert (environment["NCCL_IB_DISABLE"], environment["UCX_TLS"], environment["FI_PROVIDER"]) == ("1", "^ib", "mine")
    if not isinstance(launcher, Hydra):
        assert environment["OMPI_MCA_pml"] == "ob1" and environment["OMPI_MCA_btl"].startswith("^openib,")
    assert "NCCL_IB_DISABLE" not in launcher.environment(job._replace(has_tcp_only=False))


def test_variables_that_the_user_has_set_are_kept() -> None:
    job = Job(TRAIN, 2, [], {"NCCL_SOCKET_IFNAME": "mine"}, network_interfaces="eth1")
    for launcher in (OpenMpi("mpirun"), Hydra("mpiexec"), Srun("srun", "pmix")):
        assert launcher.environment(job)["NCCL_SOCKET_IFNAME"] == "mine"


@needs_mpi
@pytest.mark.fast
def test_a_config_file_and_variables_reach_the_ranks(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("np: 2\nenv: A=1\nring-chunk-kb: 30\n")
    script = "import os; print(os.environ['A'], os.environ['B'], os.environ['RINGTRAIN_RING_CHUNK_KB'])"
    result = ringrun("--config-file", str(config), "--env", "B", "python", "-c", script, B="2")
    assert sorted(result.stdout.splitlines()) == ["[0] 1 2 30", "[1] 1 2 30"], result.stderr


@needs_mpi
def test_hosts_of_an_allocation_are_used() -> None:
    here = os.uname().nodename
    result = ringrun("python", "-c", "print('rank')", LSB_MCPU_HOSTS=f"{here} 2")
    assert sorted(result.stdout.splitlines()) == ["[0] rank", "[1] rank"], result.stderr
