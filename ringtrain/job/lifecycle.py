"""The list of all that begins with init() and ends with shutdown(), in this order on every rank.

init() of session.py

1. refuses a forked process, loads the modules that have a part in it, and refuses a second init() that differs
2. reads the options, and takes the ranks out of the job that are to serve stores (`kv_servers`)
3. meets the other ranks, with which it compares the options (network.py), and takes the GPU of this rank (gpus.py)
4. starts the core
5. counts, corrects Horovod's variables, records flights, and tells `ringrun status` of the job (job_file.py)
6. registers the process sets
7. serves the metrics, and calls what `AT_INIT` lists

In an elastic job ranks may be lost meanwhile: then it leaves what there is and begins at 2 with the next generation.

shutdown() calls what `AT_SHUTDOWN` lists, while operations still work. Then it stops the metrics, the flight recorder
and the core, and forgets the process sets. An elastic job does all of it once in each generation of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

# Modules above this floor, each with one function. Some of the functions run operations, so their order is the same on
# all ranks, whatever a script imports first. Those of training/ may be imported after init(), when a script first uses
# them: until then there is nothing that they would begin anew.
AT_INIT = (
    "ops.preemption",  # notes signals again if the script has asked for preemption before
    "ops.exchanges",  # forgets which broadcasts the ranks have agreed on
    "timeline.recording",  # begins the timeline, together with the other ranks
    "training.local_steps",  # gives processes that are new the outer parameters of DiLoCo
    "training.gradient_batch",  # numbers the gradients that have no name anew
    "training.speed_sampler",  # numbers the samplers anew
    "kvstore.backend",  # numbers the stores anew
    "jax.optimizer",  # numbers the optimizers anew
    "jax.lowering",  # forgets programs that are compiled for other ranks
    "mxnet.engine",  # numbers the operations that have no name anew
    "mxnet.stores",
    "mxnet.trainer",
)
AT_SHUTDOWN = (
    "timeline.recording",  # writes the timeline, together with the other ranks
    "training.local_steps",  # ends the transfers of DiLoCo
    "training.gradient_batch",  # forgets the step that is under way
    "training.optimizer",
    "torch.optimizer",
    "kvstore.servers.server_ranks",  # ends servers that no store has used
    "kvstore.servers.worker",  # closes the connections to servers
    "torch.distributed.meeting",  # the next process group of torch belongs to another job
    "jax.lowering",  # waits for programs that are running
    "jax.distributed",
    "mxnet.engine",  # waits for pending operations
    "ops.preemption",  # signals end this process again
)

_loads: list[Callable[[], object]] = []
_beginnings: list[Callable[[dict[str, str]], None]] = []
_endings: list[Callable[[], None]] = []


def load_with(load: Callable[[], object]) -> None:
    """Have `load` called by init(), which a script may call by the name of an adapter alone."""
    _loads.append(load)


def load_all() -> None:
    """Called by init() before it does anything. Modules that are loaded already take no time."""
    for load in _loads:
        load()


def at_init(begin: Callable[[dict[str, str]], None]) -> None:
    """Registers what a module of `AT_INIT` does, with the options; functions of other modules come last."""
    _beginnings.append(begin)
    _beginnings.sort(key=lambda one: _turn(one, AT_INIT))


def at_shutdown(end: Callable[[], None]) -> None:
    """Registers what a module of `AT_SHUTDOWN` does; functions of other modules come last."""
    _endings.append(end)
    _endings.sort(key=lambda one: _turn(one, AT_SHUTDOWN))


def _turn(function: Callable[..., None], modules: tuple[str, ...]) -> int:
    module = function.__module__.removeprefix("ringtrain.")
    return modules.index(module) if module in modules else len(modules)


def begin_all(settings: dict[str, str]) -> None:
    """Called at the end of init(), on all ranks, with the options."""
    for begin in _beginnings:
        begin(settings)


def end_all() -> None:
    """Called at the beginning of shutdown()."""
    for end in _endings:
        end()
