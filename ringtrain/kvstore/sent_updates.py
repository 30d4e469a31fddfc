"""An optimizer or updater in Python that runs on servers: what they are sent, and what the worker keeps of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringtrain.kvstore.optimizers import Updater
from ringtrain.kvstore.states import Arrays


class SentUpdater(Updater):
    """The worker's. `tell` brings the servers other numbers, on all workers alike.

    Args:
        updater: of `set_optimizer`, or None.
        function: of `set_updater`, where there is no updater.
    """

    is_built_in = True

    def __init__(
        self,
        updater: Updater | None,
        function: Callable[[Any, Any, Any], object] | None,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__()
        self._updater = updater
        self.for_servers = UpdaterOfServers(updater, function)
        self._tell = tell

    def configuration(self) -> dict[str, Any]:
        return {} if self._updater is None else self._updater.configuration()

    def change(self, **numbers: Any) -> None:
        if self._updater is None:
            raise ValueError("a function that set_updater has set has no numbers to change")
        self._updater.change(**numbers)
        self._tell(numbers)

    def replaced(self, key: str, stored: Any) -> None:
        """The servers have given their masters the value themselves."""

    def states(self) -> Arrays:
        raise ValueError(
            "what an optimizer in Python remembers is on the servers, and is not brought back from there; in a "
            '"dist_sync" store without kv_python_updaters every worker has it'
        )

    def load_states(self, states: Arrays) -> None:
        self.states()

    def _create_state(self, key: str, weight: Any) -> Any:
        raise AssertionError("values are updated on the servers")

    def _update(self, key: str, weight: Any, grad: Any, kept: Any) -> None:
        raise AssertionError("values are updated on the servers")


class UpdaterOfServers:
    """What is pickled."""

    def __init__(self, updater: Updater | None, function: Callable[[Any, Any, Any], object] | None) -> None:
        self._updater = updater
        self._function = function

    def __call__(self, key: Any, grad: Any, stored: Any) -> None:
        if self._updater is not None:
            self._updater(str(key), grad, stored)
        elif self._function is not None:
            self._function(key, grad, stored)

    def change(self, **numbers: Any) -> None:
        if self._updater is not None:
            self._updater.change(**numbers)
