"""A BackendConfig of Ray Train: the workers of a `DataParallelTrainer` are ranks. Needs `pip install "ray[train]"`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from ringtrain.job import engine_process, session
from ringtrain.runner.function import check_env, check_start_timeout


@dataclass
class RingtrainConfig(BackendConfig):
    """Makes the workers of Ray Train ranks: `DataParallelTrainer(train, backend_config=RingtrainConfig(), ...)`.

    The function calls `ringtrain.init()` itself; reports, checkpoints and datasets are those of Ray Train, which also
    starts all workers again after a failure, as its FailureConfig says.

    Args:
        start_timeout_s: how long the ranks may take to come to `init()`, in seconds; 0 waits for ever.
        env: variables for the ranks.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, or out of its range.
    """

    start_timeout_s: float = 120.0
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start_timeout_s = check_start_timeout(self.start_timeout_s)
        self.env = check_env(self.env)

    @property
    def backend_cls(self) -> type[Backend]:
        return _RingtrainBackend

    @property
    def framework(self) -> None:
        return None

    def to_dict(self) -> dict[str, Any]:
        return {"start_timeout_s": self.start_timeout_s}


class _RingtrainBackend(Backend):
    """Called by Ray Train, in a process of its own, for each group of workers that it starts."""

    # As each rank takes the GPU of its local_rank().
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: RingtrainConfig) -> None:
        secret = secrets.token_bytes(32)
        nodes = [process.node for process in worker_group.execute(engine_process.own_process)]
        place = worker_group.execute_single(0, _open_meeting, secret)
        timeout = {"RINGTRAIN_START_TIMEOUT_S": f"{backend_config.start_timeout_s:g}"}
        variables = engine_process.variables_of_ranks(nodes, place, {**timeout, **backend_config.env})
        for rank, of_rank in enumerate(variables):
            worker_group.execute_single(rank, engine_process.become_rank, of_rank, secret)

    def on_shutdown(self, worker_group: Any, backend_config: RingtrainConfig) -> None:
        worker_group.execute(_leave)


def _open_meeting(secret: bytes) -> str:
    return f"{ray.util.get_node_ip_address()}:{engine_process.open_meeting(secret)}"


def _leave() -> None:
    """The worker ends soon, and with it the meeting."""
    session.shutdown()
