"""The actors that are ranks, and the resources that each takes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from ringtrain import failure
from ringtrain.job import elastic_client, engine_process, session
from ringtrain.runner import installed

# Some resources of Ray are in parts of ten thousand.
_SMALLEST = 1e-4


class Resources(NamedTuple):
    """The amounts that one actor takes."""

    cpus: float
    gpus: float

    def bundle(self, actors: int = 1) -> dict[str, float]:
        """Returns what so many actors take, as a bundle of a placement group."""
        amounts = {"CPU": self.cpus * actors, "GPU": self.gpus * actors}
        return {name: amount for name, amount in amounts.items() if amount > 0}

    def slots(self, free: Mapping[str, float]) -> int:
        """Returns how many actors fit into the resources of a node."""
        return int(min(free.get(name, 0.0) / amount + _SMALLEST for name, amount in self.bundle().items()))

    def __str__(self) -> str:
        return " and ".join(f"{amount:g} {name}" for name, amount in self.bundle().items())


def free_by_node() -> dict[str, dict[str, float]]:
    """Returns the free resources of each node that lives, by its id."""
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    return {node["NodeID"]: free.get(node["NodeID"], {}) for node in ray.nodes() if node["Alive"]}


def free_in_words() -> str:
    """Returns the free CPUs and GPUs of each node, in words."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    of_nodes = []
    for node, free in free_by_node().items():
        amounts = [f"{free.get(name, 0.0):g} {name}" for name in ("CPU", "GPU") if name == "CPU" or free.get(name)]
        of_nodes.append(f"{' and '.join(amounts)} on {addresses[node]}")
    return ", ".join(of_nodes) or "nothing"


def variables_of_all(settings: Any) -> dict[str, str]:
    """Returns what the settings are to the ranks."""
    variables = {"RINGTRAIN_START_TIMEOUT_S": f"{settings.timeout_s:g}", "RINGRUN_SPEAKER": "RayExecutor"}
    nics = getattr(settings, "nics", None)
    if nics:
        variables["RINGTRAIN_SOCKET_INTERFACES"] = nics if isinstance(nics, str) else ",".join(sorted(nics))
    return variables


def death_in_words(error: RayError) -> str:
    """Returns the sentence in which Ray tells why an actor has died."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("The actor is dead because")), lines[0] if lines else "")
    return reason.partition(". ")[0].removesuffix(".")


class Left(NamedTuple):
    """The result of a process that the job has not needed."""


class Call(NamedTuple):
    """The call that each process of an elastic job makes: `function` gets an object of `cls`, if there is one."""

    function: Callable[[Any], Any]
    cls: type | None
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class RankActor:
    """The process of a rank. Its methods run one at a time, in the main thread of the process.

    Args:
        name: what Ray writes before each line of its output.
        has_alias: whether `import horovod` is to find ringtrain, as in the driver.
    """

    def __init__(self, name: str, has_alias: bool):
        if has_alias and installed.HOROVOD_FOLDER not in sys.path:
            sys.path.append(installed.HOROVOD_FOLDER)
        self._name = name
        self._executable: Any = None

    def __repr__(self) -> str:
        return self._name

    def introduce(self) -> tuple[engine_process.Process, list[str]]:
        """Returns the process, and the GPUs that Ray has given it."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return engine_process.own_process(), [str(gpu) for gpu in gpus]

    def become_rank(self, variables: Mapping[str, str], secret: bytes) -> None:
        """From now on `init()` in this process takes the place that the variables name."""
        engine_process.become_rank(variables, secret)

    def start_executable(self, cls: type | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises what the class raises; the operations of the other ranks fail then."""
        try:
            self._executable = None if cls is None else cls(*args, **kwargs)
        except BaseException as error:
            _leave(error)
            raise

    def execute(self, function: Callable[[Any], Any], variables: Mapping[str, str], is_alone: bool) -> Any:
        """Returns what the function returns, which gets the executable.

        Raises what the function raises. If all ranks do this (not `is_alone`), the operations of the others fail, and
        this process leaves the job.
        """
        os.environ.update(variables)
        try:
            return function(self._executable)
        except BaseException as error:
            if not is_alone:
                _leave(error)
            if isinstance(error, SystemExit):
                raise RuntimeError(f"{self._name} has left the function by sys.exit({error.code!r})") from None
            raise

    def take_part(self, variables: Mapping[str, str], secret: bytes, call: Call) -> Any:
        """Does the call as a process of an elastic job, from its beginning to its end. As `execute`."""
        self.become_rank(variables, secret)
        try:
            self.start_executable(call.cls, call.args, call.kwargs)
            result = call.function(self._executable)
        except SystemExit as end:
            session.shutdown()
            if not end.code:  # the job has come to its end without this process
                elastic_client.leave("")
                return Left()
            error = RuntimeError(f"{self._name} has left the function by sys.exit({end.code!r})")
            elastic_client.leave(str(error))
            raise error from None
        except BaseException as error:
            _leave(error)
            elastic_client.leave(f"{type(error).__name__}: {error}")
            raise
        session.shutdown()
        elastic_client.leave("")
        return result


def new_actor(name: str, resources: Resources, strategy: Any) -> Any:
    """Returns the handle of a RankActor that the scheduling strategy places."""
    options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "scheduling_strategy": strategy}
    has_alias = getattr(sys.modules.get("horovod"), "__name__", "") == "ringtrain.horovod"
    return ray.remote(RankActor).options(**options).remote(name, has_alias)


def _leave(error: BaseException) -> None:
    if session.is_initialized():
        failure.tell(error)
        session.shutdown()
