"""Jobs that a batch system starts later: a script calls ringrun or ringlaunch again, inside the allocation."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ringtrain.runner.hosts import UsageError
from ringtrain.runner.job import Job, name_of
from ringtrain.runner.launchers import in_slurm_allocation


class Again(NamedTuple):
    """The command of the script: a module of ringtrain, and `words`, its command line but for the command of the ranks.

    `undone` follow these, and the last one of a flag counts: they undo what was for the batch system, or for this call.
    """

    module: str
    words: Sequence[str]
    undone: Sequence[str]


def again_as_ringrun(words: Sequence[str]) -> Again:
    """ringrun, inside an allocation."""
    return Again("ringtrain.run", words, ["--launcher=auto", "--mpi-args=", "--no-dry-run"])


def again_as_ringlaunch(words: Sequence[str]) -> Again:
    """ringlaunch, inside an allocation."""
    return Again("ringtrain.launch", words, ["--launcher=ssh", "--mpi-args=", "--no-dry-run"])


def script(directives: Sequence[str], again: Again, command: Sequence[str]) -> str:
    """A script for a shell.

    Args:
        directives: comments that the batch system reads, such as "#SBATCH --ntasks=4".
        again: what is started in the allocation.
        command: what each rank runs.
    """
    line = [sys.executable, "-m", again.module, *again.words, *again.undone, *command]
    return "\n".join(["#!/bin/bash", *directives, f"exec {shlex.join(line)}", ""])


# --- `--launcher slurm`, by sbatch ------------------------------------------------------------------------------------


def slurm_script(job: Job, again: Again) -> str:
    """The script of `job`.

    Raises UsageError inside an allocation, and for hosts with unequal numbers of slots.
    """
    if in_slurm_allocation(job.environment):
        raise UsageError("--launcher slurm submits a batch job, but this is one already; leave it out")
    options = [f"--job-name={name_of(job.command)}", f"--ntasks={job.num_proc}"]
    if job.hosts:
        slots = {host.slots for host in job.hosts}
        if len(slots) > 1:
            raise UsageError("--launcher slurm needs the same number of slots on every host; ask for nodes instead")
        names = ",".join(host.name for host in job.hosts)
        options += [f"--nodes={len(job.hosts)}", f"--nodelist={names}", f"--ntasks-per-node={slots.pop()}"]
    options += job.launcher_arguments
    return script([f"#SBATCH {shlex.quote(option)}" for option in options], again, job.command)


def submit_to_slurm(job: Job, again: Again) -> int:
    """Hand the script to sbatch, and return its exit code: with `--wait` among its options that of the job.

    Raises UsageError as `batch_script`, and where sbatch is not installed.
    """
    sbatch = shutil.which("sbatch", path=job.environment.get("PATH"))
    if sbatch is None:
        raise UsageError("--launcher slurm needs sbatch, which is not on PATH")
    return subprocess.run([sbatch], input=slurm_script(job, again), env=job.environment, text=True).returncode


# --- `--launcher sge`, by qsub ----------------------------------------------------------------------------------------


_LIST_S = 10
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The words of qsub about a job that came to its end.
_ENDED = "exited with exit code"
_EXAMPLE = '--mpi-args="-pe NAME 4"'


def sge_script(job: Job, again: Again) -> str:
    """The script of `job`.

    Raises UsageError inside a job, for hosts that are named, and where it has to be said which parallel environment
    of the cluster is meant.
    """
    if "PE_HOSTFILE" in job.environment:
        raise UsageError("--launcher sge submits a batch job, but this is one already; leave it out")
    if job.hosts:
        raise UsageError('--launcher sge leaves the hosts to SGE; name them with --mpi-args="-q QUEUE@HOST"')
    own = job.launcher_arguments
    # In the folder and with the variables of the user who submits it; its output is one file.
    options = [["-S", "/bin/bash"], ["-N", _sge_name(job)], ["-cwd"], ["-V"], ["-j", "y"]]
    if "-pe" not in own:
        options.append(["-pe", _parallel_environment(job.environment), str(job.num_proc)])
    return script([f"#$ {shlex.join(words)}" for words in [*options, own] if words], again, job.command)


def submit_to_sge(job: Job, again: Again) -> int:
    """Hand the script to qsub, and wait for the job unless `-sync n` is among its words. Returns the exit code of the
    job, or 1 where it was deleted or lost, which qsub calls 0. A signal that would end this process deletes the job.

    Raises UsageError as `batch_script`, and where qsub is not installed.
    """
    qsub = shutil.which("qsub", path=job.environment.get("PATH"))
    if qsub is None:
        raise UsageError("--launcher sge needs qsub, which is not on PATH")
    text = sge_script(job, again)
    is_waited_for = "-sync" not in job.launcher_arguments
    with tempfile.TemporaryFile("w") as file:
        file.write(text)
        file.seek(0)
        process = subprocess.Popen(
            [qsub, *(["-sync", "y"] if is_waited_for else [])],
            env=job.environment,
            stdin=file,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches it through this process, once
        )
    for number in _ENDING_SIGNALS:
        signal.signal(number, lambda *_: process.send_signal(signal.SIGINT))
    has_ended = False
    assert process.stdout is not None
    for line in process.stdout:
        has_ended |= _ENDED in line
        print(line, end="", flush=True)
    code = process.wait()
    return 1 if code == 0 and is_waited_for and not has_ended else code


def _sge_name(job: Job) -> str:
    """SGE allows no digit at its beginning."""
    name = name_of(job.command)
    return f"job-{name}" if name[0].isdecimal() else name


def _parallel_environment(environ: Mapping[str, str]) -> str:
    """The cluster's only one."""
    qconf = shutil.which("qconf", path=environ.get("PATH"))
    if qconf is None:
        raise UsageError(f"--launcher sge needs the name of a parallel environment: {_EXAMPLE}")
    try:
        listed = subprocess.run([qconf, "-spl"], env=dict(environ), capture_output=True, text=True, timeout=_LIST_S)
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"qconf -spl did not answer; name a parallel environment: {_EXAMPLE}") from error
    names = listed.stdout.split()
    if len(names) != 1:
        found = f"this cluster has {', '.join(names)}" if names else "qconf -spl lists none"
        raise UsageError(f"--launcher sge needs the name of a parallel environment, and {found}: {_EXAMPLE}")
    return names[0]
