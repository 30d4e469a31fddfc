"""The cost of n processes for the one where they meet: `python -m measure.scale_rendezvous 1024`, in test/.

The servers of ringtrain run in a process of their own. The connections of all simulated processes are in this one, and
what they say is what introduce() and the clients say, with other names. Rank 0 decodes its answers, the others do not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from ringtrain.bench.report import Table, lines_of
from ringtrain.job import gpus, world
from ringtrain.job.rendezvous import elastic_server, generations, listener, server
from ringtrain.job.rendezvous.columns import of_columns
from ringtrain.job.rendezvous.listener import bound
from ringtrain.job.rendezvous.protocol import MOST_BYTES, Connection, _unpacked, packed
from ringtrain.kvstore.servers import membership, scheduler
from ringtrain.options import table

_SECRET = b"of this measurement alone"
_LONGEST_S = 600.0
_RANKS_A_HOST = 8
_HOST, _MARK, _PORT = "node00000.cluster.example.org", "0123abcd", 59_999


# As many as seconds pass: they are counted apart, the first ones in a row of their own.
_TIMED = b'{"kind": "beat"}', b'{"kind": "ping"}'


class Row(NamedTuple):
    what: str
    seconds: float  # of a processor, at the busiest process: the server, or rank 0, which reads what all have said
    sent_bytes: int  # by the server, to all
    messages: int  # of the server, to and from all
    encoded: int  # messages, by the server
    memory_mb: float  # that the server has had until then, at most


def measure(ranks: int) -> list[Row]:
    return [*_static(ranks), *_elastic(ranks), *_scheduler(ranks)]


# --- what they do -----------------------------------------------------------------------------------------------------


def _static(ranks: int) -> list[Row]:
    with _serving("static", ranks) as (serving, crowd):
        for rank, one in enumerate(crowd.connections):
            crowd.tell(one, server.Hello("world", rank, ranks, f"host{rank}", rank, _LONGEST_S, ""))
        own_s = _introduce(crowd, lambda value: {"value": value}, crowd.hear)
        crowd.tell_all(None)
        return [serving.row(f"static rendezvous of {ranks} ranks, init()", crowd, own_s)]


def _elastic(ranks: int) -> list[Row]:
    rows: list[Row] = []
    with _serving("elastic", ranks) as (serving, crowd):
        for what in (f"elastic generation of {ranks} ranks", "a death, and the generation after it"):
            if rows:
                crowd.lose_last()
                crowd.hear("lost")
            for number, one in enumerate(crowd.connections):
                arrival = generations.Arrival(f"host{number // _RANKS_A_HOST}", number, 0, 600.0)
                crowd.tell(one, {"kind": "come", "member": f"host/{number}", "arrival": arrival})
            generation = crowd.hear("world")["generation"]

            def say(value: Any, generation: int = generation) -> dict[str, Any]:
                return {"kind": "say", "generation": generation, "value": value}

            own_s = _introduce(crowd, say, lambda: crowd.hear("heard"))
            crowd.tell_all({"kind": "joined", "generation": generation})
            rows.append(serving.row(what, crowd, own_s))
        crowd.beats, began_s = 0, time.monotonic()
        while crowd.beats < 4 * len(crowd.connections):
            crowd.hear("beat")
        seconds = time.monotonic() - began_s
        row = serving.row("its beats, each second", crowd, 0.0, per=seconds)
        rows.append(row._replace(messages=int(crowd.beats / seconds)))
    return rows


def _scheduler(ranks: int) -> list[Row]:
    with _serving("scheduler", ranks) as (serving, crowd):
        for number, one in enumerate(crowd.connections):
            about = {"host": f"node{number:05d}", "pid": number, "attempt": 0, "patience_s": _LONGEST_S}
            about |= {"heartbeat_s": 5.0, "size": None, "task": number, "addresses": [["10.1.2.3", number]]}
            crowd.tell(one, {"kind": "come", "id": 1, "role": "worker", **about})
        crowd.hear("world")
        rows = [serving.row(f"meeting of {ranks} workers at the scheduler", crowd, 0.0)]
        about = {"label": "init", "joins_only": False, "patience_s": 0.0, "warning_s": 0.0}

        def say(value: Any) -> dict[str, Any]:
            return {"kind": "say", "id": 2, "value": value, **about}

        own_s = _introduce(crowd, say, lambda: crowd.hear("said", then="answer"))
        rows.append(serving.row("their init()", crowd, own_s))
        crowd.tell_all({"kind": "beat"})
        crowd.hear("beat")
        row = serving.row("a beat of each", crowd, 0.0)
        rows.append(row._replace(messages=2 * ranks))
    return rows


def _introduce(crowd: _Crowd, message: Callable[[Any], Any], hear: Callable[[], Any]) -> float:
    """Returns the processor time of rank 0 in introduce()."""
    others_s = 0.0

    def exchange(value: Any) -> list[Any]:
        nonlocal others_s
        began_s = time.process_time()
        first, *others = crowd.connections
        crowd.tell(first, message(value))
        text = json.dumps(message(value))
        for rank, one in enumerate(others, 1):
            crowd.tell_text(one, _as_of_rank(text, rank))
        others_s += time.process_time() - began_s
        began_s, crowd.decoding_s = time.process_time(), 0.0
        answer = hear()
        others_s += time.process_time() - began_s - crowd.decoding_s
        return of_columns(answer["values"])

    settings = table.resolve({})
    own = ([["10.1.2.3", _PORT]], 0.000123)
    began_s = time.process_time()
    with (
        patch.object(gpus, "choose", lambda *_: gpus.Choice(0, _MARK, 8, False)),
        patch.object(socket, "gethostname", lambda: _HOST),
    ):
        world.introduce(exchange, 0, world.node_name(), settings, lambda: {}, own)
    return time.process_time() - began_s - others_s


def _as_of_rank(text: str, rank: int) -> str:
    node = rank // _RANKS_A_HOST
    for old, new in (
        (_HOST, f"node{node:05d}.cluster.example.org"),
        (_MARK, secrets.token_hex(4)),
        (str(_PORT), str(30_000 + secrets.randbelow(30_000))),
        (f" {os.getpid()}", f" {100_000 + secrets.randbelow(1_000_000)}"),
    ):
        text = text.replace(old, new)
    return text


# --- all simulated processes ------------------------------------------------------------------------------------------


class _Crowd:
    def __init__(self, port: int, size: int):
        self.sent_bytes = self.messages = self.beats = 0  # of the server, and to it
        self.decoding_s = 0.0
        self.connections: list[Connection] = []
        place = server.Place("127.0.0.1", [port])
        for _ in range(size):
            self.connections.append(server.connect(place, [port], _SECRET, _LONGEST_S))

    def tell(self, one: Connection, message: Any) -> None:
        self.messages += 1
        one.send(message, time.monotonic() + _LONGEST_S)

    def tell_text(self, one: Connection, text: str) -> None:
        self.messages += 1
        one._send(len(text).to_bytes(8, "big") + text.encode(), time.monotonic() + _LONGEST_S)

    def tell_all(self, message: Any) -> None:
        for one in self.connections:
            self.tell(one, message)

    def lose_last(self) -> None:
        self.connections.pop().close()

    def hear(self, kind: str = "", then: str = "") -> Any:
        """Returns the message of this kind that rank 0 gets, once all have one. Skips beats, news and the like.

        `then`: one that follows it.
        """
        first = None
        for one in self.connections:
            while True:
                data = self._frame(one)
                if one is self.connections[0]:
                    began_s = time.process_time()
                    first = _decoded(data)
                    self.decoding_s += time.process_time() - began_s
                    if not kind or first["kind"] == kind:
                        break
                elif not kind or len(data) > 1000 or _decoded(data)["kind"] == kind:
                    break
        if then:
            self.hear(then)
        return first

    def _frame(self, one: Connection) -> bytes:
        end = time.monotonic() + _LONGEST_S
        head = one._read(8, end)
        data = one._read(int.from_bytes(head[1:], "big"), end)
        if data in _TIMED:
            self.beats += data == _TIMED[0]
        else:
            self.messages += 1
            self.sent_bytes += 8 + len(data)
        return head + data


def _decoded(data: bytes) -> Any:
    return _unpacked(data[:8], data[8:], MOST_BYTES)


# --- the process that serves ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Serving:
    process: subprocess.Popen[str]
    seconds: float = 0.0
    sent_bytes: int = 0
    messages: int = 0
    packed: int = 0

    def row(self, what: str, crowd: _Crowd, own_s: float, per: float = 1.0) -> Row:
        """Returns the costs since the last row."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        seconds, packed, memory_mb = map(float, self.process.stdout.readline().split())
        before, self.seconds = self.seconds, seconds
        sent, self.sent_bytes = crowd.sent_bytes - self.sent_bytes, crowd.sent_bytes
        messages, self.messages = crowd.messages - self.messages, crowd.messages
        busiest_s = max(seconds - before, own_s) / per
        encoded, self.packed = packed - self.packed, int(packed)
        return Row(what, busiest_s, int(sent / per), int(messages / per), int(encoded / per), memory_mb)


@contextmanager
def _serving(kind: str, ranks: int) -> Iterator[tuple[_Serving, _Crowd]]:
    command = [sys.executable, "-m", "measure.scale_rendezvous", str(ranks), kind]
    folder, pipe = Path(__file__).parents[1], subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            port, seconds = process.stdout.readline().split()
            yield _Serving(process, float(seconds)), _Crowd(int(port), ranks)
        finally:
            process.kill()


def _serve(kind: str, ranks: int) -> None:
    """In the process that serves: a line of its input asks for its processor time and its memory."""
    sock = bound("127.0.0.1", 0)
    port = sock.getsockname()[1]
    encoded = 0

    def counted(message: Any) -> bytes:
        nonlocal encoded
        encoded += 1
        return packed(message)

    with patch.object(listener, "packed", counted), patch.object(elastic_server, "_SILENT_S", _LONGEST_S):
        serving: object
        if kind == "static":
            serving = server.Server(sock, _SECRET)
        elif kind == "elastic":
            limits = generations.Limits(ranks, 1, ranks, _LONGEST_S)
            serving = elastic_server.ElasticServer(sock, _SECRET, limits, lambda event: None)
        else:
            of_store = membership.Limits(ranks, 0, ranks, 3600.0, 0.0, False, _LONGEST_S)
            serving = scheduler.Scheduler(sock, _SECRET, of_store, 0)
        assert serving
        print(port, time.process_time(), flush=True)
        while sys.stdin.readline():
            with open("/proc/self/status") as status:
                peak_kb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
            print(time.process_time(), encoded, peak_kb / 1024, flush=True)


def lines(rows: list[Row]) -> list[str]:
    shown = Table(["", "s of a processor", "MB sent", "messages", "encoded", "MB of memory"])
    for row in rows:
        counts = [f"{row.seconds:.2f}", f"{row.sent_bytes / 1e6:.1f}", str(row.messages), str(row.encoded)]
        shown.add([row.what, *counts, f"{row.memory_mb:.0f}"])
    return list(lines_of(shown))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _serve(sys.argv[2], int(sys.argv[1]))
    else:
        print(*lines(measure(int(sys.argv[1]))), sep="\n")
