"""A bad cable between two ports: frames that come in at one go out at the other, late, or not at all.

    python bad_link.py PORT PORT SECONDS PROBABILITY

The kernel of a small machine often lacks netem, which would do the same.
"""

import heapq
import itertools
import random
import select
import socket
import sys
import time

_ALL_PROTOCOLS = 3
_SOL_PACKET, _PACKET_VNET_HDR, _OUTGOING = 263, 15, 4
_LONGEST = 1 << 17


def open_port(name: str) -> socket.socket:
    """With what the kernel knows of each frame (checksums that are still missing, segments) before the frame."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    port.bind((name, _ALL_PROTOCOLS))
    return port


def main(first: str, second: str, delay_s: float, loss: float) -> None:
    ports = [open_port(first), open_port(second)]
    words, numbers = random.Random(1), itertools.count()
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    print("ready", flush=True)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, port, frame = heapq.heappop(waiting)
            port.send(frame)
        longest = waiting[0][0] - now if waiting else None
        for port in select.select(ports, [], [], longest)[0]:
            frame, (_, _, kind, *_) = port.recvfrom(_LONGEST)
            if kind != _OUTGOING and words.random() >= loss:
                other = ports[1 - ports.index(port)]
                heapq.heappush(waiting, (time.monotonic() + delay_s, next(numbers), other, frame))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
