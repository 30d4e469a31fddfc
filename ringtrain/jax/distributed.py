"""JAX's own sharding over the ranks: jit with NamedSharding, shard_map and pmap, with the collectives of XLA.

import ringtrain.jax.distributed

ringtrain.jax.distributed.init()  # in the place of jax.distributed.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("data",))

On CPUs jaxlib looks for an MPI when it is loaded. MPITRAMPOLINE_LIB names it: ringrun and `import ringtrain.jax` set
that to the core, which carries out what XLA asks of an MPI.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import ringtrain._core as _core
from ringtrain import failure
from ringtrain.engine.handles import Handle
from ringtrain.engine.process_sets import ProcessSet
from ringtrain.engine.submission import submit_barrier
from ringtrain.errors import RingtrainError
from ringtrain.jax import private
from ringtrain.job import elastic_client, session
from ringtrain.job.host import addresses_of, usual_address
from ringtrain.ops.objects import broadcast_object

# So much later than another one a rank may come to the end of the same script. XLA does not say whether programs still
# run whose results nobody has kept.
_USUAL_DELAY_S = 5.0

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ringtrain.options.keywords import Options

_has_joined = False


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
    **keywords: Unpack[Options],
) -> None:
    """Join the job, as `ringtrain.init` does, and make the CPUs of all ranks devices of JAX, one for each rank.

    All ranks call it together, before JAX makes its devices: so before any computation and before `jax.devices()`. The
    job may have been joined before by `ringtrain.init()`. A second call does nothing. All else of ringtrain works
    beside it.

    Args:
        comm, process_sets, keywords: as those of `ringtrain.init`.

    Raises:
        RingtrainError: the job is elastic; jaxlib was loaded before MPITRAMPOLINE_LIB was set, or with another MPI;
            this process has joined a job before, or is a fork of one that has; and what `ringtrain.init` raises.
        RuntimeError: JAX has its devices already.
    """
    global _has_joined
    if _has_joined and _core.is_initialized():
        session.init(comm, process_sets, **keywords)
        return
    _require_possible()
    session.init(comm, process_sets, **keywords)
    _has_joined = True
    session.at_shutdown(_wait_for_programs)
    # Python calls this before the function of JAX that waits for the others: so they learn that this rank has failed.
    atexit.register(session.shutdown)
    rank, size = session.rank(), session.size()
    _core.carry_collectives_of_xla(rank, size)
    jax.config.update("jax_cpu_collectives_implementation", "mpi")
    address = broadcast_object(_own_address() if rank == 0 else None, 0)
    private.after_compiling(_require_all_ranks)
    jax.distributed.initialize(address, size, rank, cluster_detection_method="deactivate")


def _require_possible() -> None:
    _core.require_not_forked()
    if elastic_client.is_elastic():
        raise RingtrainError(
            "JAX's own sharding cannot be elastic: XLA compiles programs for the devices of all processes and cannot "
            "take other ones later. Use the operations of ringtrain.jax with hvd.elastic.run, or ringrun without "
            "--min-np and --max-np."
        )
    if _has_joined:
        raise RingtrainError("JAX can join a job once in a process: start another process for the next job")
    if _core.is_loaded_by_jaxlib():
        return
    library = os.environ.get("MPITRAMPOLINE_LIB")
    if library not in (None, _core.__file__):
        raise RingtrainError(
            f"MPITRAMPOLINE_LIB={library} gives jaxlib another MPI than ringtrain: unset it, or use "
            "jax.distributed.initialize() with that MPI"
        )
    raise RingtrainError(
        "jaxlib was loaded before ringtrain, and looks for the carrier of its collectives only then: import "
        f"ringtrain.jax before jax, start with ringrun, or set MPITRAMPOLINE_LIB={_core.__file__}"
    )


# The names that XLA has for exchanges between devices.
_EXCHANGES = re.compile(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-[a-z]+)(-start)?\(")


def _require_all_ranks(executable: Any, devices: list[Any]) -> None:
    """XLA calls only the ranks that have a device in a mesh, and does not say which these are."""
    ranks = sorted({device.process_index for device in devices})
    if not 1 < len(ranks) < session.size():
        return
    if not any(_EXCHANGES.search(module.to_string()) for module in executable.hlo_modules()):
        return
    raise NotImplementedError(
        f"a program for the devices of ranks {', '.join(map(str, ranks))} exchanges values between them: with "
        "ringtrain a mesh has devices of all ranks, since XLA calls no others, and all open a mesh together. Make a "
        "mesh of all devices with one axis more, and compute along one of its axes, as in "
        "Mesh(np.array(jax.devices()).reshape(2, -1), ('group', 'data')); or call hvd.allreduce with process_set="
    )


def _wait_for_programs() -> None:
    """Waits for all ranks at the end, unless one of them has failed.

    A script comes to its end while programs of XLA still run, and the other ranks may need what these send. If not all
    ranks come soon, and the programs of this rank are over, operations of the others that need this rank fail.
    """
    if failure.last_words() or sys.exc_info()[0] is not None:
        return
    with contextlib.suppress(RingtrainError):
        all_end = submit_barrier("<end of the script>")
        if _core.has_meshes_of_xla() and not _core.wait(all_end, _USUAL_DELAY_S):
            _await_own_programs()
            submit_barrier("<end>")  # the others need not join it: all wait for the first one
        Handle(all_end, (), _core.Handle.number).wait()


def _await_own_programs() -> None:
    for array in jax.live_arrays():  # also those of other threads
        with contextlib.suppress(RuntimeError, ValueError):  # the program has failed
            array.block_until_ready()
    # XLA begins the programs of a thread in their order, so this one ends after those whose results nobody has kept.
    # The program has no arguments, which a script may forbid by jax_transfer_guard.
    jax.block_until_ready(jax.jit(lambda: jnp.zeros(()))())


def _own_address() -> str:
    """Returns the address where JAX's coordinator, in rank 0, may listen."""
    here = (addresses_of(session.settings()["socket_interfaces"]) or [usual_address()])[0]
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    return f"[{here}]:{port}" if ":" in here else f"{here}:{port}"
