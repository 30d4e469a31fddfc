"""In each container of YARN: goes to the starter, proves that it belongs to the job, and is the agent of one rank.

Runs as a script, as `container.py ADDRESS PORT`, with the secret of the job on its standard input.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    # ringtrain's own folder comes last, since it may hold other packages
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parents[3])]

from ringtrain.job.rendezvous.protocol import Connection, StrangerError
from ringtrain.runner.start import agent

_ARRIVE_S = 30.0
_PAUSE_S = 0.2
# A starter whose host has vanished is missed after so long, and the rank killed.
_SILENCE_S = 30.0


def main() -> int:
    """Returns 0 if the rank has ended, however it did."""
    address, port = sys.argv[1], int(sys.argv[2])
    secret = sys.stdin.readline().strip()
    try:
        connection = _arrive(address, port, bytes.fromhex(secret))
    except (OSError, StrangerError) as error:
        where = f"the starter of this job, at {address} port {port}"
        print(f"ringtrain: {socket.gethostname()} cannot reach {where}: {error}", file=sys.stderr)
        return 1
    connection.notice_silence(_SILENCE_S)
    way = connection.take_socket()
    way.setblocking(True)
    for descriptor in (0, 1, 2):
        os.dup2(way.fileno(), descriptor)
    way.close()
    return agent.main(secret)


def _arrive(address: str, port: int, secret: bytes) -> Connection:
    deadline = time.monotonic() + _ARRIVE_S
    while True:
        try:
            connection = Connection(socket.create_connection((address, port), _ARRIVE_S))
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)
    connection.prove_as_rank(secret, deadline)
    connection.send({"host": socket.gethostname(), "container": os.environ.get("CONTAINER_ID", "")}, deadline)
    return connection


if __name__ == "__main__":
    sys.exit(main())
