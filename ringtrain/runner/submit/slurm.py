"""`ringrun --launcher slurm`: a batch script for sbatch."""

from __future__ import annotations

import shlex
import shutil
import subprocess

from ringtrain.runner.allocation.hosts import UsageError
from ringtrain.runner.job import Job, name_of
from ringtrain.runner.launchers.command_lines import in_slurm_allocation
from ringtrain.runner.submit.script import Again, script


def batch_script(job: Job, again: Again) -> str:
    """The script of `job`.

    Raises UsageError inside an allocation, and for hosts with unequal numbers of slots.
    """
    if in_slurm_allocation(job.environment):
        raise UsageError("--launcher slurm submits a batch job, but this is one already; leave it out")
    options = [f"--job-name={name_of(job.command)}", f"--ntasks={job.num_proc}"]
    if job.hosts:
        slots = {host.slots for host in job.hosts}
        if len(slots) > 1:
            raise UsageError("--launcher slurm wants the same number of slots on every host; ask for nodes instead")
        names = ",".join(host.name for host in job.hosts)
        options += [f"--nodes={len(job.hosts)}", f"--nodelist={names}", f"--ntasks-per-node={slots.pop()}"]
    options += job.launcher_arguments
    return script([f"#SBATCH {shlex.quote(option)}" for option in options], again, job.command)


def submit(job: Job, again: Again) -> int:
    """Hand the script to sbatch, and return its exit code: with `--wait` among its options that of the job.

    Raises UsageError as `batch_script`, and where sbatch is not installed.
    """
    sbatch = shutil.which("sbatch", path=job.environment.get("PATH"))
    if sbatch is None:
        raise UsageError("--launcher slurm needs sbatch, which is not on PATH")
    return subprocess.run([sbatch], input=batch_script(job, again), env=job.environment, text=True).returncode
