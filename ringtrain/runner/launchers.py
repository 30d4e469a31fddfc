"""The launchers, one class each, and the choice of the launcher and the network of a job."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1, SIGUSR2
from typing import NamedTuple, Protocol

from ringtrain.job.host import physical_cores
from ringtrain.job.launched_by import NetworkChoice
from ringtrain.options import table
from ringtrain.runner import start
from ringtrain.runner.hosts import Host, UsageError, agents_of_launchers, travelling
from ringtrain.runner.job import Job, name_of
from ringtrain.runner.mpi_library import (
    INTEL_MPI,
    MPICH,
    OPEN_MPI,
    Family,
    MpiNotFound,
    family_of,
    find_launcher,
    probe,
    with_home,
)
from ringtrain.runner.start.links import ANY_HOST
from ringtrain.runner.supervise.rank_wrapper import END_NOW, END_RANK

# Transports are left out, not chosen: shared memory has other names in Open MPI 4 than in 5.
_TCP_ONLY_OF_OPEN_MPI = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib,uct,ofi,usnic,ugni,portals4"}


assert start.__file__ is not None
_STARTER = (sys.executable, str(Path(start.__file__).parent))

# How long srun may take to say what it has.
_LIST_S = 10


class Launcher(Protocol):
    """The interface of a launcher for ringrun."""

    @property
    def passes_on(self) -> Mapping[int, int]:
        """Signals for the ranks, each with the signal to the launcher that makes it pass the first on to all ranks."""

    @property
    def scancel(self) -> str | None:
        """The program that signals the ranks: Slurm's, if the ranks are tasks of a job step; or None."""

    @property
    def last_signal(self) -> int:
        """The signal that makes the launcher end at once with all its ranks, also on other hosts."""

    @property
    def stop_signal(self) -> int:
        """The signal by which ringrun has the launcher end the job, in the time that the launcher takes for that."""

    @property
    def shielded(self) -> Collection[int]:
        """Signals that the launcher does not get from others: it would end its ranks before they are ready."""

    @property
    def proxies_end_s(self) -> float:
        """How long processes of the launcher may still be ending after the last rank, in seconds."""

    @property
    def keeps_end_rule(self) -> bool:
        """Whether the launcher itself follows EndRule after the failure of a rank. For others ringrun does."""

    @property
    def makes_wrappers(self) -> bool:
        """Whether it makes the wrapper of each rank itself. For others ringrun writes it before the command."""

    def arguments(self, job: Job) -> list[str]:
        """Returns the whole command line, the path of the launcher first."""

    def environment(self, job: Job) -> dict[str, str]:
        """Returns the environment to start the launcher in."""


class OpenMpi:
    """mpirun of Open MPI 4 and 5."""

    # after a SIGTERM of its own it kills the ranks within a second
    passes_on: Mapping[int, int] = {SIGTERM: END_RANK, SIGUSR1: SIGUSR1, SIGUSR2: SIGUSR2}
    scancel = None
    last_signal = stop_signal = SIGHUP
    # sent to all processes of a service or a batch job
    shielded: Collection[int] = (SIGTERM, SIGINT)
    proxies_end_s = 0.0
    keeps_end_rule = makes_wrappers = False

    def __init__(self, path: str):
        self.path = path

    def arguments(self, job: Job) -> list[str]:
        arguments = [self.path, "-np", str(job.num_proc)]
        if os.geteuid() == 0:
            arguments.append("--allow-run-as-root")
        words = [*job.binding_arguments, *job.launcher_arguments]
        given = {word.lstrip("-") for word in words}
        if job.hosts:
            arguments += ["-H", ",".join(map(str, job.hosts))]
        # it takes neither of these twice
        elif job.num_proc > physical_cores() and "map-by" not in given:
            arguments += ["--map-by", ":OVERSUBSCRIBE"]
        # bound to one core, a rank's engine thread and its framework would share that core
        if not job.binding_arguments and "bind-to" not in given:
            arguments += ["--bind-to", "none"]
        if job.network_interfaces is not None:
            arguments += ["--mca", "btl_tcp_if_include", job.network_interfaces]
        # of two values it takes the first
        own = {variable.partition("=")[0] for flag, variable in itertools.pairwise(words) if flag == "-x"}
        for name in travelling(self.environment(job), job.exported):
            if name not in own:
                arguments += ["-x", name]
        return [*arguments, *words, *job.command]

    def environment(self, job: Job) -> dict[str, str]:
        settings = with_home(job.environment)
        # Open MPI 5 reads the first of each pair, Open MPI 4 the second
        if job.network_interfaces is not None:
            settings |= dict.fromkeys(
                ("PRTE_MCA_oob_tcp_if_include", "OMPI_MCA_oob_tcp_if_include"), job.network_interfaces
            )
        if job.has_tcp_only:
            settings = {**_TCP_ONLY_OF_OPEN_MPI, **settings}
        for name in ("PRTE_MCA_plm_ssh_args", "OMPI_MCA_plm_rsh_args"):
            settings |= _with_ssh_options(job, name)
        return {**agents_of_launchers(job.environment), **_interfaces_of_others(job), **_tcp_only(job), **settings}


class Hydra:
    """mpiexec.hydra of MPICH and its descendants."""

    # SIGUSR2 and SIGHUP would end it
    passes_on: Mapping[int, int] = {SIGTERM: SIGTERM, SIGUSR1: SIGUSR1}
    scancel = None
    # its proxies, which start the ranks, end when it does
    last_signal = SIGKILL
    stop_signal = SIGTERM
    shielded: Collection[int] = ()
    # ranks that end well are let go at once, and mpiexec breaks if it is told to end while their proxies end
    proxies_end_s = 0.5
    keeps_end_rule = makes_wrappers = False
    SSH_ARGUMENTS = "HYDRA_LAUNCHER_EXTRA_ARGS"

    def __init__(self, path: str):
        self.path = path

    def arguments(self, job: Job) -> list[str]:
        arguments = self._beginning(job)
        if len(job.hosts) == 1:
            # Intel's Hydra takes "host:2" for a name when it is the only one
            arguments += ["-hosts", job.hosts[0].name]
        elif job.hosts:
            arguments += ["-hosts", ",".join(map(str, job.hosts))]
        return [*arguments, "-np", str(job.num_proc), *job.command]

    def environment(self, job: Job) -> dict[str, str]:
        defaults = {**_interfaces_of_the_library(job), **_interfaces_of_others(job), **_tcp_only(job)}
        agents = agents_of_launchers(job.environment)
        return {**agents, **defaults, **job.environment, **_with_ssh_options(job, self.SSH_ARGUMENTS)}

    def _beginning(self, job: Job) -> list[str]:
        interface = [] if job.network_interfaces is None else ["-iface", job.network_interfaces.split(",")[0]]
        names = travelling(self.environment(job), job.exported)
        words = [*interface, *job.binding_arguments, *job.launcher_arguments]
        return [self.path, "-genvlist", ",".join(names), *words]


class IntelHydra(Hydra):
    """mpiexec.hydra of Intel MPI, which binds ranks to cores and leaves it to a script around it to look for Slurm."""

    SSH_ARGUMENTS = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"

    def arguments(self, job: Job) -> list[str]:
        """One section for each host: this Hydra fills the hosts of -hosts by their cores, whatever their slots are."""
        if len(job.hosts) < 2:
            return super().arguments(job)
        arguments, left = self._beginning(job), job.num_proc
        for host in job.hosts:
            ranks = min(host.slots, left)
            if ranks > 0:
                section = ["-host", host.name, "-np", str(ranks), *job.command]
                arguments += section if left == job.num_proc else [":", *section]
            left -= ranks
        return arguments

    def environment(self, job: Job) -> dict[str, str]:
        defaults = {} if job.binding_arguments else {"I_MPI_PIN": "0"}
        if in_slurm_allocation(job.environment):
            defaults["I_MPI_HYDRA_BOOTSTRAP"] = "slurm"
        return {**defaults, **super().environment(job)}


def _command_of_starter(kind: str, job: Job) -> list[str]:
    return [*_STARTER, kind, job.to_json(), *job.command]


def _kind_of(job: Job) -> str:
    return "elastic" if job.elastic is not None else "roles" if job.roles is not None else "ranks"


class OwnStarter:
    """Our own starters, which need no MPI. ssh starts the agents of other hosts, or srun or mpirun in elastic jobs."""

    passes_on: Mapping[int, int] = {SIGTERM: END_RANK, SIGUSR1: SIGUSR1, SIGUSR2: SIGUSR2}
    scancel = None
    # its agents read the end of their orders then, and kill their ranks
    last_signal = SIGKILL
    stop_signal = END_NOW
    shielded: Collection[int] = ()
    proxies_end_s = 0.0
    keeps_end_rule = makes_wrappers = True

    def __init__(self, of_agents: Launcher | None = None):
        """`of_agents` starts the agents of an elastic job on other hosts, each by itself."""
        self.of_agents = of_agents

    def arguments(self, job: Job) -> list[str]:
        if self.of_agents is None and (job.launcher_arguments or job.binding_arguments):
            raise UsageError("without MPI ringrun starts the ranks itself, so there is no launcher to give words to")
        words = () if self.of_agents is None else _words_of_agent(self.of_agents, job)
        return _command_of_starter(_kind_of(job), job._replace(launcher_arguments=tuple(words)))

    def environment(self, job: Job) -> dict[str, str]:
        if self.of_agents is not None:
            return self.of_agents.environment(job)
        return {**_interfaces_of_others(job), **_tcp_only(job), **job.environment}


class Srun:
    """srun of Slurm; `process_manager` is the value of its --mpi."""

    # SIGTERM makes it kill the ranks
    passes_on: Mapping[int, int] = {SIGUSR1: SIGUSR1, SIGUSR2: SIGUSR2}
    last_signal = stop_signal = SIGTERM
    shielded: Collection[int] = ()
    proxies_end_s = 0.0
    keeps_end_rule = makes_wrappers = False

    def __init__(self, path: str, process_manager: str):
        self.path = path
        self.scancel: str | None = str(Path(path).with_name("scancel"))
        self.process_manager = process_manager

    def arguments(self, job: Job) -> list[str]:
        _refuse_ssh_options(job)
        arguments = [self.path, f"--ntasks={job.num_proc}", f"--mpi={self.process_manager}"]
        arguments += [*(job.binding_arguments or ["--cpu-bind=none"]), "--export=ALL"]
        # srun knows by itself what was allotted
        if job.hosts and not job.hosts_are_allotted:
            slots = {host.slots for host in job.hosts}
            if len(slots) > 1:
                raise UsageError("srun needs the same number of slots on every host; use --launcher mpirun")
            names = ",".join(host.name for host in job.hosts)
            arguments += [f"--nodes={len(job.hosts)}", f"--nodelist={names}", f"--ntasks-per-node={slots.pop()}"]
        return [*arguments, *job.launcher_arguments, *job.command]

    def environment(self, job: Job) -> dict[str, str]:
        interfaces = job.network_interfaces
        # srun starts ranks of any MPI
        of_open_mpi = {"OMPI_MCA_btl_tcp_if_include": interfaces} if interfaces is not None else {}
        if job.has_tcp_only:
            of_open_mpi |= _TCP_ONLY_OF_OPEN_MPI
        of_others = {**_interfaces_of_the_library(job), **_interfaces_of_others(job), **_tcp_only(job)}
        return {**of_open_mpi, **of_others, **job.environment}


def _words_of_agent(launcher: Launcher, job: Job) -> list[str]:
    """Returns the beginning of a command line that starts one process on the host in the place of ANY_HOST."""
    # beside others on that host, with all that is allotted to the job there
    words = (*job.launcher_arguments, *(["--overlap"] if isinstance(launcher, Srun) else []))
    alone = job._replace(command=[], num_proc=1, hosts=[Host(ANY_HOST, 1)], hosts_are_allotted=False)
    return launcher.arguments(alone._replace(launcher_arguments=words))


def is_without_mpi(launcher: Launcher) -> bool:
    """Whether the ranks of this launcher find each other without MPI."""
    return isinstance(launcher, OwnStarter) or (isinstance(launcher, Srun) and launcher.process_manager == "none")


_CLASSES: dict[Family, Callable[[str], Launcher]] = {OPEN_MPI: OpenMpi, MPICH: Hydra, INTEL_MPI: IntelHydra}


def launcher_of_mpi(choice: str, library: str, library_path: str | None, environ: Mapping[str, str]) -> Launcher:
    """Returns the launcher for the ranks of an MPI library.

    Args:
        choice: "mpirun" (the library's own, whatever it is called), "srun", or "auto": the library's own and, in a
            Slurm allocation where that is not installed, srun.
        library: name of the library, as mpi4py's `MPI.get_vendor()` says it.
        library_path: path of the loaded libmpi, or None where it is not known.
        environ: looked through for a Slurm allocation and for srun.

    Raises MpiNotFound when the launcher is not installed and UsageError when srun cannot be meant.
    """
    srun = find_srun(environ)
    if choice == "srun":
        return _srun(require_srun(srun), library)
    path = find_launcher(library, library_path)
    if path is not None:
        return _CLASSES[family_of(library)](path)
    if choice == "auto" and srun is not None:
        return _srun(srun, library)
    raise MpiNotFound(
        f"mpi4py uses {library} ({library_path or 'path unknown'}), but no mpirun of {library} is beside Python, "
        "beside that library or on PATH",
        "add its bin folder to PATH",
    )


def find_srun(environ: Mapping[str, str]) -> str | None:
    """Returns the path of srun inside a Slurm allocation, else None."""
    return shutil.which("srun", path=environ.get("PATH")) if in_slurm_allocation(environ) else None


def require_srun(path: str | None) -> str:
    """Raises UsageError where `find_srun` has found none."""
    if path is None:
        raise UsageError("--launcher srun works only inside a Slurm allocation; use salloc or sbatch first")
    return path


def in_slurm_allocation(environ: Mapping[str, str]) -> bool:
    """Whether `environ` is that of a batch script or a shell inside salloc or srun."""
    return "SLURM_JOB_ID" in environ


def _refuse_ssh_options(job: Job) -> None:
    if job.ssh_options:
        raise UsageError("srun does not use ssh, so there is no --ssh-port and no --ssh-identity-file")


def _with_ssh_options(job: Job, variable: str) -> dict[str, str]:
    """Returns the launcher's options for ssh: ours, then the user's. Of two ports ssh takes the first."""
    ours = job.ssh_options
    return {variable: " ".join([*ours, job.environment.get(variable, "")]).rstrip()} if ours else {}


def _interfaces_of_the_library(job: Job) -> dict[str, str]:
    """For UCX and libfabric, whichever of them the MPI was built on."""
    if job.network_interfaces is None:
        return {}
    first = job.network_interfaces.split(",")[0]
    return {"UCX_NET_DEVICES": job.network_interfaces, "FI_TCP_IFACE": first, "FI_SOCKETS_IFACE": first}


def _interfaces_of_others(job: Job) -> dict[str, str]:
    """For sockets, and for the libraries that a training may use beside MPI."""
    if job.network_interfaces is None:
        return {}
    names = ("RINGTRAIN_SOCKET_INTERFACES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    return dict.fromkeys(names, job.network_interfaces)


def _tcp_only(job: Job) -> dict[str, str]:
    """For NCCL, and for UCX and libfabric, whichever of them the MPI was built on."""
    if not job.has_tcp_only:
        return {}
    return {
        "NCCL_IB_DISABLE": "1",
        "UCX_TLS": "^ib",
        "FI_PROVIDER": "tcp",
        "I_MPI_OFI_PROVIDER": "tcp",
    }


def _srun(path: str, library: str) -> Srun:
    family = family_of(library)
    if family is OPEN_MPI:
        return Srun(path, "pmix")
    # Intel MPI speaks both; with pmi2 it needs a library of Slurm's, too.
    return Srun(path, "pmix" if family is INTEL_MPI and "pmix" in _process_managers(path) else "pmi2")


def _process_managers(srun: str) -> list[str]:
    """Returns the values that this Slurm has for --mpi."""
    try:
        listed = subprocess.run([srun, "--mpi=list"], capture_output=True, text=True, timeout=_LIST_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return (listed.stdout + listed.stderr).split()


# --- YARN -------------------------------------------------------------------------------------------------------------


_JAR = "hadoop-yarn-applications-distributedshell-*.jar"
_HOME_VARIABLES = ("HADOOP_YARN_HOME", "HADOOP_HOME")
# From a folder of Hadoop; some distributions have theirs flat.
_FOLDERS = ("share/hadoop/yarn", ".", "../hadoop-yarn")
_JAR_FLAG = "-jar"


class Yarn(OwnStarter):
    """A container for each rank, or server and worker; the user's words are for DistributedShell's client."""

    def arguments(self, job: Job) -> list[str]:
        """Raises UsageError for options that YARN decides or lacks, and if no Hadoop is found."""
        from ringtrain.runner.start.yarn import resource_managers  # whose HTTP client other jobs do not need

        if job.elastic is not None:
            raise UsageError("--launcher yarn has no elastic jobs; leave out --min-np and the script that finds hosts")
        if job.hosts:
            raise UsageError("--launcher yarn leaves the hosts to YARN; leave out -H and --hostfile")
        if job.binding_arguments:
            raise UsageError("YARN binds no ranks to cores; leave out --binding-args")
        hadoop = shutil.which("hadoop", path=job.environment.get("PATH"))
        if hadoop is None:
            raise UsageError("--launcher yarn needs hadoop, which is not on PATH")
        resource_managers(job.environment)
        jar, words = _split_jar(job.launcher_arguments)
        jar = jar or _find_jar(hadoop, job.environment)
        own = hadoop, jar, _application_name(job), *words
        return _command_of_starter(f"yarn-{_kind_of(job)}", job._replace(launcher_arguments=own))


def _split_jar(words: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """Returns the jar, if the user has named one, and the other words."""
    if _JAR_FLAG not in words[:-1]:
        return None, list(words)
    at = words.index(_JAR_FLAG)
    return words[at + 1], [*words[:at], *words[at + 2 :]]


def _application_name(job: Job) -> str:
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


# --- the choice -------------------------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """A launcher. `why` says which network the job has and why, and which MPI starts the job, if any."""

    launcher: Launcher
    why: list[str]


def choose_launcher(launcher: str, environ: Mapping[str, str] = os.environ) -> Chosen:
    """Returns the launcher, and so the network, of a job with the options of `environ`.

    Args:
        launcher: "auto", "mpirun" (that of the MPI that mpi4py uses), "srun", or without MPI "ssh" (ringrun itself)
            and "yarn".

    Raises:
        UsageError: the launcher and the network exclude each other, or the option network is none.
        MpiNotFound: as `probe` and `launcher_of_mpi`.
    """
    network = choose_network(launcher, environ)
    why = f"network {network.network}: {network.reason}"
    if network.network == "sockets" and launcher != "mpirun":
        return Chosen(_without_mpi(launcher, environ), [why])
    mpi = probe()
    found = launcher_of_mpi(launcher, mpi["library"], mpi["path"], environ)
    return Chosen(found, [why, f"{mpi['library']} {mpi['version']} at {mpi['path']}"])


def choose_elastic(launcher: str, job: Job) -> Chosen:
    """Returns the launcher of the agents of an elastic job: srun in an allocation, else ssh, or as `launcher` says.

    Raises UsageError and, for "mpirun", MpiNotFound.
    """
    why = "network sockets: an elastic job needs no MPI"
    if launcher == "yarn":
        return Chosen(Yarn(), [why])
    if launcher == "mpirun":
        mpi = probe()
        found = launcher_of_mpi(launcher, mpi["library"], mpi["path"], job.environment)
        return Chosen(OwnStarter(found), [why, f"{mpi['library']} {mpi['version']} starts what starts the ranks"])
    srun = find_srun(job.environment)
    if launcher == "srun":
        srun = require_srun(srun)
    is_by_srun = launcher == "srun" or (launcher == "auto" and job.hosts_are_allotted)
    return Chosen(OwnStarter(Srun(srun, "none") if srun is not None and is_by_srun else None), [why])


def choose_network(launcher: str, environ: Mapping[str, str] = os.environ) -> NetworkChoice:
    """Returns the network that the options in `environ` choose for a job to be started. Raises UsageError."""
    try:
        wanted = table.resolve({}, environ)["network"]
    except ValueError as error:
        raise UsageError(str(error)) from error
    if launcher == "ssh" and wanted == "mpi":
        raise UsageError("--launcher ssh starts ranks without an MPI; leave it out, or say --network sockets")
    if launcher == "yarn" and wanted == "mpi":
        raise UsageError("--launcher yarn starts ranks without an MPI; leave --network mpi out")
    if wanted != "auto":
        return NetworkChoice(wanted, f"network={wanted}")
    if launcher in ("ssh", "yarn"):
        return NetworkChoice("sockets", f"--launcher {launcher} needs no MPI")
    if launcher != "mpirun" and importlib.util.find_spec("mpi4py") is None:
        return NetworkChoice("sockets", "mpi4py is not installed")
    return NetworkChoice("mpi", "mpi4py is installed")


def _without_mpi(launcher: str, environ: Mapping[str, str]) -> Launcher:
    if launcher == "yarn":
        return Yarn()
    srun = find_srun(environ)
    if launcher == "srun":
        return Srun(require_srun(srun), "none")
    return OwnStarter() if srun is None or launcher == "ssh" else Srun(srun, "none")
