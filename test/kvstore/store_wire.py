"""A worker of a key-value store that says to a server whatever a test wants (csrc/kvstore/wire/message.h)."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringtrain._core import DTYPES

SAID = [
    "hello",
    "create",
    "attach",
    "rule",
    "join",
    "resume",
    "awaited",
    "waiting",
    "push",
    "pull",
    "push_pull",
    "assign",
    "read_state",
    "write_state",
    "read_updates",
    "write_updates",
    "poke",
    "held",
    "done",
    "refused",
    "early",
    "staged",
]
SECRET, TOKEN, CAPACITY = b"secret of a test", "stores", 8
ALL = 0xFFFFFFFF
FRAME = struct.Struct("<IIQ")
HEAD = struct.Struct("<HBBIIIIIfIqQdd")
HEAD_TAG, BODY_TAG = 0x4B560005, 0x4B560006
_MAGIC = b"ringtrn\x04"
_changes = itertools.count(1)
_WITHIN_S = 20

_SERVER = f"""
import array, json, os, socket, sys, threading
from ringtrain import _core
takes = threading.Event()
def take_descriptors():
    while takes.is_set():
        mine = []
        try:
            while True:
                mine.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        for one in mine:
            os.close(one)
shares, threads, number = map(int, sys.argv[1:])
door = socket.create_server(("127.0.0.1", 0), backlog=64)
door.setblocking(False)
print(door.getsockname()[1], flush=True)
server = _core.StoreServer(number=number, capacity={CAPACITY}, listeners=[door.detach()], secret={SECRET!r},
                           token={TOKEN!r}, threads=threads, node="here" if shares else "", timeout_s=20,
                           verbose=0)
for line in sys.stdin:
    what, text = line.split()
    if what == "copies":
        kept = []
        for part, (store, chunks) in enumerate(server.parts()):
            blocks = [(first, server.read(part, first, first + 2).hex()) for first in range(0, chunks, 2)]
            kept.append((store, server.describe(part).hex(), blocks))
        print(json.dumps(kept).encode().hex(), flush=True)
        continue
    if what in ("loses", "finds"):
        worker, _, term = text.partition(":")
        (server.lost if what == "loses" else server.back)(int(worker), int(term or 1))
    elif what == "takes_descriptors":
        takes.set() if int(text) else takes.clear()
        if int(text):
            threading.Thread(target=take_descriptors, daemon=True).start()
    elif what == "updates":
        for _ in range(int(text)):
            (_, part, piece), _, _, gradient, weight = server.take(20)
            sums = [a + b for a, b in zip(array.array("f", gradient), array.array("f", weight), strict=True)]
            server.finish(part, piece, array.array("f", sums).tobytes())
    elif what == "adopts":
        spec, pid, ticket = text.split(":")
        server.begin_recovery()
        server.adopt([(0, 0, bytes.fromhex(spec), int(pid), int(ticket))])
    elif what == "restored":
        server.begin_recovery()
        for part, (store, description, blocks) in enumerate(json.loads(bytes.fromhex(text))):
            server.restore(store, bytes.fromhex(description))
            for first, block in blocks:
                server.write(part, first, bytes.fromhex(block))
    else:
        getattr(server, what)(int(text))
    print("ok", flush=True)
server.close()
"""


class Server:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], number: int = 0):
        self.process, self.number = process, number
        assert process.stdout
        self.port = int(process.stdout.readline())

    def tell(self, what: str, worker: int) -> None:
        """`lost`, `left` or `back`."""
        assert self.ask(what, str(worker)) == "ok"

    def ask(self, what: str, text: str = "-") -> str:
        """Has it do this.

        `copies`: all that it keeps; `restored`: it keeps that; `updates`: adds so many gradients to their values.
        `loses`: the first process of a worker is dead; `finds`: and the second one is there; `0:2` for the next one of
        worker 0. `adopts`: goes on with the memory of a part.
        """
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{what} {text}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """All its threads: they may run on for a moment after the signal."""
        self.process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + _WITHIN_S
        while any(state != "T" for state in self._states()):
            assert time.monotonic() < until
            time.sleep(0.01)

    def _states(self) -> Iterator[str]:
        for task in os.listdir(f"/proc/{self.process.pid}/task"):
            with open(f"/proc/{self.process.pid}/task/{task}/stat") as stat:
                yield stat.read().rsplit(")", 1)[1].split()[0]

    def resident_kb(self) -> int:
        with open(f"/proc/{self.process.pid}/status") as status:
            return int(next(line for line in status if line.startswith("VmRSS")).split()[1])


@contextlib.contextmanager
def served(shares_memory: bool = False, threads: int = 1, number: int = 0) -> Iterator[Server]:
    """It must end well when its input does, unless the test kills it."""
    options = (int(shares_memory), threads, number)
    command = [sys.executable, "-c", _SERVER, *map(str, options)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Server(process, number)
        if process.returncode != -signal.SIGKILL:
            process.communicate(timeout=_WITHIN_S)
            assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


class Message(NamedTuple):
    said: str
    number: int
    body: bytes
    id: int


def head(said: str | int, **fields: float) -> bytes:
    """Its fields by their names in message.h."""
    values = {"dtype": DTYPES["float32"], "wanted": DTYPES["float32"], "ranges": ALL} | fields
    names = [
        "dtype",
        "wanted",
        "store",
        "part",
        "chunk",
        "body_bytes",
        "codes",
        "threshold",
        "ranges",
        "number",
        "push",
        "lr",
        "wd",
    ]
    number = SAID.index(said) if isinstance(said, str) else said
    return HEAD.pack(number, *(values.get(name, 0) for name in names))


def part_spec(
    counts: Sequence[int], is_sync: bool = False, staleness: int = -1, dtype: str = "float32", first: int = 0
) -> bytes:
    """Keys `first`, `first` + 1, ... of so many elements, wholly at one server."""
    pieces = b"".join(struct.pack("<IIQQ", key, DTYPES[dtype], 0, count) for key, count in enumerate(counts, first))
    return struct.pack("<IqiQ", is_sync, staleness, CAPACITY, len(counts)) + pieces


def join(worker: int, number: int) -> bytes:
    return struct.pack("<Iq", worker, number)


def joins(*of_workers: tuple[int, int]) -> bytes:
    return struct.pack("<Q", len(of_workers)) + b"".join(join(*one) for one in of_workers)


def rule(name: str, form: str = "mxnet", **numbers: float) -> bytes:
    def text(word: str) -> bytes:
        return struct.pack("<Q", len(word)) + word.encode()

    values = b"".join(text(key) + struct.pack("<d", value) for key, value in numbers.items())
    return text(name) + text(form) + struct.pack("<Q", len(numbers)) + values + struct.pack("<Bq", 0, 0)


class Worker:
    """A connection whose handshake is done."""

    def __init__(self, server: Server, number: int, secret: bytes = SECRET):
        self.sock = socket.create_connection(("127.0.0.1", server.port), timeout=_WITHIN_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        said = _MAGIC + struct.pack("<iiii", number, CAPACITY + server.number, 0, 0) + os.urandom(16)
        self.sock.sendall(said)
        challenge = self._receive(16 + 32)
        said += challenge[:16]
        proof = hmac.digest(SECRET, b"answers" + TOKEN.encode() + said, "sha256")
        assert hmac.compare_digest(proof, challenge[16:])
        self.sock.sendall(hmac.digest(secret, b"dials" + TOKEN.encode() + said, "sha256"))
        if secret == SECRET:
            assert self._receive(1) == b"w"
        self._id = 0
        self._question = int.from_bytes(os.urandom(6), "little")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *unused: object) -> None:
        self.sock.close()

    def say(self, said: str, body: bytes = b"", id: int = 0, **fields: float) -> int:
        """Returns the number of the message; `id`: that of one before, which comes again."""
        if not id:
            id = self._id = self._id + 1
        words = head(said, body_bytes=len(body), **fields)
        data = FRAME.pack(HEAD_TAG, id, len(words)) + words
        if body:
            data += FRAME.pack(BODY_TAG, id, len(body)) + body
        self.sock.sendall(data)
        return id

    def hear(self) -> Message:
        tag, number, size = FRAME.unpack(self._receive(FRAME.size))
        assert (tag, size) == (HEAD_TAG, HEAD.size)
        fields = HEAD.unpack(self._receive(HEAD.size))
        body = b""
        if fields[6]:
            assert FRAME.unpack(self._receive(FRAME.size)) == (BODY_TAG, number, fields[6])
            body = self._receive(fields[6])
        return Message(SAID[fields[0]], fields[10], body, number)

    def ask(self, said: str, body: bytes = b"", **fields: float) -> Message:
        """A question with its answer, which must not be a refusal."""
        if said in ("create", "attach", "rule", "join", "resume"):
            self._question += 1
            fields = {"number": self._question} | fields
        if said in ("assign", "write_state", "write_updates"):
            fields = {"push": next(_changes)} | fields
        sent = self.say(said, body, **fields)
        answer = self.hear()
        assert answer.id == sent
        assert answer.said != "refused", answer.body
        return answer

    def push(self, values: npt.NDArray[np.float32], number: int, said: str = "push", **fields: float) -> Message:
        return self.ask(said, values.tobytes(), number=number, lr=1.0, **fields)

    def pull(self, number: int = 0, **fields: float) -> npt.NDArray[np.float32]:
        answer = self.ask("pull", number=number, **fields)
        assert answer.said == "done"
        return np.frombuffer(answer.body, np.float32)

    def has_heard_nothing(self, within_s: float = 0.3) -> bool:
        self.sock.settimeout(within_s)
        try:
            return not self.sock.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.sock.settimeout(_WITHIN_S)

    def is_ended(self) -> bool:
        """Whether the server ends the connection; what it still says does not matter."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        return True

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.sock.recv(size - len(data))
            if not part:
                raise ConnectionError("the server has ended the connection")
            data += part
        return data
