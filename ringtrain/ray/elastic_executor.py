"""`ElasticRayExecutor` and `RayHostDiscovery`, which older scripts of Horovod use; new ones use `RayExecutor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from ringtrain.ray.actors import Resources
from ringtrain.ray.executor import RayExecutor, Settings
from ringtrain.runner.function import check_env


class RayHostDiscovery:
    """Tells how many ranks the nodes would have room for if they were free. A subclass may tell otherwise.

    Mirrors `horovod.ray.elastic.RayHostDiscovery`.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1):
        self._resources = Resources(cpus_per_slot, gpus_per_slot if use_gpu else 0)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of ranks by the address of each node that lives."""
        slots: dict[str, int] = {}
        for node in ray.nodes():
            count = self._resources.slots(node["Resources"]) if node["Alive"] else 0
            if count:
                slots[node["NodeManagerAddress"]] = count
        return slots


@dataclass
class ElasticSettings(Settings):
    """`ElasticRayExecutor.create_settings` makes it. `discovery` is an object such as a RayHostDiscovery."""

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600
    discovery: Any = None


class ElasticRayExecutor:
    """A `RayExecutor` of elastic jobs, whose limits are in the settings. Mirrors `horovod.ray.ElasticRayExecutor`.

    Args:
        settings: of `create_settings`.
        use_gpu: whether each rank takes GPUs.
        cpus_per_slot: CPUs of Ray that each rank takes.
        gpus_per_slot: GPUs; None is one.
        env_vars: variables for the ranks.
        override_discovery: False takes the nodes from `settings.discovery`.

    Raises:
        TypeError, ValueError: as RayExecutor.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Iterable[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        verbose: int = 1,
    ) -> ElasticSettings:
        """Return settings; RayExecutor describes the arguments. `min_np` and `max_np` are older names of the first."""
        return ElasticSettings(
            timeout_s,
            nics=nics,
            verbose=verbose,
            ssh_identity_file=ssh_identity_file,
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
        )

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ):
        self._env = check_env(env_vars)
        self._executor = RayExecutor(
            settings,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            min_workers=settings.min_num_proc,
            max_workers=settings.max_num_proc,
            reset_limit=settings.reset_limit,
            elastic_timeout=settings.elastic_timeout,
            override_discovery=override_discovery,
        )

    def start(self) -> None:
        """Wait until there are resources for `min_num_proc` ranks. Raises as `RayExecutor.start`."""
        self._executor.start(extra_env_vars=self._env)

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callable[..., Any]] | None = None) -> list[Any]:
        """Call the function on all ranks, as `RayExecutor.run`."""
        return self._executor.run(worker_fn, callbacks=callbacks)
