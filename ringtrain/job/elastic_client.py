"""The side of a process in an elastic job: joins the rendezvous, and learns the generation that it is in."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import ringtrain._core as _core
from ringtrain import errors
from ringtrain.errors import PeerLostError
from ringtrain.job import sockets
from ringtrain.job.host import addresses_of
from ringtrain.job.rendezvous.columns import of_columns
from ringtrain.job.rendezvous.conversation import Conversation
from ringtrain.job.rendezvous.lasting import GivenUpError, GoneError, LastingConnection
from ringtrain.job.rendezvous.protocol import StrangerError
from ringtrain.job.rendezvous.secret import job_secret
from ringtrain.job.rendezvous.server import Place, connect as connect_to
from ringtrain.job.sockets import UnreachableError
from ringtrain.job.world import SettingsError, World, introduce, node_name
from ringtrain.record.logger import logger

if TYPE_CHECKING:
    from ringtrain.job.rendezvous.generations import Arrival

# --- the connection, which lasts from the first init() of a process to its end ----------------------------------------


_LOOK_S = 0.5
# When the rendezvous has not answered for so long, this process connects again: until it can, or to its end.
_SILENT_S = 3.0
# A process that needs the rendezvous waits so long for it since it was heard last. As long as ssh waits for a host.
_PATIENCE_S = 30.0
# The last word of a process, which others would else have to guess, has so long to arrive.
_FAREWELL_S = 5.0
# How long the network may take to notice a loss by itself.
_NETWORK_S = 0.2


class Seat(NamedTuple):
    """The place of this process in a generation."""

    generation: int
    rank: int
    size: int
    slot: int  # among the processes of its host, some of which may be lost
    has_newcomers: bool  # some of its ranks were not in the generation before
    may_be_cut: bool  # it has hosts that have never worked together, or have just failed to
    may_have_lost_state: bool  # there were commits, and no rank has the state from training
    seconds_lost: float  # between all generations until now


class AgainError(Exception):
    """Another process of the generation has left it, so this one has to come for the next."""


class OverError(Exception):
    """The job has come to its end without this process."""


class ElasticClient:
    """One in a process. The methods are for the thread that calls init(), unless they say otherwise.

    Args:
        member: the name of this process among all of the job.
        timeout_s: for the rendezvous to be there; 0 waits for ever.
        on_lost: called when another process of this one's generation is gone and this one has not come for the next
            within a moment. The network mostly knows it earlier, and why; not of a host that is silent.
        on_awaited: called when the others have waited so many seconds for this process to train.
    """

    def __init__(
        self,
        place: Place,
        secret: bytes,
        member: str,
        timeout_s: float,
        on_lost: Callable[[str], None],
        on_awaited: Callable[[float], None],
    ):
        self._talk = LastingConnection(connect_to(place, place.ports, secret, timeout_s), secret, _SILENT_S)
        self._place = place
        self.secret = secret
        self._on_lost = on_lost
        self._on_awaited = on_awaited
        self._reporting = threading.Lock()
        self._report: threading.Timer | None = None
        self.own_address = self._talk.own_address()
        self._member = member
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._has_news = False
        self._seconds_lost = 0.0
        self._has_told_of_commit = False
        os.register_at_fork(after_in_child=self._talk.forget_in_child)  # else its death would not be noticed
        self._listener = threading.Thread(target=self._listen, name="ringtrain rendezvous client", daemon=True)
        self._listener.start()

    def come(self, arrival: Arrival) -> Seat:
        """Wait for the next generation.

        Raises:
            OverError: there is none any more.
            PeerLostError: the rendezvous is gone.
            RingtrainError: the job has failed.
        """
        said_in = None
        while True:
            if said_in is not self._talk.conversation:
                arrival = arrival._replace(has_state=self._has_told_of_commit)
                said_in = self._send({"kind": "come", "member": self._member, "arrival": arrival})
            answer = self._answer()
            if answer["kind"] == "world":  # what else there is belongs to the generation before
                return Seat(**{name: answer[name] for name in Seat._fields})

    def exchange(self, generation: int, value: Any) -> list[Any]:
        """Returns what all ranks of the generation say, by rank. Raises AgainError, and as `come`."""
        self._send({"kind": "say", "generation": generation, "value": value})
        answer = self._answer()
        if answer["kind"] in ("again", "anew"):
            raise AgainError
        return of_columns(answer["values"])

    def round_trip_s(self) -> float:
        """The shortest round trip to the rendezvous."""
        return self._talk.round_trip_s()

    def has_news(self) -> bool:
        """Whether processes wait for the next generation, or the hosts have changed. Any thread."""
        return self._has_news

    def seconds_lost(self) -> float:
        """In which ranks had been lost and the next generation had not begun to train. Any thread."""
        return self._seconds_lost

    def joined(self, generation: int) -> None:
        """This process is in the generation: its init() returns."""
        self._send({"kind": "joined", "generation": generation})

    def ready(self, generation: int, commits: int) -> None:
        """This process waits for the others of the generation to train, with a state that has so many commits."""
        self._send({"kind": "ready", "generation": generation, "commits": commits, "is_asking": False})

    def verdict(self, generation: int, commits: int) -> int:
        """As `ready`, where the generation may have lost the state. Returns how many commits the newest one has.

        Raises AgainError, and RingtrainError where the training must not begin anew.
        """
        self._send({"kind": "ready", "generation": generation, "commits": commits, "is_asking": True})
        answer = self._answer()
        if answer["kind"] in ("again", "anew"):
            raise AgainError
        return int(answer["commits"])

    def committed(self) -> None:
        """This process has the state from training. Only the first call says so."""
        if not self._has_told_of_commit:
            self._has_told_of_commit = True
            self._send({"kind": "committed"})

    def fail(self, text: str) -> None:
        """The script of this process ends of an exception."""
        self._say_at_last({"kind": "failed", "text": text})

    def done(self) -> None:
        """The script of this process has ended well."""
        self._say_at_last({"kind": "done"})

    def _send(self, message: dict[str, Any]) -> Conversation:
        return self._talk.send(message)

    def _say_at_last(self, message: dict[str, Any]) -> None:
        self._send(message)
        self._talk.await_sent(_FAREWELL_S)

    def _answer(self) -> dict[str, Any]:
        while True:
            try:
                answer = self._answers.get(timeout=_LOOK_S)  # Ctrl-C interrupts it
            except queue.Empty:
                if self._talk.broken_for_s() > _PATIENCE_S:
                    raise PeerLostError(self._gone(f"it has not answered for {_PATIENCE_S:g} s")) from None
                continue
            if answer["kind"] == "over":
                raise OverError
            if answer["kind"] == "gone":
                self._answers.put(answer)  # for ever
                raise PeerLostError(answer["text"])
            if answer["kind"] == "failed":
                self._answers.put(answer)  # for ever
                raise errors.RingtrainError(answer["text"])
            return answer

    def _listen(self) -> None:
        while True:
            try:
                for message in self._talk.hear():
                    self._take(message)
            except GivenUpError:
                self._answers.put({"kind": "anew"})
                self._report_soon("this process was cut off from the rendezvous, which has given it up")
            except (OSError, StrangerError) as error:
                reason = "it has ended, or its host was started again" if isinstance(error, GoneError) else error
                self._answers.put({"kind": "gone", "text": self._gone(reason)})
                return

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "ping":
            self._send({"kind": "pong"})
        elif kind == "beat":  # TCP tells the rendezvous whether it arrives, which is all that a beat is for
            pass
        elif kind == "news":
            self._has_news = True
        elif kind == "begun":
            self._seconds_lost = message["seconds_lost"]
        elif kind == "awaited":
            self._on_awaited(message["seconds"])
        elif kind == "lost":
            self._report_soon(message["text"])
        else:
            if kind == "world":
                self._forget_lost()
                self._seconds_lost = message["seconds_lost"]
            self._has_news = self._has_news and kind != "world"
            self._answers.put(message)

    def _report_soon(self, text: str) -> None:
        with self._reporting:
            if self._report is None:
                self._report = threading.Timer(_NETWORK_S, self._report_lost, [text])
                self._report.daemon = True
                self._report.start()

    def _report_lost(self, text: str) -> None:
        with self._reporting:
            if self._report is not None:
                self._on_lost(text)

    def _forget_lost(self) -> None:
        """It was of the generation before. From here on nothing is reported to the next one."""
        with self._reporting:
            if self._report is not None:
                self._report.cancel()
                self._report = None

    def _gone(self, reason: object) -> str:
        return f"the launcher of this job, whose rendezvous is at {self._place}, is gone: {reason}"


# --- this process -----------------------------------------------------------------------------------------------------


SWITCH = "RINGTRAIN_ELASTIC"
MEMBER_VARIABLE = "RINGTRAIN_MEMBER"

_client: ElasticClient | None = None
_seat: Seat | None = None
_commits = 0


def is_elastic() -> bool:
    """Whether this process belongs to a job whose processes come and go."""
    return os.environ.get(SWITCH, "0") not in ("", "0")


def connect(
    comm: Any, settings: dict[str, str], read_tuned: Callable[[], dict[str, str]]
) -> tuple[World, dict[str, str]]:
    """The world of the generation that is formed next. It may take as long as others are at work in the one before.

    Raises:
        ValueError: what an elastic job cannot do.
        RuntimeError: no rendezvous is named, or MPI has been initialised in this process.
        StalledError, PeerLostError: the rendezvous cannot be reached, or not any more.
        RingtrainError: the job cannot go on, or not with this host.
        SystemExit: the job has come to its end.
    """
    from ringtrain.job.rendezvous.generations import Arrival  # slow, and only elastic jobs need it

    global _seat
    _check(comm, settings)
    settings["network"] = "sockets"  # the same for those that ringrun has told so and those that come from outside
    client = _connected_client(settings)
    hosts = addresses_of(settings["socket_interfaces"]) or [client.own_address]
    while True:
        must_keep_state = settings["on_state_lost"] == "fail"
        patience_s = float(settings["stall_shutdown_time_s"])
        arrival = Arrival(node_name(), os.getpid(), _commits, patience_s, must_keep_state)
        try:
            seat = client.come(arrival)
            connected = _connect(client, seat, hosts, settings, read_tuned)
        except AgainError:
            continue
        except OverError:
            logger.info("the job has come to its end, so this process ends, too")
            raise SystemExit(0) from None
        except (SettingsError, UnreachableError) as error:
            if seat.rank in error.ranks:
                raise
            continue  # without those
        _seat = seat
        return connected


def joined() -> None:
    """The init() of this process returns."""
    if _client is not None and _seat is not None:
        _client.joined(_seat.generation)


def ready() -> None:
    """This process waits for the others of its generation to train.

    Raises:
        PeerLostError: another one was lost meanwhile.
        RingtrainError: no rank has the state, and option on_state_lost says that the job ends then.
    """
    if _client is None or _seat is None:
        return
    if not _seat.may_have_lost_state:
        _client.ready(_seat.generation, _commits)
        return
    try:
        commits = _client.verdict(_seat.generation, _commits)
    except AgainError:
        raise PeerLostError("another rank was lost before the training began") from None
    if _seat.rank == 0:
        _warn_of_lost_state(commits)


def set_commits(commits: int, *, are_read: bool = False) -> None:
    """Tell how new the state of this process is: the process with the newest one is rank 0 of the next generation.

    `are_read`: the state comes from a file, not from training.
    """
    global _commits
    _commits = commits
    if commits > 0 and not are_read and _client is not None:
        _client.committed()


def has_news() -> bool:
    """Whether this rank knows that others wait for the next generation, or that the hosts have changed."""
    return _client is not None and _client.has_news()


def seconds_lost() -> float:
    """In which ranks had been lost and the next generation had not begun to train; 0 in a job that is not elastic."""
    return 0.0 if _client is None else _client.seconds_lost()


def seat() -> Seat | None:
    """The place in the generation that this process is in or was in last; None in a job that is not elastic."""
    return _seat


def leave(failure: str) -> None:
    """The script ends: well, or by an exception, `failure`."""
    if _client is None:
        return
    if failure:
        _client.fail(failure)
    else:
        _client.done()


def _check(comm: Any, settings: dict[str, str]) -> None:
    if comm:
        raise ValueError("init(comm=...): an elastic job has all ranks that live; make a process set of some")
    if settings["network"] == "mpi":
        raise ValueError("network=mpi: elastic jobs talk over sockets, since no MPI lets a job go on without a rank")
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_initialized() and MPI.COMM_WORLD.Get_size() > 1:
        raise RuntimeError(
            "this process has initialised MPI, whose launcher ends all ranks when one dies: an elastic job must not "
            "import mpi4py.MPI, or do it with mpi4py.rc.initialize = False"
        )


def _connected_client(settings: dict[str, str]) -> ElasticClient:
    global _client
    if _client is None:
        place = sockets.named_place()
        if place is None:
            raise RuntimeError(f"{SWITCH} is set, but not {sockets.PLACE_VARIABLE}: start with ringrun --min-np")
        member = os.environ.get(MEMBER_VARIABLE) or f"{socket.gethostname()}/{os.getpid()}-{os.urandom(4).hex()}"
        timeout_s = float(settings["start_timeout_s"])
        _client = ElasticClient(place, job_secret(str(place)), member, timeout_s, _core.report_loss, _warn_of_waiting)
    return _client


def _warn_of_waiting(seconds: float) -> None:
    logger.warning(
        "all other ranks have waited %.0f s for this one, which is between init() and the training: do what takes long "
        "before init()",
        seconds,
    )


def _warn_of_lost_state(commits: int) -> None:
    if commits > 0:
        logger.warning("no rank had the state from training: training goes on from a file, at commit %d", commits)
    else:
        logger.warning(
            "no rank had the state: training begins at step 0. Use state.save_to() to go on from a file, or "
            "on_state_lost=fail to end the job"
        )


def _connect(
    client: ElasticClient,
    seat: Seat,
    hosts: list[str],
    settings: dict[str, str],
    read_tuned: Callable[[], dict[str, str]],
) -> tuple[World, dict[str, str]]:
    def exchange(value: Any) -> list[Any]:
        return client.exchange(seat.generation, value)

    if seat.size > 1:
        secret, may_be_cut = client.secret, seat.may_be_cut
        return sockets.connect_by(
            *(exchange, seat.rank, hosts, secret, settings, read_tuned, seat.slot, may_be_cut),
            round_trip_s=client.round_trip_s(),
        )
    world, tuned, _ = introduce(exchange, seat.rank, node_name(), settings, read_tuned, slot=seat.slot)
    return world, tuned
