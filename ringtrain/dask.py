"""`ringtrain.dask.run(client, function)`: a function on ranks that are workers of a Dask cluster.

Needs `pip install "ringtrain[dask]"` here, and ringtrain on the workers.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import distributed
from distributed.client import futures_of
from distributed.comm import get_address_host

from ringtrain.errors import PeerLostError, StalledError
from ringtrain.job import engine_process
from ringtrain.pickling import pickler
from ringtrain.runner.function import check_args, check_env, check_function, check_num_proc, check_start_timeout

Result = TypeVar("Result")

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_LOOK_S = 0.5
# How long ranks may take to end after another one has failed or is lost.
_END_S = 10.0


class _Worker(NamedTuple):
    """A worker by its address. Another process at the same address has another `identity`."""

    address: str
    identity: str


def run(
    client: distributed.Client,
    func: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_workers: int | None = None,
    *,
    resources: Mapping[str, float] | None = None,
    env: Mapping[str, str] | None = None,
    start_timeout: float | None = None,
) -> list[Result]:
    """Call `func(*args, **kwargs)` on Dask workers, each of which is one rank, and return the results of the ranks.

    As `ringtrain.run`, in processes that are there already: the function itself calls `ringtrain.init()`. Ranks on one
    host follow each other and share memory. Each rank takes one thread of its worker, which computes other tasks with
    the others. Nothing of the job is left in the workers after it.

    Args:
        client: of a cluster whose workers are processes: `LocalCluster(processes=True)`, `SLURMCluster`, ...
        func: as for a task of Dask; so are its arguments and results. Futures among the arguments are what they hold.
        num_workers: the number of ranks; None is all workers that the cluster has now.
        resources: take only workers that have so much of each resource, and reserve that, as `client.submit` does.
        env: variables for the ranks, while they are ranks.
        start_timeout: how long the ranks may take to come together, in seconds; None is 120, and 0 waits for ever.

    Returns:
        The results of the ranks, in their order.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, or out of its range.
        StalledError: there were too few workers, or other tasks kept them busy, for `start_timeout`.
        PeerLostError: a worker has died.
        RuntimeError: two workers share one process, a worker is a rank of another job, or the function called
            sys.exit().
        Exception: what the function raised on the rank that failed first. A note says which one it was.
    """
    check_function(func)
    if not isinstance(client, distributed.Client):
        raise TypeError(f"client must be a distributed.Client, not {client!r}")
    wanted = None if num_workers is None else check_num_proc(num_workers, "num_workers")
    timeout_s = check_start_timeout(start_timeout)
    arguments = check_args(args), dict(kwargs or {})
    # A worker that cannot import what a task needs is lost to Dask; what is pickled here fails in the task instead.
    # Futures become values only if Dask itself sees them.
    has_futures = bool(futures_of(arguments))
    call = pickler().dumps((func, None if has_futures else arguments)), arguments if has_futures else ((), {})
    variables = {"RINGTRAIN_START_TIMEOUT_S": str(timeout_s), **check_env(env)}
    job = _Job(client, dict(resources or {}), time.monotonic() + timeout_s if timeout_s else None, timeout_s)
    addresses = job.choose(wanted)
    lock = distributed.MultiLock([f"ringtrain {address}" for address in addresses], client=client)
    if not lock.acquire(timeout=job.left_s()):
        raise StalledError(job.too_late(f"other jobs of ringtrain on the workers {', '.join(addresses)}"))
    try:
        return job.run(addresses, call, variables)
    finally:
        lock.release()


class _Job:
    """The ranks of one call of `run`, as the driver knows them. Runs in the thread of the caller.

    Args:
        deadline: until which the ranks must have come together, or None.
        timeout_s: the same as the user gave it, for messages.
    """

    def __init__(
        self, client: distributed.Client, resources: dict[str, float], deadline: float | None, timeout_s: float
    ) -> None:
        self._client = client
        self._resources = resources
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._name = secrets.token_hex(8)

    def left_s(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def too_late(self, what: str) -> str:
        return f"ringtrain.dask.run has waited {self._timeout_s:g} s (start_timeout) for {what}"

    def choose(self, wanted: int | None) -> list[str]:
        """Returns the addresses of so many workers, those of one host one after the other.

        Raises StalledError, which says what there is.
        """
        while True:
            known = self._living()
            fitting = [
                address
                for address, about in known.items()
                if all(about["resources"].get(name, 0) >= amount for name, amount in self._resources.items())
            ]
            if fitting and len(fitting) >= (wanted or 1):
                fitting.sort(key=lambda address: (get_address_host(address), str(known[address]["name"])))
                return fitting[:wanted]
            if self.left_s() == 0:
                asked = f"{wanted or 1} worker{'s' * ((wanted or 1) > 1)}"
                with_ = "".join(f" with {name}={amount:g}" for name, amount in self._resources.items())
                there = ", ".join(f"{one} {about['resources'] or ''}".strip() for one, about in known.items())
                raise StalledError(
                    f"{self.too_late(asked + with_)}; the cluster has {len(known)}, of which {len(fitting)} fit: "
                    f"{there or 'none'}"
                )
            time.sleep(_LOOK_S)

    def run(self, addresses: list[str], call: tuple[bytes, _Arguments], env: dict[str, str]) -> list[Any]:
        self._require_ringtrain(addresses)
        workers, nodes = self._meet_workers(addresses)
        secret = secrets.token_bytes(32)
        port = self._at_once(engine_process.open_meeting, secret, workers=addresses[:1]).get(addresses[0])
        if not isinstance(port, int):
            raise PeerLostError(f"the Dask worker {addresses[0]} has died, or cannot listen: {port}")
        try:
            place = f"{get_address_host(addresses[0])}:{port}"
            variables = engine_process.variables_of_ranks(nodes, place, env)
            futures = [
                self._submit(rank, worker, _call_on_worker, worker, variables[rank], secret, *call)
                for rank, worker in enumerate(workers)
            ]
            return self._results(futures, workers, port)
        finally:
            self._at_once(engine_process.close_meeting, port, workers=addresses[:1])

    def _require_ringtrain(self, addresses: list[str]) -> None:
        """A worker that lacks it would end its connection to the scheduler when the first task arrives."""
        for address, found in self._at_once(importlib.import_module, "ringtrain.dask", workers=addresses).items():
            if isinstance(found, BaseException):
                raise RuntimeError(
                    f'the Dask worker {address} cannot import ringtrain: install "ringtrain[dask]" in the environment '
                    f"of the workers ({type(found).__name__}: {found})"
                ) from found

    def _meet_workers(self, addresses: list[str]) -> tuple[list[_Worker], list[str]]:
        """Returns who they are, and the node of each. Waits until each has had a thread for a task."""
        futures = [self._submit(rank, _Worker(address, ""), _own_worker) for rank, address in enumerate(addresses)]
        try:
            distributed.wait(futures, timeout=self.left_s())
        except TimeoutError:
            busy = [address for future, address in zip(futures, addresses, strict=True) if not future.done()]
            self._client.cancel(futures, force=True)
            raise StalledError(self.too_late(f"a free thread on the workers {', '.join(busy)}")) from None
        identities, processes = zip(*self._client.gather(futures), strict=True)
        several = len(processes) - len(set(processes))
        if several:
            raise RuntimeError(
                "workers of this cluster are threads of one process, and a rank is a process: start it with "
                "LocalCluster(processes=True)"
            )
        workers = [_Worker(*one) for one in zip(addresses, identities, strict=True)]
        return workers, [process.node for process in processes]

    def _submit(self, rank: int, worker: _Worker, function: Callable[..., Any], *args: Any) -> Any:
        return self._client.submit(
            function,
            *args,
            key=f"ringtrain-{self._name}-{function.__name__.strip('_')}-{rank}",
            workers=[worker.address],
            resources=self._resources or None,
            retries=0,
            pure=False,
        )

    def _at_once(self, function: Callable[..., Any], *args: Any, workers: Iterable[str]) -> dict[str, Any]:
        """Calls it in the event loops of those workers that live, also while their threads are busy.

        Returns by address what it returned or raised.
        """
        living = self._living()
        reached = [address for address in workers if address in living]
        found: dict[str, Any] = {}
        if reached:
            found = self._client.run(function, *args, workers=reached, on_error="return")
        return found

    def _living(self) -> dict[str, Any]:
        """Returns what the scheduler knows of each worker, by address."""
        known: dict[str, Any] = self._client.scheduler_info(n_workers=-1)["workers"]
        return known

    def _results(self, futures: list[Any], workers: list[_Worker], port: int) -> list[Any]:
        """Returns the results of all ranks, or raises the exception of the one that failed first."""
        failures: list[tuple[int, BaseException]] = []
        end, reason = None, ""
        waiting = dict(enumerate(futures))
        try:
            while waiting:
                _wait_for_any(list(waiting.values()))
                ended = [rank for rank, future in waiting.items() if future.done()]
                failures += [(rank, error) for rank in ended if (error := _error_of(waiting.pop(rank))) is not None]
                lost = self._lost(waiting, workers)
                if (failures or lost) and end is None:
                    end = time.monotonic() + _END_S
                    reason = _in_words(failures, lost, workers)
                    self._at_once(engine_process.fail_meeting, port, reason, workers=[workers[0].address])
                if set(waiting) <= set(lost):
                    break
                if end is not None and time.monotonic() > end:
                    self._give_up(waiting, workers, reason)
                    break
            failures += [(rank, PeerLostError(_in_words([], [rank], workers))) for rank in waiting]
        except BaseException:
            reason = "the call of ringtrain.dask.run was interrupted"
            self._at_once(engine_process.fail_meeting, port, reason, workers=[workers[0].address])
            self._give_up(waiting, workers, reason)
            raise
        finally:
            if waiting:
                self._client.cancel(list(waiting.values()), force=True)
        if failures:
            rank, error = engine_process.first_failure(failures)
            raise engine_process.with_note(error, f"on rank {rank}, the Dask worker {workers[rank].address}")
        return list(self._client.gather(futures))

    def _lost(self, waiting: Iterable[int], workers: list[_Worker]) -> list[int]:
        living = self._living()
        return [rank for rank in waiting if workers[rank].address not in living]

    def _give_up(self, waiting: Iterable[int], workers: list[_Worker], reason: str) -> None:
        self._at_once(engine_process.give_up, reason, workers=[workers[rank].address for rank in waiting])


def _own_worker() -> tuple[str, engine_process.Process]:
    return distributed.get_worker().id, engine_process.own_process()


def _call_on_worker(
    worker: _Worker,
    variables: Mapping[str, str],
    secret: bytes,
    call: bytes,
    of_futures: _Arguments,
) -> Any:
    """Dask starts a task again if its worker dies. The other ranks have lost this one then, so it must not begin."""
    if distributed.get_worker().id != worker.identity:
        raise PeerLostError(f"the worker {worker.address} has died, and another process has its address now")
    function, arguments = pickle.loads(call)
    return engine_process.call_as_rank(variables, secret, function, *(arguments or of_futures))


def _wait_for_any(futures: list[Any]) -> None:
    with contextlib.suppress(TimeoutError):
        distributed.wait(futures, timeout=_LOOK_S, return_when="FIRST_COMPLETED")


def _error_of(future: Any) -> BaseException | None:
    if future.status == "finished":
        return None
    if future.status == "error":
        error: BaseException = future.exception()
        return error
    return RuntimeError(f"Dask has cancelled the task {future.key}")


def _in_words(failures: list[tuple[int, BaseException]], lost: list[int], workers: list[_Worker]) -> str:
    """Why the job ends."""
    if lost:
        return f"rank {lost[0]} is lost: the Dask worker {workers[lost[0]].address} has died"
    rank, error = failures[0]
    return f"rank {rank} has failed: {type(error).__name__}: {error}"
