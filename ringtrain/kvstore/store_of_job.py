"""What a store knows of its workers and servers: who they are, and what all of them agree on."""

from __future__ import annotations

from typing import Any

from ringtrain.errors import PeerLostError
from ringtrain.kvstore.agreement import require_same
from ringtrain.kvstore.kinds import Kind
from ringtrain.kvstore.servers.membership import Membership
from ringtrain.kvstore.store import KVStore

# Of send_command_to_servers: smaller numbers are MXNet's own.
_FIRST_COMMAND = 16


class StoreOfJob(KVStore):
    """The part of a `ServedStore` that has no values."""

    def __init__(self, kind: Kind, job: Membership) -> None:
        super().__init__(kind)
        self._job = job
        self._number = job.stores
        job.stores += 1

    @property
    def rank(self) -> int:
        return self._job.number

    @property
    def num_workers(self) -> int:
        return self._job.workers

    @property
    def local_rank(self) -> int:
        return self._job.on_this_host().index(self._job.number)

    @property
    def num_local_workers(self) -> int:
        return len(self._job.on_this_host())

    @property
    def is_recovery(self) -> bool:
        return self._job.is_recovery

    def get_num_dead_node(self, node_id: int = 7, timeout: int = 60) -> int:
        """How many processes the scheduler has not heard of for so long, or knows to be dead.

        Args:
            node_id: the sum of 1 for the scheduler, 2 for the servers and 4 for the workers.
            timeout: in seconds.
        """
        try:
            return self._job.seat.count_dead(node_id & 6, float(timeout))
        except PeerLostError:
            return node_id & 1

    def barrier(self) -> None:
        self._require_usable()
        self._job.say_unless_missed("barrier")

    def set_barrier_before_exit(self, barrier_before_exit: bool = True) -> None:
        """Whether this worker waits for the others at its end, for kv_timeout_s at most. With servers in the workers it
        always does, since they need this one.
        """
        self._job.waits_before_exit = barrier_before_exit

    def send_command_to_servers(self, head: int, body: str) -> None:
        """Have the controllers of all servers called with it, and wait until they are done.

        Raises:
            ValueError: a number that is one of MXNet's own, or servers in the workers, which have no controller.
            RemoteError: a controller has failed; with its traceback.
        """
        self._require_usable()
        if head < _FIRST_COMMAND:
            raise ValueError(f"send_command_to_servers: {head} is one of MXNet's own; take {_FIRST_COMMAND} or more")
        if not self._job.has_servers_of_their_own():
            raise ValueError(
                "send_command_to_servers: the servers are threads of the workers; start servers of their own "
                "(DMLC_NUM_SERVER) with kvstore.run_server(controller)"
            )
        self._job.command(head, str(body))

    def _require_usable(self) -> None:
        self._job.require_usable()

    def _require_same(self, call: str, given: dict[str, Any]) -> None:
        require_same(call, self._job.say_unless_missed(self._label(call), given))

    def _label(self, call: str) -> str:
        return f"{call} of store {self._number}"
