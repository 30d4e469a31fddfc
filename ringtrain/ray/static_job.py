"""A job whose actors are the same ranks from its start to its end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ringtrain.errors import PeerLostError
from ringtrain.job import engine_process
from ringtrain.job.rendezvous.listener import bound
from ringtrain.job.rendezvous.server import Server
from ringtrain.job.sockets import PLACE_VARIABLE
from ringtrain.options import horovod_variables
from ringtrain.ray.actors import Resources, death_in_words, free_in_words, new_actor, variables_of_all
from ringtrain.runner.function import check_num_proc

# How long ranks may take to end after another one has failed or is lost.
_END_S = 10.0

Executable = tuple[type | None, Sequence[Any], Mapping[str, Any]]


class Workers(NamedTuple):
    """How many ranks, and where. `on_each` is their number on each node, or 0 where that does not matter."""

    ranks: int
    on_each: int
    uses_current_group: bool

    @staticmethod
    def of(num_workers: Any, num_hosts: Any, num_workers_per_host: Any, uses_current_group: bool) -> Workers:
        """Raises TypeError and ValueError."""
        if (num_workers is None) == (num_hosts is None):
            raise ValueError("give num_workers, or num_hosts and num_workers_per_host, or min_workers")
        if num_workers is not None:
            return Workers(check_num_proc(num_workers, "num_workers"), 0, uses_current_group)
        on_each = check_num_proc(num_workers_per_host, "num_workers_per_host")
        return Workers(check_num_proc(num_hosts, "num_hosts") * on_each, on_each, uses_current_group)

    def __str__(self) -> str:
        on_each = f" ({self.on_each} on each of {self.ranks // self.on_each} nodes)" if self.on_each else ""
        return f"{self.ranks} worker{'s' * (self.ranks > 1)}{on_each}"


class StaticJob:
    """From `start` to `close`. One thread."""

    def __init__(
        self, settings: Any, workers: Workers, resources: Resources, executable: Executable, env: Mapping[str, str]
    ):
        self._settings = settings
        self._workers = workers
        self._resources = resources
        self._executable = executable
        self._env = dict(env)
        self._secret = secrets.token_bytes(32)
        self._server: Server | None = None
        self._group: Any = None  # of placement, which belongs to this job
        self._actors: list[Any] = []  # by rank
        self._loss = ""  # of a rank, in words

    def start(self) -> None:
        """Raises TimeoutError, and what the executable raises."""
        try:
            self._create_actors()
            self._place_ranks()
            if self._executable[0] is not None:
                self._results([actor.start_executable.remote(*self._executable) for actor in self._actors])
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[[Any], Any]) -> list[Any]:
        return self._results(self.submit(function))

    def submit(self, function: Callable[[Any], Any]) -> list[Any]:
        """Returns an ObjectRef for each rank. Raises PeerLostError where a rank is lost already."""
        variables, stored = self._variables(), ray.put(function)
        return [actor.execute.remote(stored, variables, False) for actor in self._actors]

    def run_on_first(self, function: Callable[[Any], Any]) -> Any:
        return ray.get(self._actors[0].execute.remote(function, self._variables(), True))

    def close(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)
        self._close_meeting()

    # --- the actors ---------------------------------------------------------------------------------------------------

    def _create_actors(self) -> None:
        current = get_current_placement_group() if self._workers.uses_current_group else None
        places = [-1] * self._workers.ranks if current else self._make_group()
        for number, bundle in enumerate(places):
            name = f"worker {number}" if current else f"rank {number}"
            place = PlacementGroupSchedulingStrategy(current or self._group, bundle)
            self._actors.append(new_actor(name, self._resources, place))

    def _make_group(self) -> list[int]:
        """Returns the bundle of each rank; those of a node are beside each other."""
        on_each = self._workers.on_each or 1
        bundles = self._workers.ranks // on_each
        strategy = "STRICT_SPREAD" if self._workers.on_each else "PACK"
        self._group = placement_group([self._resources.bundle(on_each)] * bundles, strategy=strategy)
        timeout_s = self._settings.placement_group_timeout_s
        if not self._group.wait(timeout_s):
            raise TimeoutError(self._too_few(f"{timeout_s:g} s (placement_group_timeout_s)"))
        nodes = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        order = list(dict.fromkeys(nodes[bundle] for bundle in range(bundles)))
        in_order = sorted(range(bundles), key=lambda bundle: order.index(nodes[bundle]))
        return [bundle for bundle in in_order for _ in range(on_each)]

    def _too_few(self, waited: str) -> str:
        return (
            f"RayExecutor has waited {waited} for {self._workers} with {self._resources} each; free are "
            f"{free_in_words()}. Use fewer workers, or a cluster that grows"
        )

    def _place_ranks(self) -> None:
        timeout_s = self._settings.timeout_s
        try:
            met = ray.get([actor.introduce.remote() for actor in self._actors], timeout=timeout_s)
        except GetTimeoutError:
            raise TimeoutError(self._too_few(f"{timeout_s:g} s (timeout_s)")) from None
        order = list(dict.fromkeys(process.node for process, _ in met))
        in_order = sorted(range(len(met)), key=lambda number: order.index(met[number][0].node))
        self._actors = [self._actors[number] for number in in_order]
        nodes = [met[number][0].node for number in in_order]
        gpus = [met[number][1] for number in in_order]
        variables = engine_process.variables_of_ranks(nodes, self._meeting(), variables_of_all(self._settings))
        given = [
            {**of_rank, **_horovods(of_rank, nodes), **_visible_gpus(rank, nodes, gpus), **self._env}
            for rank, of_rank in enumerate(variables)
        ]
        self._results(
            [actor.become_rank.remote(one, self._secret) for actor, one in zip(self._actors, given, strict=True)]
        )

    # --- where the ranks meet -----------------------------------------------------------------------------------------

    def _meeting(self) -> str:
        if self._server is None:
            self._server = Server(bound("", 0), self._secret)
        return f"{ray.util.get_node_ip_address()}:{self._server.port}"

    def _variables(self) -> dict[str, str]:
        """Returns those of the next call. Raises PeerLostError."""
        if self._loss:
            raise PeerLostError(f"{self._loss}: call shutdown() and start() of RayExecutor for new ranks")
        return {PLACE_VARIABLE: self._meeting()}

    def _close_meeting(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    # --- results ------------------------------------------------------------------------------------------------------

    def _results(self, references: list[Any]) -> list[Any]:
        """Returns the results of all ranks, or raises the exception of the rank that failed first by itself."""
        waiting = {reference: rank for rank, reference in enumerate(references)}
        failures: list[tuple[int, Exception]] = []
        end = float("inf")
        try:
            while waiting and time.monotonic() < end:
                longest_s = None if not failures else end - time.monotonic()
                done, _ = ray.wait(list(waiting), timeout=longest_s)
                for reference in done:
                    rank, error = waiting.pop(reference), _error_of(reference)
                    if error is not None:
                        failures.append((rank, error))
                        end = min(end, time.monotonic() + _END_S)
                        self._note(rank, error)
        except BaseException:  # Ctrl-C
            self._loss = "the ranks were ended when a call was interrupted"
            self.close()
            raise
        if not failures:
            return list(ray.get(references))
        for rank in waiting.values():
            self._loss = f"rank {rank} went on after another one had failed, and was ended"
            ray.kill(self._actors[rank])
        self._close_meeting()  # ranks that come to init() the next time need another one
        raise _first_of(failures)

    def _note(self, rank: int, error: Exception) -> None:
        """Ranks that are in `init()`, or come to it, are not to wait for this one."""
        reason = _in_words(rank, error)
        if isinstance(error, RayActorError):
            self._loss = reason
        if self._server is not None:
            self._server.fail(reason)


def _error_of(reference: Any) -> Exception | None:
    try:
        ray.get(reference)
    except Exception as error:
        return error
    return None


def _in_words(rank: int, error: Exception) -> str:
    if isinstance(error, RayActorError):
        return f"rank {rank} is lost: {death_in_words(error)}"
    cause = error.cause if isinstance(error, RayTaskError) else error
    return f"rank {rank} has failed: {type(cause).__name__}: {cause}"


def _first_of(failures: list[tuple[int, Exception]]) -> Exception:
    """The exception that is not a consequence of another rank's, with a note that names the rank."""
    rank, error = engine_process.first_failure(failures)
    if isinstance(error, RayActorError):
        lost = PeerLostError(_in_words(rank, error))
        lost.__cause__ = error
        return lost
    return engine_process.with_note(error, f"on rank {rank}")


def _horovods(of_rank: Mapping[str, str], nodes: Sequence[str]) -> dict[str, str]:
    """For scripts that read Horovod's variables before `init()`, which says the same."""
    rank, size, local_rank, local_size = (
        int(of_rank[f"RINGTRAIN_{name}"]) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    counts = [nodes.count(node) for node in dict.fromkeys(nodes)]
    earlier = [nodes.count(node) for node in dict.fromkeys(nodes[: rank - local_rank])]
    across = sum(count > local_rank for count in earlier), sum(count > local_rank for count in counts)
    return horovod_variables.variables_of_place((rank, size), (local_rank, local_size), across)


def _visible_gpus(rank: int, nodes: Sequence[str], gpus: Sequence[Sequence[str]]) -> dict[str, str]:
    """All ranks of a node see the GPUs of all of them, in the order of the ranks, so that each has that of its
    local_rank()."""
    visible = [gpu for node, own in zip(nodes, gpus, strict=True) if node == nodes[rank] for gpu in own]
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible)} if visible else {}
