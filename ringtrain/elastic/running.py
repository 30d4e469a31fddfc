"""Calls a function of the user in one generation of an elastic job after the other, until it returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from ringtrain.elastic.states import State
from ringtrain.errors import (
    DeadlockError,
    HostsUpdatedInterrupt,
    MismatchError,
    NonFiniteError,
    NotInitializedError,
    ReplicaError,
    RingtrainError,
    StepOrderError,
)
from ringtrain.job import elastic_client, session
from ringtrain.record.logger import logger

AnyState = TypeVar("AnyState", bound=State)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Function = Callable[Concatenate[AnyState, Arguments], Result]

# These are mistakes of the script, which would come again and again.
_MISTAKES = (DeadlockError, MismatchError, NonFiniteError, NotInitializedError, ReplicaError, StepOrderError)


def run(func: Function[AnyState, Arguments, Result]) -> Function[AnyState, Arguments, Result]:
    """Decorate a function of a state so that it survives the loss of ranks. Mirrors `horovod.elastic.run`.

    All ranks call the decorated function, after init(), with states of the same kind. It makes the state of all ranks
    the same and calls the function. When a rank is lost meanwhile, the state of the others goes back to its last
    commit; when others wait for a place, `state.commit()` raises what ends the function on all ranks. Either way the
    ranks that are there join the next generation of the job, the callbacks of the state are called, and the function is
    called again. rank() and size() may then be others.

    Returns what the function returns. Anything but the loss of a rank is raised: MismatchError, DeadlockError,
    ReplicaError, NonFiniteError and StepOrderError would come again.

    A job that is not elastic has one generation, and the loss of a rank is raised.

    Args:
        func: its first argument is the state.
    """
    return run_fn(func, session.begin_again)


def run_fn(
    func: Function[AnyState, Arguments, Result], reset: Callable[[], object]
) -> Function[AnyState, Arguments, Result]:
    """As `run`, with a function that leaves one generation and joins the next in the place of ringtrain's own."""

    @functools.wraps(func)
    def wrapper(state: AnyState, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        is_in_sync = is_again = False
        while True:
            try:
                if is_again:
                    state.on_reset()
                elastic_client.ready()
                if not is_in_sync:
                    state.sync()
                    state.count_on()
                return func(state, *args, **kwargs)
            except RingtrainError as error:
                _require_next_generation(error, reset)
                state.restore()
                is_in_sync = False
            except HostsUpdatedInterrupt as interrupt:
                is_in_sync = interrupt.skip_sync
            reset()
            is_again = True
            is_in_sync = is_in_sync and not _has_newcomers()

    return wrapper  # type: ignore[return-value]  # mypy expects the state to be positional only


def generation() -> int:
    """Which generation of the job this is: 1 at first. 0 in a job that is not elastic."""
    seat = elastic_client.seat()
    return 0 if seat is None else seat.generation


def _has_newcomers() -> bool:
    seat = elastic_client.seat()
    return seat is not None and seat.has_newcomers


def _require_next_generation(error: RingtrainError, reset: Callable[[], object]) -> None:
    """Raises the error where beginning again is impossible or useless."""
    if isinstance(error, _MISTAKES):
        raise error
    if reset is session.begin_again and not elastic_client.is_elastic():
        logger.error("a rank is lost, and this job is not elastic: start it with ringrun --min-np to have it go on")
        raise error
    logger.warning("generation %d has ended: %s", generation(), str(error).partition("\n")[0])
