"""The public names of ringtrain. Imported when the first of them is used, see `ringtrain/__init__.py`."""

# ruff: noqa: F403

import os as _os

from ringtrain.arrays.shared_memory import empty as empty
from ringtrain.engine.handles import Handle as Handle, poll as poll, synchronize as synchronize
from ringtrain.engine.process_sets import new_group as new_group
from ringtrain.errors import StepOrderError as StepOrderError
from ringtrain.job import network as _network, session as _session
from ringtrain.ops import *
from ringtrain.ops.names import *
from ringtrain.ops.objects import (
    allgather_object as allgather_object,
    broadcast_object as broadcast_object,
    broadcast_object_fn as broadcast_object_fn,
    broadcast_parameters as broadcast_parameters,
)
from ringtrain.timeline.recording import start_timeline as start_timeline, stop_timeline as stop_timeline


def _set_servers_aside(count: int, settings: dict[str, str]) -> list[int]:
    from ringtrain.kvstore.servers.server_ranks import set_aside  # which a job without servers does not need

    return set_aside(count, settings)


def _count_workers() -> int:
    if "DMLC_PS_ROOT_URI" not in _os.environ:
        return 0
    from ringtrain.kvstore.servers.worker import count_workers_by_environment  # a server serves here, and ends

    return count_workers_by_environment()


def _meet_workers(settings: dict[str, str]) -> _network.Meeting:
    from ringtrain.kvstore.servers.worker import meet_by_environment

    return meet_by_environment(settings)


_session.set_servers_aside_with(_set_servers_aside)
_network.meet_workers_with(_count_workers, _meet_workers)
