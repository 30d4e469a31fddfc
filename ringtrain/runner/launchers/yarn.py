"""`--launcher yarn`: our own starters, with Hadoop's DistributedShell to get containers for the processes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from ringtrain.runner import yarn
from ringtrain.runner.allocation.hosts import UsageError
from ringtrain.runner.job import Job, name_of
from ringtrain.runner.launchers.command_lines import OwnStarter
from ringtrain.runner.yarn.resource_manager import addresses_of

_JAR = "hadoop-yarn-applications-distributedshell-*.jar"
_HOME_VARIABLES = ("HADOOP_YARN_HOME", "HADOOP_HOME")
# From a folder of Hadoop; some distributions have theirs flat.
_FOLDERS = ("share/hadoop/yarn", ".", "../hadoop-yarn")
_JAR_FLAG = "-jar"


class Yarn(OwnStarter):
    """A container for each rank, or server and worker; the user's words are for DistributedShell's client."""

    def arguments(self, job: Job) -> list[str]:
        """Raises UsageError for what YARN decides or has not, and where there is no Hadoop."""
        if job.elastic is not None:
            raise UsageError("--launcher yarn has no elastic jobs; leave out --min-np and the script that finds hosts")
        if job.hosts:
            raise UsageError("--launcher yarn leaves the hosts to YARN; leave out -H and --hostfile")
        if job.binding_arguments:
            raise UsageError("YARN binds no ranks to cores; leave out --binding-args")
        hadoop = shutil.which("hadoop", path=job.environment.get("PATH"))
        if hadoop is None:
            raise UsageError("--launcher yarn needs hadoop, which is not on PATH")
        addresses_of(job.environment)
        jar, words = _split(job.launcher_arguments)
        assert yarn.__file__ is not None
        own = [f"--num-proc={job.num_proc}"] if job.roles is None else job.roles.words()
        own += [f"--name={_name(job)}", f"--hadoop={hadoop}"]
        own.append(f"--jar={jar or _find_jar(hadoop, job.environment)}")
        own += [*(f"--client-word={word}" for word in words), *(f"--exported={name}" for name in job.exported)]
        return [sys.executable, str(Path(yarn.__file__).parent), *own, *job.command]


def _split(words: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """The jar, if the user has named one, and the other words."""
    if _JAR_FLAG not in words[:-1]:
        return None, list(words)
    at = words.index(_JAR_FLAG)
    return words[at + 1], [*words[:at], *words[at + 2 :]]


def _name(job: Job) -> str:
    """Also that of a folder: letters that stand for themselves everywhere."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name_of(job.command))


def _find_jar(hadoop: str, environ: Mapping[str, str]) -> str:
    homes = [environ[name] for name in _HOME_VARIABLES if environ.get(name)]
    homes.append(os.path.dirname(os.path.dirname(os.path.realpath(hadoop))))
    for home in homes:
        for folder in _FOLDERS:
            found = sorted(Path(home, folder).glob(_JAR))
            if found:
                return str(found[-1])
    where = " or ".join(dict.fromkeys(homes))
    raise UsageError(f'there is no {_JAR} in {where}; name it with --mpi-args="-jar FILE"')
