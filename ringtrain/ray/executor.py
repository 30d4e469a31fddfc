"""`RayExecutor`: what horovod.ray calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from ringtrain.ray.actors import Resources
from ringtrain.ray.elastic_job import ElasticJob, terms_of
from ringtrain.ray.static_job import StaticJob, Workers
from ringtrain.runner.function import check_env, check_function, check_num_proc
from ringtrain.runner.job import ElasticTerms


@dataclass
class Settings:
    """How long to wait, and where the ranks connect. `RayExecutor.create_settings` makes it.

    Args:
        timeout_s: how long the actors may take to start, and then the ranks to come to `init()`, in seconds.
        placement_group_timeout_s: how long to wait for the resources, in seconds.
        nics: the network interfaces that the ranks talk through; None is those by which Ray knows the nodes.
        verbose: without effect, as the output of the ranks is Ray's.
        ssh_identity_file: without effect, as ssh is not used.
    """

    timeout_s: float = 30
    placement_group_timeout_s: float = 100
    nics: Iterable[str] | None = None
    verbose: int = 1
    ssh_identity_file: str | None = None
    elastic: bool = False


class RayExecutor:
    """Calls functions on ranks that are actors of Ray, each in a process of its own. Mirrors `horovod.ray.RayExecutor`.

    With `num_workers`, or `num_hosts` and `num_workers_per_host`, the ranks are from `start` to `shutdown` the same
    actors, and the job ends with the first that is lost. With `min_workers` each `run` is an elastic job: lost actors
    are replaced, and the others go on from the last commit in the same processes.

    Args:
        settings: of `create_settings`; None is the default.
        num_workers: the number of ranks.
        num_hosts: the number of nodes, with the same number of ranks on each, in place of `num_workers`.
        num_workers_per_host: the ranks of each node, with `num_hosts`.
        cpus_per_worker: CPUs of Ray that each rank takes.
        use_gpu: whether each rank takes GPUs.
        gpus_per_worker: how many; None is one.
        use_current_placement_group: take the resources from the placement group that this code runs in, if it runs in
            one. An elastic job does not.
        min_workers: makes the job elastic, which goes on with so many ranks at least.
        max_workers: so many ranks at most; None is as many as there are resources for.
        reset_limit: how often the ranks may meet anew; None is no limit.
        cooldown_range: for how many seconds a node whose ranks fail again and again gets no more, the first time and at
            most; None is for ever.
        elastic_timeout: how long there may be fewer ranks than `min_workers`, in seconds.
        override_discovery: False takes the nodes from `settings.discovery`, whose `find_available_hosts_and_slots()`
            returns the number of ranks by the address of the node.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, out of its range, or excludes another one.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Iterable[str] | None = None,
        verbose: int = 1,
    ) -> Settings:
        """Return settings; `Settings` describes the arguments. `ssh_str` is a key, which is not needed here."""
        if ssh_str is not None and ssh_identity_file is None:
            raise ValueError("ssh_str needs ssh_identity_file; leave both out: ssh is not used")
        return Settings(timeout_s, placement_group_timeout_s, nics, verbose, ssh_identity_file)

    def __init__(
        self,
        settings: Any = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ):
        if gpus_per_worker and not use_gpu:
            raise ValueError("gpus_per_worker is set, but use_gpu is False: set use_gpu=True, too")
        if gpus_per_worker is not None and use_gpu:
            check_num_proc(gpus_per_worker, "gpus_per_worker")
        check_num_proc(cpus_per_worker, "cpus_per_worker")
        self._settings = RayExecutor.create_settings() if settings is None else settings
        self._resources = Resources(cpus_per_worker, (gpus_per_worker or 1) if use_gpu else 0)
        self._workers: Workers | None = None
        self._terms: ElasticTerms | None = None
        if min_workers is None:
            if max_workers is not None:
                raise ValueError("max_workers makes no job elastic without min_workers: set min_workers, too")
            self._workers = Workers.of(num_workers, num_hosts, num_workers_per_host, use_current_placement_group)
        else:
            if num_workers is not None or num_hosts is not None:
                raise ValueError("give num_workers or num_hosts, or min_workers for an elastic job, not both")
            self._terms = terms_of(min_workers, max_workers, reset_limit, cooldown_range, elastic_timeout)
        self._discovery = None if override_discovery else getattr(self._settings, "discovery", None)
        if not override_discovery and self._discovery is None:
            raise ValueError("override_discovery=False needs settings.discovery")
        self._job: StaticJob | ElasticJob | None = None

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the actors; those of an elastic job start with each `run`.

        Args:
            executable_cls: a class of which each rank has an object, that `execute` gives to its function.
            executable_args: the arguments of that class.
            executable_kwargs: further ones.
            extra_env_vars: variables for the ranks.

        Raises:
            TimeoutError: there are too few resources; it says what is free and what was asked for.
            RuntimeError: Ray is not initialised, or only Ray Client is, or this executor has been started.
            Exception: what the class raised on a rank.
        """
        if self._job is not None:
            raise RuntimeError("this RayExecutor has been started: call shutdown() before another start()")
        _require_ray()
        env = check_env({name: str(value) for name, value in (extra_env_vars or {}).items()})
        executable = executable_cls, list(executable_args or ()), dict(executable_kwargs or {})
        job: StaticJob | ElasticJob
        if self._workers is not None:
            job = StaticJob(self._settings, self._workers, self._resources, executable, env)
        else:
            assert self._terms is not None
            job = ElasticJob(self._settings, self._terms, self._resources, executable, env, self._discovery)
        job.start()
        self._job = job

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on all ranks and return the results, in the order of the ranks.

        The results of an elastic job are those of the processes that were its ranks at the end. Ctrl-C ends the ranks.

        Raises:
            PeerLostError: an actor, or its node, has died.
            Exception: what the function raised on the rank that failed first.
        """
        _refuse_callbacks(callbacks)
        return self._started().run(_without_executable(fn, args, kwargs))

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[..., Any]] | None = None) -> list[Any]:
        """Call `fn(executable)` on all ranks and return the results; as `run`."""
        _refuse_callbacks(callbacks)
        check_function(fn)
        return self._started().run(fn)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on all ranks and return an ObjectRef for each. Not in an elastic job."""
        return self._static("run_remote").submit(_without_executable(fn, args, kwargs))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn(executable)` on rank 0 and return its result. Not in an elastic job."""
        check_function(fn)
        return self._static("execute_single").run_on_first(fn)

    def shutdown(self) -> None:
        """End the actors and give their resources back. Does nothing before `start`."""
        job, self._job = self._job, None
        if job is not None:
            job.close()

    def _started(self) -> StaticJob | ElasticJob:
        if self._job is None:
            raise RuntimeError("call start() before functions are run")
        return self._job

    def _static(self, call: str) -> StaticJob:
        job = self._started()
        if isinstance(job, ElasticJob):
            raise NotImplementedError(f"{call} needs ranks that stay: use run() or execute() in an elastic job")
        return job


def _without_executable(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    check_function(fn)
    given, named = list(args or ()), dict(kwargs or {})
    return lambda _executable: fn(*given, **named)


def _refuse_callbacks(callbacks: Sequence[Callable[..., Any]] | None) -> None:
    if callbacks:
        raise ValueError("callbacks do not come: let the ranks put what they report into a ray.util.queue.Queue")


def _require_ray() -> None:
    if not ray.is_initialized():
        raise RuntimeError("call ray.init() before RayExecutor.start()")
    if ray.util.client.ray.is_connected():
        raise RuntimeError(
            "RayExecutor does not run through Ray Client (ray://), since ranks connect to this process. Run the script "
            "in the cluster, as with `ray job submit`, or call a function that uses RayExecutor as a task: "
            "ray.get(ray.remote(num_cpus=0)(function).remote())"
        )
