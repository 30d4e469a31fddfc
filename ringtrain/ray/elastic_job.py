"""A job whose actors come and go: the starter of elastic jobs, on nodes of Ray instead of hosts."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ringtrain.errors import RingtrainError
from ringtrain.job import elastic_client
from ringtrain.job.rendezvous.listener import bound
from ringtrain.job.sockets import PLACE_VARIABLE
from ringtrain.ray.actors import (
    Call,
    Left,
    Resources,
    death_in_words,
    free_by_node,
    free_in_words,
    new_actor,
    variables_of_all,
)
from ringtrain.runner.function import check_elastic
from ringtrain.runner.hosts import Host
from ringtrain.runner.job import ElasticTerms
from ringtrain.runner.start.agent import REPORT
from ringtrain.runner.start.elastic_starter import Driver, starter_of
from ringtrain.runner.start.links import Link, Share
from ringtrain.runner.start.placement import DiscoveryError, Placement, call_each_second

_logger = logging.getLogger("ringtrain.ray")

_LOOK_S = 0.5
_GRACE_S = 1.0
_KILLED = 128 + signal.SIGKILL

# Of an actor. The second one is that of a node which was lost before the actor began.
_LOSSES = (RayActorError, ActorUnschedulableError)


def terms_of(least: Any, most: Any, reset_limit: Any, cooldown_range: Any, timeout_s: Any) -> ElasticTerms:
    """Raises TypeError and ValueError."""
    asked = check_elastic(1, least, most, None, None, timeout_s, reset_limit, cooldown_range)
    if most is not None and most < least:
        raise ValueError(f"max_workers={most} must be at least min_workers={least}")
    cooldown_s = None if cooldown_range is None else (float(cooldown_range[0]), float(cooldown_range[1]))
    return ElasticTerms(least, most, timeout_s=float(timeout_s), reset_limit=asked.reset_limit, cooldown_s=cooldown_s)


class Discovery(Protocol):
    """An object of the user that knows the nodes, as Horovod's `RayHostDiscovery`."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int]: ...


class ElasticJob:
    """Each `run` is a job. One thread."""

    def __init__(
        self,
        settings: Any,
        terms: ElasticTerms,
        resources: Resources,
        executable: tuple[type | None, Sequence[Any], Mapping[str, Any]],
        env: Mapping[str, str],
        discovery: Discovery | None,
    ):
        self._settings = settings
        self._terms = terms
        self._resources = resources
        self._executable = executable
        self._env = dict(env)
        self._discovery = discovery

    def start(self) -> None:
        """Waits until the nodes have room for the least number of ranks. Raises TimeoutError.

        A placement group tells an autoscaler what is missing. It is removed again: the actors are placed by themselves.
        """
        nodes = Nodes(self._resources, self._discovery)
        timeout_s = self._settings.placement_group_timeout_s
        end = time.monotonic() + timeout_s
        group = placement_group([self._resources.bundle()] * self._terms.least)
        try:
            has_room = group.wait(timeout_s)
        finally:
            remove_placement_group(group)
        while not has_room or sum(host.slots for host in nodes.look({})) < self._terms.least:
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"RayExecutor has waited {timeout_s:g} s (placement_group_timeout_s) for {self._terms.least} "
                    f"workers (min_workers) with {self._resources} each; free are {free_in_words()}. Use fewer "
                    "workers, or a cluster that grows"
                )
            time.sleep(_LOOK_S)

    def run(self, function: Callable[[Any], Any]) -> list[Any]:
        """Raises RuntimeError, or what the function raised, where the job has failed."""
        secret, listener = secrets.token_bytes(32), bound("", 0)
        variables = {
            **variables_of_all(self._settings),
            elastic_client.SWITCH: "1",
            PLACE_VARIABLE: f"{ray.util.get_node_ip_address()}:{listener.getsockname()[1]}",
            **self._env,
        }
        call = Call(function, *self._executable)
        placement = ActorPlacement(Nodes(self._resources, self._discovery), call, variables, secret)
        driver = Driver(_logger.warning, "min_workers")
        starter = None
        try:
            starter = starter_of(self._terms.least, self._terms, listener, secret, placement, _GRACE_S, driver)
            code = starter.run()
        finally:
            placement.close()
            if starter is not None:
                starter.close()
        if code != 0:
            raise placement.failure() or RuntimeError("\n".join(driver.last_lines))
        return placement.results_of(driver.generation)

    def close(self) -> None:
        """Nothing runs between two calls of `run`."""


# --- nodes ------------------------------------------------------------------------------------------------------------


class Nodes:
    """The nodes of the cluster, and how many ranks each has room for. Any thread.

    Ray tells of free resources late. So a node gets more slots only when two looks in a row have seen room for them,
    and loses them with the node alone.
    """

    def __init__(self, resources: Resources, discovery: Discovery | None):
        self.resources = resources
        self._discovery = discovery
        self._slots: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._ids: dict[str, str] = {}  # by the name of a node

    def id_of(self, name: str) -> str:
        return self._ids[name]

    def look(self, running: Mapping[str, int]) -> list[Host]:
        """Returns the nodes with slots. `running`: the actors of this job on each, by its name."""
        living = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        if self._discovery is not None:
            return self._named_by_user(living)
        free = free_by_node()
        slots = {}
        for node, address in living.items():
            name = f"{address} (node {node[:6]})"
            self._ids[name] = node
            room = running.get(name, 0) + self.resources.slots(free.get(node, {}))
            certain = min(room, self._seen.get(name, room))
            self._seen[name] = room
            slots[name] = max(certain, self._slots.get(name, 0))
        self._slots = slots
        return [Host(name, count) for name, count in slots.items() if count > 0]

    def _named_by_user(self, living: Mapping[str, str]) -> list[Host]:
        assert self._discovery is not None
        try:
            found = dict(self._discovery.find_available_hosts_and_slots())
        except Exception as error:
            raise DiscoveryError(f"settings.discovery has failed: {type(error).__name__}: {error}") from error
        by_address = {address: node for node, address in living.items()}
        self._ids.update({address: by_address[address] for address in found if address in by_address})
        return [Host(address, int(slots)) for address, slots in found.items() if address in by_address and slots > 0]


# --- actors on them ---------------------------------------------------------------------------------------------------


class ActorPlacement(Placement):
    """Slots on the nodes of a cluster of Ray. A process is an actor, and the Link of a node makes and kills those."""

    def __init__(self, nodes: Nodes, call: Call, variables: Mapping[str, str], secret: bytes):
        self._nodes = nodes
        self._stored = ray.put(call)
        self._variables = dict(variables)
        self._secret = secret
        self._has_ended = threading.Event()
        self._lock = threading.Lock()
        self._links: list[_ActorLink] = []
        self._results: dict[int, Any] = {}  # by number of the process
        self._failures: list[tuple[int, Exception]] = []

    def hosts(self) -> list[Host]:
        running: dict[str, int] = {}
        with self._lock:
            for link in self._links:
                running[link.host] = running.get(link.host, 0) + len(link.actors)
        return self._nodes.look(running)

    def open_agent(self, host: str) -> Link:
        link = _ActorLink(Share(host, 0, 0, True), self._create, self._note_end)
        with self._lock:
            self._links.append(link)
        return link

    @property
    def may_grow(self) -> bool:
        """Whether other nodes may come. They would not help a function that raises an exception of its own."""
        return self.failure() is None

    def watch(self, deliver: Callable[[list[Host] | DiscoveryError], None]) -> None:
        call_each_second(self.hosts, deliver, self._has_ended)

    def close(self) -> None:
        self._has_ended.set()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()

    def failure(self) -> Exception | None:
        """Returns the first exception of the function that is not a consequence of another rank's failure."""
        with self._lock:
            own = [one for one in self._failures if not isinstance(one[1], (RingtrainError, *_LOSSES))]
        return own[0][1] if own else None

    def results_of(self, generation: Sequence[int]) -> list[Any]:
        with self._lock:
            numbers = [number for number in generation if number in self._results] or sorted(self._results)
            results = [self._results[number] for number in numbers]
        if not results:
            raise RuntimeError("no process of the elastic job ended with a result")
        return results

    def _create(self, host: str, number: int, places: Mapping[str, str]) -> tuple[Any, Any]:
        """Returns an actor on this node, and the reference of its result."""
        where = NodeAffinitySchedulingStrategy(self._nodes.id_of(host), soft=False)
        actor = new_actor(f"process {number}", self._nodes.resources, where)
        variables = {**self._variables, **places, elastic_client.MEMBER_VARIABLE: f"{host}/{number}"}
        return actor, actor.take_part.remote(variables, self._secret, self._stored)

    def _note_end(self, number: int, outcome: Any) -> int:
        """Keeps a result or an exception. Returns the exit code that says the same. Any thread."""
        with self._lock:
            if not isinstance(outcome, Exception):
                if not isinstance(outcome, Left):
                    self._results[number] = outcome
                return 0
            self._failures.append((number, outcome))
        if isinstance(outcome, _LOSSES):
            _logger.info("process %d: %s", number, death_in_words(outcome))
            return _KILLED
        cause = outcome.cause if isinstance(outcome, RayTaskError) else outcome
        _logger.warning("process %d has failed: %s: %s", number, type(cause).__name__, cause)
        return 1


class _ActorLink(Link):
    """The link to a node. Orders are carried out in this thread; reports come from a thread of Ray, by a pipe."""

    def __init__(
        self,
        share: Share,
        create: Callable[[str, int, Mapping[str, str]], tuple[Any, Any]],
        note_end: Callable[[int, Any], int],
    ):
        super().__init__(share, open_streams=1)
        self.host = share.host
        self.actors: dict[int, Any] = {}  # that run, by number
        self._create = create
        self._note_end = note_end
        self._reading, self._writing = os.pipe()
        self._lock = threading.Lock()  # of actors and the pipe
        self._is_closed = False

    def order(self, order: Mapping[str, Any]) -> None:
        if "start" in order:
            self._start(order["start"], order.get("horovod", {}))
        elif "finish" in order:
            self._end_reports()
        else:  # a signal that ends a process, or its end
            with self._lock:
                those = [actor for number, actor in self.actors.items() if order.get("rank", number) == number]
            for actor in those:
                ray.kill(actor)
            if "end" in order and "rank" not in order:
                self._end_reports()

    def streams(self) -> list[tuple[int, Callable[[bytes], None]]]:
        return [(self._reading, self._take)]

    def end_in_words(self) -> str:
        return f"the job has ended on {self.host}"

    def close(self) -> None:
        self._end_reports()
        with self._lock:
            actors, self.actors = list(self.actors.values()), {}
            if not self._is_closed:
                self._is_closed = True
                os.close(self._reading)
        for actor in actors:
            ray.kill(actor)

    def _start(self, number: int, places: Mapping[str, str]) -> None:
        actor, result = self._create(self.host, number, places)
        with self._lock:
            self.actors[number] = actor
        result.future().add_done_callback(lambda done: self._report_end(number, done))

    def _report_end(self, number: int, done: Any) -> None:
        """A thread of Ray, which must not call Ray."""
        code = self._note_end(number, done.exception() or done.result())
        with self._lock:
            if self._writing >= 0:
                os.write(self._writing, REPORT + json.dumps({"ended": [number, code]}).encode() + b"\n")

    def _end_reports(self) -> None:
        with self._lock:
            if self._writing >= 0:
                os.close(self._writing)
                self._writing = -1

    def _take(self, data: bytes) -> None:
        for line in self._output.feed(data) if data else self._output.close():
            self._take_line(line, 2)
            number, _ = json.loads(line.removeprefix(REPORT))["ended"]
            with self._lock:
                actor = self.actors.pop(number, None)
            if actor is not None:
                ray.kill(actor)
