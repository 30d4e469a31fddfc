"""Messages that outlive their connection. Uses no sockets, threads or clock: time is an argument.

Both sides count the messages that they have heard, and keep those that the other side may lack. When the network has
broken the connection, the process makes another one. Both sides then say how many messages they have heard and repeat
the others: none is lost, and none comes twice.

    process                                            server
    {"talk": token, "heard": 0, "is_new": true}  ->
                                                 <-    {"heard": 0}
    messages                                    <->    messages, and {"heard": n} after some of them
                               the connection breaks
    {"talk": token, "heard": 21, "is_new": false} ->
                                                 <-    {"heard": 19}, then messages from number 21 on
    messages from number 19 on                   ->    or {"heard": null}: the server has given the process up

The states of a conversation at the server, and what ends each of them:

connected   Ends with the connection. The conversation is over if the kernel of the other host says that the process has
            ended, or if that host has been silent for too long. Else, after a reset, the process is:
away        Ends when the process has made another connection, or after AWAY_S: then the conversation is over.
over        The server has forgotten the token. A process that comes back begins another conversation.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

# How long a process is awaited whose connection was reset. A side that is not told of the reset asks after 1 s.
AWAY_S = 3.0
# Messages that have a meaning at their moment alone: they are neither counted nor repeated.
_FLEETING = frozenset({"beat", "ping", "pong"})
# So many messages are kept at most beside those under way.
_TOLD_EVERY = 16

AnyLine = TypeVar("AnyLine", bound=Hashable)


def is_counted(message: Any) -> bool:
    return not (isinstance(message, dict) and message.get("kind") in _FLEETING)


def is_reset(error: Exception) -> bool:
    """Whether a connection has ended by an act of the network, as far as the kernel tells.

    A process that ends closes its connections. Its kernel resets one of which it has not read all, too.
    """
    return isinstance(error, OSError) and error.errno in (errno.ECONNRESET, errno.ECONNABORTED)


class Conversation:
    """One side of it."""

    def __init__(self) -> None:
        self.heard = 0  # messages of the other side
        self._told = 0  # of these, how many the other side knows to be heard
        self._kept: deque[bytes] = deque()  # own messages that the other side may lack
        self._gone = 0  # own messages before those

    def keep(self, message: bytes) -> None:
        """The message is on its way."""
        self._kept.append(message)

    def hear(self) -> bool:
        """A message has come. Returns whether it is time to tell the other side how many have."""
        self.heard += 1
        return self.heard - self._told >= _TOLD_EVERY

    def tell(self) -> dict[str, int]:
        """Returns what tells the other side how many messages have come."""
        self._told = self.heard
        return {"heard": self.heard}

    def forget(self, heard: int) -> None:
        """The other side has heard so many messages. Raises ValueError where it cannot have."""
        if not self._gone <= heard <= self._gone + len(self._kept):
            raise ValueError(f"{heard} messages cannot have been heard")
        while self._gone < heard:
            self._kept.popleft()
            self._gone += 1

    def lacking(self, heard: int) -> list[bytes]:
        """Returns what the other side lacks, which has heard so many messages. Raises as `forget`."""
        self.forget(heard)
        return list(self._kept)


class Conversations(Generic[AnyLine]):
    """Those of a server. `AnyLine` is what it knows a process by while the connections change."""

    def __init__(self) -> None:
        self._lines: dict[str, AnyLine] = {}  # by token
        self._tokens: dict[AnyLine, str] = {}
        self._away: dict[AnyLine, float] = {}  # and until when

    def find(self, token: str, new: AnyLine, is_new: bool) -> AnyLine | None:
        """Returns whom a connection belongs to: one that is known, `new`, or None where the server has given it up."""
        if token not in self._lines:
            if not is_new:
                return None
            self._lines[token] = new
            self._tokens[new] = token
        return self._lines[token]

    def back(self, line: AnyLine) -> None:
        """The process has made another connection."""
        self._away.pop(line, None)

    def is_awaited(self, line: AnyLine, error: Exception, now_s: float) -> bool:
        """The connection has ended with this error. Returns whether the process may make another one."""
        if line not in self._tokens or not is_reset(error):
            return False
        self._away[line] = now_s + AWAY_S
        return True

    def are_some_away(self) -> bool:
        return bool(self._away)

    def overdue(self, now_s: float) -> list[AnyLine]:
        """Returns those that have been away for too long."""
        return [line for line, end_s in self._away.items() if end_s < now_s] if self._away else []

    def forget(self, line: AnyLine) -> None:
        """The conversation is over."""
        self._away.pop(line, None)
        token = self._tokens.pop(line, None)
        if token is not None:
            del self._lines[token]
