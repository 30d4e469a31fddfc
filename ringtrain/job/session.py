"""init() and shutdown(), and the place of this rank in the job: rank(), size() and their like."""

from __future__ import annotations

import atexit
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ringtrain._core as _core
from ringtrain import failure
from ringtrain.engine.handles import report_failures_to
from ringtrain.engine.process_sets import (
    ProcessSet,
    RefusedSetError,
    forget_process_sets,
    get_process_set_ids_and_ranks,
    register_at_init,
    set_world,
)
from ringtrain.errors import PeerLostError, RemoteError, RingtrainError, ShutDownError, StalledError
from ringtrain.job import elastic_client, gpus, job_file, launched_by, lifecycle, mpi, network
from ringtrain.job.lifecycle import at_init as at_init, at_shutdown as at_shutdown
from ringtrain.job.rendezvous.server import leave as leave_place, stop_serving
from ringtrain.job.world import Library, World
from ringtrain.options import horovod_variables, table
from ringtrain.record import flight_recorder, metrics
from ringtrain.record.logger import logger, set_level

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ringtrain.options.keywords import Options


class _Asked(NamedTuple):
    """The arguments of init(); `settings` is every option."""

    comm: Any
    process_sets: Any
    keywords: dict[str, Any]
    settings: dict[str, str]
    are_sets_refused: bool = False


# Another rank is gone or has left: in an elastic job the others go on.
_LOST = (PeerLostError, RemoteError, ShutDownError, StalledError)

_world: World | None = None
_asked: _Asked | None = None
_variables_are_named = False
_set_aside: Callable[[int, dict[str, str]], list[int]] | None = None


def set_servers_aside_with(set_aside: Callable[[int, dict[str, str]], list[int]]) -> None:
    """Registers a function of a higher floor, called before init() joins the job with kv_servers other than 0.

    Its arguments are kv_servers and all options. It returns the ranks of the job, and does not return on the others.
    """
    global _set_aside
    _set_aside = set_aside


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
    **keywords: Unpack[Options],
) -> None:
    """Join the job. Mirrors `horovod.init`.

    All ranks call it together. A second call, such as that of a library, does nothing; what it is given must be what
    the first one had. Without a launcher (plain `python script.py`) the job is one rank and needs no MPI. If CuPy or
    PyTorch is loaded, the GPU that belongs to local_rank() becomes the current one of this thread, unless the script
    works on another GPU already.

    Args:
        comm: an mpi4py communicator, a list of ranks of MPI.COMM_WORLD, or None for all ranks that were started. Of a
            list of communicators the first is the job; the others become process sets, before those of `process_sets`.
        process_sets: process sets to register right away, the same on all ranks. "dynamic", as Horovod has it for sets
            that are made later, needs not be said.
        keywords: any option of docs/options.md, the same on all ranks, such as `fusion_threshold_mb=64`.

    Raises:
        RingtrainError: already initialised with other arguments; this process was forked from a rank; the shared memory
            or the MPI library cannot be used.
        StalledError: not all ranks came within `start_timeout_s`.
        RuntimeError: started by the launcher of another MPI, so that each process would be rank 0 of 1; or started by a
            rank, as multiprocessing does by spawn and forkserver.
        TypeError: an unknown option.
        ValueError: an option out of range or not the same on all ranks; a bad list of ranks; two process sets of the
            same ranks, on all ranks alike. After the last of these the job is initialised, as in Horovod, with the
            process sets before the second one; another init() with `process_sets` or `comm` begins anew.
    """
    _core.require_not_forked()
    lifecycle.load_all()
    if _asked is not None and _core.is_initialized():
        if not _is_anew(_asked, comm, process_sets):
            _require_same(_asked, comm, process_sets, dict(keywords))
            return
        shutdown()
    launched_by.own_place("init()")
    for sentence in table.gone(keywords):
        failure.warn(sentence, DeprecationWarning)
    while not _join(comm, process_sets, dict(keywords)):
        pass


def begin_again() -> None:
    """Leave this generation of an elastic job and join the next one, with the arguments of init()."""
    asked = _asked
    assert asked is not None
    shutdown()
    while not _join(asked.comm, asked.process_sets, asked.keywords):
        pass


def _join(comm: Any, process_sets: Any, keywords: dict[str, Any]) -> bool:
    """Whether it went well. If not, another rank of an elastic job was lost meanwhile, and there is nothing of it."""
    global _world, _asked
    settings = table.resolve(keywords)
    asked = _Asked(comm, process_sets, keywords, dict(settings))
    comm, process_sets = _split_communicators(comm, process_sets)
    fixed = table.set_by_user(keywords)
    set_level(settings["log_level"])
    servers = int(float(settings["kv_servers"]))
    if servers and _set_aside is not None:
        if comm:
            raise ValueError("kv_servers takes some of all ranks that were started: init() takes no comm beside it")
        comm = _set_aside(servers, settings)
    found = _core.autotune_findings() if elastic_client.is_elastic() else ""
    world, tuned = network.connect(comm, settings, lambda: table.read_tuned(settings, fixed, found))
    settings.update(tuned)
    gpus.use(world.gpus[world.rank])
    try:
        _start_core(world, settings, fixed)
    except _LOST:
        if elastic_client.is_elastic():
            return False
        raise
    _world, _asked = world, asked
    set_world(world.rank, len(world.names), world.communicator, comm if mpi.is_communicator(comm) else None)
    metrics.begin()
    _correct_horovods_variables()
    _record_flights(world, settings)
    seat = elastic_client.seat()
    job_file.announce(world, None if seat is None else seat.generation)
    if seat is not None:
        metrics.set_generation(seat.generation, elastic_client.seconds_lost)
    atexit.unregister(_end)
    atexit.register(_end)
    refused = None
    try:
        register_at_init(_checked_sets(process_sets))
    except RefusedSetError as error:
        refused = error
    except BaseException as error:  # on all ranks alike, or another one is lost
        shutdown()
        if elastic_client.is_elastic() and isinstance(error, _LOST):
            return False
        raise
    try:
        _serve_metrics(settings, world.rank)
        lifecycle.begin_all(settings)
        _name_what_has_no_effect(world.rank)
    except BaseException as error:
        if elastic_client.is_elastic() and isinstance(error, _LOST):
            shutdown()
            return False
        failure.tell(error)  # it is perhaps on this rank alone
        shutdown()
        raise
    elastic_client.joined()
    if refused is not None:
        _asked = asked._replace(are_sets_refused=True)
        raise ValueError(f"{refused}; the job is initialised, with the process sets before this one") from None
    return True


def _serve_metrics(settings: dict[str, str], rank: int) -> None:
    """A port that cannot be had is no reason to end a training."""
    if not float(settings["metrics_port"]):
        return
    port = int(float(settings["metrics_port"])) + local_rank()
    try:
        metrics.serve(settings["metrics_address"] or "127.0.0.1", port, rank)
    except OSError as error:
        logger.warning(f"{error}. This rank goes on without")


def _correct_horovods_variables() -> None:
    """Corrects those of ringrun: ranks of an elastic job change, and a launcher may place ranks freely."""
    if horovod_variables.is_told_places(os.environ):
        places = (rank(), size()), (local_rank(), local_size()), (cross_rank(), cross_size())
        os.environ.update(horovod_variables.variables_of_place(*places))


def _record_flights(world: World, settings: dict[str, str]) -> None:
    """Records flights; in an elastic job, where failures are normal, only if the user asks, by generation."""
    folder, seat = settings["flight_dir"], elastic_client.seat()
    if seat is not None and folder:
        folder = os.path.join(folder, f"generation-{seat.generation}")
    flight_recorder.start(world.rank, folder, world.token, get_process_set_ids_and_ranks)
    if seat is None or folder:
        report_failures_to(_note_failure)


def _note_failure(error: BaseException) -> None:
    if isinstance(error, _LOST):
        stop_serving()
    flight_recorder.on_failure(error)


def _split_communicators(comm: Any, process_sets: Any) -> tuple[Any, Any]:
    """The job's communicator and the process sets, where `comm` has the communicators of both."""
    if not isinstance(comm, list | tuple) or not any(mpi.is_communicator(one) for one in comm):
        return comm, process_sets
    first, *others = comm
    given = [] if process_sets in (None, "dynamic") else process_sets
    return first, [*map(ProcessSet, others), *given]


def _is_anew(asked: _Asked, comm: Any, process_sets: Any) -> bool:
    """Whether this init() replaces one whose process sets were refused, which `comm` may have had."""
    return asked.are_sets_refused and not (process_sets is None and comm in (None, []))


def _require_same(asked: _Asked, comm: Any, process_sets: Any, keywords: dict[str, Any]) -> None:
    """Refuse a second init() with other arguments; what it does not say may be anything."""
    differing = [
        *(["comm"] if comm not in (None, [], asked.comm) else []),
        *(["process_sets"] if process_sets not in (None, "dynamic", asked.process_sets) else []),
        *table.differing(keywords, asked.settings),
    ]
    if differing:
        raise RingtrainError(
            f"ringtrain is initialised already, with another {' and another '.join(differing)}; call shutdown() before "
            "an init() with other arguments"
        )


def _name_what_has_no_effect(rank: int) -> None:
    """Once in a process, on rank 0."""
    global _variables_are_named
    if rank == 0 and not _variables_are_named:
        for sentence in [*horovod_variables.sentences(os.environ), *table.misspelt(os.environ)]:
            logger.warning(sentence)
    _variables_are_named = True


def _start_core(world: World, settings: dict[str, str], fixed: list[str]) -> None:
    _core.init(
        *(world.rank, world.names, world.nodes, world.cores, world.token, world.network, settings, fixed),
        gpu=world.gpus[world.rank].device,
        nccl=gpus.nccl_candidates(),
        looks_for_sharing=not _warn_of_sharing(world),
    )
    _core.limit_exit(0)


def _warn_of_sharing(world: World) -> bool:
    """Whether there was something to say. If not, the core looks again at the first operation on GPUs."""
    sentence = gpus.describe_sharing(world.nodes, world.local_ranks, world.gpus) if world.rank == 0 else ""
    if sentence:
        logger.warning(sentence)
    return bool(sentence)


def _checked_sets(
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None,
) -> Sequence[ProcessSet | Sequence[int]]:
    if not isinstance(process_sets, str):
        return _fitting(process_sets or [])
    if process_sets != "dynamic":
        raise ValueError(f'process_sets must be a list of process sets or "dynamic", not "{process_sets}"')
    return []


def _fitting(process_sets: Sequence[ProcessSet | Sequence[int]]) -> Sequence[ProcessSet | Sequence[int]]:
    """Returns the process sets whose ranks this generation of an elastic job has all, and more."""
    if not elastic_client.is_elastic():
        return process_sets
    ranks = [one.ranks if isinstance(one, ProcessSet) else one for one in process_sets]
    return [
        one
        for one, of_one in zip(process_sets, ranks, strict=True)
        if max(of_one or [0]) < size() and len(of_one or []) < size()
    ]


def shutdown() -> None:
    """Leave the job. Mirrors `horovod.shutdown`.

    Operations that other ranks still wait for fail there with ShutDownError. Does nothing before init(). Also
    runs when the script ends.
    """
    global _world, _asked
    if _core.is_initialized():
        metrics.tell_ringrun()
        lifecycle.end_all()
    metrics.stop_serving()
    job_file.stop_answering()
    if elastic_client.seat() is None:  # else until the next generation has one
        job_file.remove()
    flight_recorder.stop()
    report_failures_to(None)
    if not _core.shutdown(_ended_by()):
        failure.limit_exit()
    failure.keep_exceptions()
    _world = _asked = None
    leave_place()
    forget_process_sets()


def _ended_by() -> str:
    place = failure.place_of_script()
    return f"shutdown() at {place}" if place else "the end of the script"


def _end() -> None:
    """At the end of the script."""
    shutdown()
    job_file.remove()
    elastic_client.leave(failure.last_words())


def is_initialized() -> bool:
    """Whether init() was called, and shutdown() not since."""
    return _core.is_initialized()


def settings() -> dict[str, str]:
    """Every option, as text. Raises NotInitializedError."""
    _joined()
    assert _asked is not None
    return dict(_asked.settings)


def _joined() -> World:
    _core.require_initialized()
    assert _world is not None
    return _world


def token() -> str:
    """Returns what differs from job to job, and from generation to generation of an elastic one."""
    return _joined().token


def rank() -> int:
    """This process' number, from 0 to size() - 1. Raises NotInitializedError, as all calls below."""
    return _joined().rank


def size() -> int:
    """How many ranks the job has."""
    return len(_joined().names)


def local_rank() -> int:
    """This rank's number among those of its node.

    In an elastic job, a process that takes the place of a lost one has its local rank, and the others keep theirs.
    """
    world = _joined()
    return world.local_ranks[world.rank]


def local_size() -> int:
    """How many ranks this node has."""
    world = _joined()
    return world.nodes.count(world.nodes[world.rank])


def cross_rank() -> int:
    """This rank's number among those with its local rank, one on each node that has so many ranks."""
    world = _joined()
    return world.local_ranks[: world.rank].count(world.local_ranks[world.rank])


def cross_size() -> int:
    """How many nodes have a rank with this local rank."""
    world = _joined()
    return world.local_ranks.count(world.local_ranks[world.rank])


def ranks_of_nodes() -> list[list[int]]:
    """The ranks of each node, ascending, in the order of their first ranks."""
    of_node: dict[Any, list[int]] = {}
    for rank, node in enumerate(_joined().nodes):
        of_node.setdefault(node, []).append(rank)
    return list(of_node.values())


def is_on_node_of(rank: int) -> bool:
    """Whether this rank is on the same node as another one. Hosts may have one name, and a node several."""
    world = _joined()
    return world.nodes[world.rank] == world.nodes[rank]


def is_homogeneous() -> bool:
    """Whether all nodes have as many ranks."""
    return len(set(Counter(_joined().nodes).values())) == 1


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads: always, since init() refuses an MPI without that."""
    _joined()
    return True


def mpi_enabled() -> bool:
    """Whether MPI carries this job's messages: not in a job of one rank, and not over sockets."""
    return isinstance(_joined().network, Library)


def mpi_built() -> bool:
    """Always True: MPI is found at run time."""
    return True


def gloo_built() -> bool:
    """Always False: there is no gloo in ringtrain."""
    return False


def gloo_enabled() -> bool:
    """Always False: there is no gloo in ringtrain."""
    return False


def nccl_built() -> int:
    """The version of the NCCL that operations use, 22703 for 2.27.3, as in Horovod; 0 without NCCL or a GPU."""
    if not cuda_built():
        return 0
    try:
        return _core.nccl_version(gpus.nccl_candidates())[0]
    except RingtrainError:
        return 0


def cuda_built() -> bool:
    """Whether there is a CUDA driver with at least one GPU for this process."""
    return _core.gpu_count() > 0


def rocm_built() -> bool:
    """Always False: there is no ROCm in ringtrain."""
    return False


def ddl_built() -> bool:
    """Always False: there is no DDL in ringtrain."""
    return False


def ccl_built() -> bool:
    """Always False: there is no oneCCL in ringtrain."""
    return False
