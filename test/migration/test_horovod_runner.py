"""ringrun takes every flag of horovodrun and its file, and `ringtrain.run` every argument of `horovod.run`."""

import contextlib
import inspect
import operator
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.ringrun_job import ROOT, TIMEOUT_S, needs_mpi, ringrun
from horovod_runner import ARGUMENTS, AS_WANTED, FILE, FLAGS, NO_EFFECT, SAME

import ringtrain
from ringtrain.job import launched_by
from ringtrain.runner import command, function, horovod_flags
from ringtrain.runner.flags import option_variables, parse
from ringtrain.runner.hosts import UsageError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"
TRAIN = ["python", "train.py"]
SPELLINGS = [(name, *facts) for names, facts in FLAGS.items() for name in names]


def words_of(name, takes, is_number):
    return [name, *["7" if is_number else "words"] * takes]


def settings_of(words):
    """Returns the differences from the command line with nothing but the command, except those without effect."""
    given, plain = (vars(parse([*start, *TRAIN])) for start in (words, []))
    return {name: value for name, value in given.items() if value != plain[name]}


# --- flags ------------------------------------------------------------------------------------------------------------


def test_the_table_has_all_flags_of_horovodrun_once():
    in_table = [name for flag in horovod_flags.TABLE for name in (*flag.names, *flag.off)]
    assert sorted(in_table) == sorted(name for name, *_ in SPELLINGS)


def test_the_document_has_the_table():
    assert horovod_flags.markdown() in PAGE.read_text(), "run `python -m ringtrain.runner.horovod_flags`"


@pytest.mark.parametrize(("name", "takes", "is_number", "state"), SPELLINGS)
def test_a_flag_is_taken_or_said_to_have_no_effect(name, takes, is_number, state, tmp_path):
    flag = horovod_flags.BY_NAME[name]
    assert (flag.state.value, flag.takes) == (state, takes)
    words = words_of(name, takes, is_number)
    if name == "--config-file":
        words = [name, str(tmp_path / "config.yaml")]
        Path(words[1]).write_text("np: 2\n")
    if name == "--log-level":
        words = [name, "ERROR"]
    if name in ("-v", "--version"):
        with pytest.raises(SystemExit, match=r"^0$"):
            parse(words)
        return
    arguments = parse([*words, *TRAIN])
    assert arguments.command == TRAIN
    said = horovod_flags.sentences(arguments.of_horovod)
    is_said = state == NO_EFFECT and name not in AS_WANTED
    assert said == ([f"{' '.join(words)} has no effect: {flag.meaning}"] if is_said else [])
    if state == SAME:
        assert settings_of(words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--fusion-threshold-mb", "32"], {"RINGTRAIN_FUSION_THRESHOLD_MB": "32"}),
        (["--cache-capacity", "5"], {"RINGTRAIN_CACHE_CAPACITY": "5"}),
        (["--stall-check-warning-time-seconds", "3"], {"RINGTRAIN_STALL_WARNING_TIME_S": "3"}),
        (["--stall-check-shutdown-time-seconds", "4"], {"RINGTRAIN_STALL_SHUTDOWN_TIME_S": "4"}),
        (["--no-stall-check"], {"HOROVOD_STALL_CHECK_DISABLE": "1"}),
        (["--no-stall-check", "--stall-check"], {"HOROVOD_STALL_CHECK_DISABLE": "0"}),
        (["--autotune"], {"RINGTRAIN_AUTOTUNE": "on"}),
        (["--no-autotune"], {"RINGTRAIN_AUTOTUNE": "off"}),
        (["--timeline-filename", "t"], {"RINGTRAIN_TIMELINE_FILENAME": "t"}),
        (["--timeline-mark-cycles"], {"RINGTRAIN_TIMELINE_MARK_CYCLES": "on"}),
        (["--cycle-time-ms", "5", "--gloo"], {}),
    ],
)
def test_a_flag_reaches_the_ranks_as_a_variable(words, expected):
    arguments = parse([*words, *TRAIN])
    variables = option_variables(arguments)
    assert {**horovod_flags.variables(arguments.of_horovod), **variables} == expected


def test_a_job_has_what_the_flags_say(tmp_path):
    key = tmp_path / "key"
    key.touch()
    words = ["-np", "2", "-H", "h1:2", "-p", "2222", "-i", str(key), "--tcp", "--binding-args=--bind-to core"]
    words += ["--network-interface", "eth0", "--network-interfaces", "ib0,eth0", "--mpi-args=--tag x -x 'A=b c'"]
    job = command.build_job(parse([*words, *TRAIN]), {})
    assert (job.ssh_port, job.ssh_identity_file, job.network_interfaces) == (2222, str(key), "eth0,ib0")
    assert (job.launcher_arguments, job.binding_arguments) == (("--tag", "x", "-x", "A=b c"), ("--bind-to", "core"))
    assert job.has_tcp_only
    with pytest.raises(UsageError, match="--ssh-identity-file /no/such/key is not a file"):
        command.build_job(parse(["-np", "2", "-i", "/no/such/key", *TRAIN]), {})


def test_words_that_a_shell_would_not_take_are_refused():
    with pytest.raises(UsageError, match="--mpi-args: No closing quotation"):
        parse(["--mpi-args='open", *TRAIN])


# --- its file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "words"), FILE.items(), ids=lambda value: ".".join(map(str, value)))
def test_an_entry_of_its_file_is_its_flag(place, words, tmp_path):
    section, key, value = place
    path = tmp_path / "config.yaml"
    path.write_text(f"{section}:\n  {key}: {value}\n" if key else f"{section}: {value}\n")
    assert settings_of(["--config-file", str(path)]) == {**settings_of(words), "config_file": str(path)}


def test_the_table_has_all_places_of_its_file():
    places = {f"{section}.{key}" if key else f"{section}: {value}" for section, key, value in FILE}
    assert set(horovod_flags.BY_KEY) == places


# --- ringrun ----------------------------------------------------------------------------------------------------------


def test_the_version_and_the_build_are_printed_without_a_job():
    assert ringrun("--version").stdout == f"{ringtrain.__version__}\n"
    done = ringrun("--check-build")
    assert done.returncode == 0 and done.stderr == ""
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[0] == f"ringtrain v{ringtrain.__version__}:"
    assert lines.count("[X] MPI") == 2 and lines.count("[ ] Gloo") == 2 and "[ ] TensorFlow" in lines


@needs_mpi
@pytest.mark.fast
def test_arguments_for_mpi_reach_the_launcher_and_flags_without_effect_are_said(monkeypatch):
    monkeypatch.setenv("RINGTRAIN_NETWORK", "mpi")
    give = "-x GREETING=hello" if "Open MPI" in version_of_mpi() else "-genv GREETING hello"
    script = "import os; print(os.environ['GREETING'], os.environ['HOROVOD_STALL_CHECK_DISABLE'])"
    flags = ["--gloo", "--disable-cache", "--cycle-time-ms", "3", "--no-stall-check", "--tcp", "-prefix-timestamp"]
    done = ringrun("-np", "2", f"--mpi-args={give}", *flags, "python", "-c", script)
    assert done.returncode == 0, done.stderr
    printed = [line.split(" ", 2) for line in sorted(done.stdout.splitlines(), key=lambda line: line.split("[")[1])]
    assert [rest for _, _, rest in printed] == ["[0] hello 1", "[1] hello 1"]
    for day, clock, _ in printed:
        assert abs(time.time() - time.mktime(time.strptime(f"{day} {clock}", "%Y-%m-%d %H:%M:%S"))) < TIMEOUT_S
    assert done.stderr.splitlines() == [
        "ringrun: --gloo has no effect: MPI or ringrun brings the ranks together; ringrun --network",
        "ringrun: --cycle-time-ms 3 has no effect: there are no cycles, an operation begins when all ranks have it",
    ]


def version_of_mpi():
    from ringtrain.runner.mpi_library import probe

    return probe()["library"]


# --- horovod.run ------------------------------------------------------------------------------------------------------


def test_the_arguments_of_run_have_the_order_and_the_defaults_of_horovods():
    parameters = inspect.signature(ringtrain.run).parameters.values()
    positional = {one.name: one.default for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD}
    defaults = {name: inspect.Parameter.empty if value is ... else value for name, (value, _) in ARGUMENTS.items()}
    assert list(positional.items()) == list(defaults.items())


@pytest.mark.parametrize(("name", "state"), [(name, state) for name, (_, state) in ARGUMENTS.items()])
def test_an_argument_has_the_state_of_its_flag(name, state):
    if name in ("func", "args", "kwargs", "executable"):
        assert name not in horovod_flags.BY_ARGUMENT and state == SAME
    else:
        assert horovod_flags.BY_ARGUMENT[name].state.value == state


@pytest.fixture
def started(monkeypatch):
    """The jobs that `ringtrain.run` would have started, with their settings."""
    jobs = []

    class Started(Exception):
        pass

    def refuse(launcher, job, settings, *_):
        jobs.append((job, settings))
        raise Started

    monkeypatch.setattr(function, "Supervisor", refuse)
    monkeypatch.setattr(launched_by, "detect", lambda: None)

    def run(*args, **more):
        with contextlib.suppress(Started):
            ringtrain.run(*args, **more)
        return jobs.pop() if jobs else None

    return run


def test_an_argument_without_effect_is_said_on_the_callers_line(started, recwarn):
    assert started(operator.add, (1, 2), use_gloo=True)
    assert started(operator.add, (1, 2), use_gloo=False, use_mpi=True, disable_cache=True)
    (warning,) = recwarn.list
    assert "use_gloo=True has no effect: MPI or ringrun brings the ranks together" in str(warning.message)


def test_the_arguments_reach_the_launcher(started, tmp_path):
    (tmp_path / "hosts").write_text("h1 slots=2\nh2 slots=2\n")
    (tmp_path / "key").touch()
    job, settings = started(
        operator.add,
        (1, 2),
        None,
        3,
        hostfile=str(tmp_path / "hosts"),
        start_timeout=7,
        ssh_port=2222,
        ssh_identity_file=str(tmp_path / "key"),
        output_filename=str(tmp_path / "logs"),
        verbose=1,
        mpi_args="--map-by 'a b'",
        network_interfaces=["eth1", "eth0"],
        executable="/other/python",
    )
    assert (job.num_proc, [host.name for host in job.hosts]) == (3, ["h1", "h2"])
    assert (job.ssh_port, job.ssh_identity_file) == (2222, str(tmp_path / "key"))
    assert (job.launcher_arguments, job.network_interfaces) == (("--map-by", "a b"), "eth1,eth0")
    assert job.command[:2] == ["/other/python", "-c"]
    assert (settings.start_timeout_s, settings.output_folder, settings.is_verbose) == (7, tmp_path / "logs", True)
    job, settings = started(operator.add, (1, 2), network_interface="eth0,eth1", np=2)
    assert (job.num_proc, job.network_interfaces, settings.start_timeout_s) == (2, "eth0,eth1", 120)
    assert started(operator.add, (1, 2), network_interfaces={"b", "a"})[0].network_interfaces == "a,b"


NOTEBOOK = """
import ringtrain.horovod
import horovod, horovod.torch as hvd, torch

scale = 10

class Result:
    def __init__(self, rank, total):
        self.rank, self.total = rank, total

def make(offset):
    def train(step, *, times=1):
        import horovod.torch as again
        assert again is hvd
        hvd.init()
        total = hvd.allreduce(torch.full((2,), float(offset + step * hvd.rank())), op=hvd.Sum) * times * scale
        return Result(hvd.rank(), total.tolist())
    return train

results = horovod.run(make(1), args=(2,), kwargs={"times": 3}, num_proc=2, use_mpi=True, output_filename="logs")
assert all(type(one) is Result for one in results)
print([(one.rank, one.total) for one in results])
"""


@needs_mpi
def test_horovod_run_takes_what_a_notebook_defines(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("cloudpickle")
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    done = subprocess.run(
        [sys.executable, "notebook.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.stdout == "[(0, [120.0, 120.0]), (1, [120.0, 120.0])]\n", done.stderr
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank.0", "rank.1"]


@needs_mpi
def test_another_python_keeps_its_own_import_path(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nWRAPPED=1 PYTHONPATH="{ROOT}:{tmp_path}/first" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "whose.py").write_text(
            f"import os\ndef whose(): return {folder!r}, os.getenv('WRAPPED')\n"
        )
    script = tmp_path / "second" / "script.py"
    script.write_text(f"import ringtrain, whose\nprint(ringtrain.run(whose.whose, executable={str(python)!r}))\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.stdout == "[('first', '1')]\n", done.stderr
