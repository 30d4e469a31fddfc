"""A bad cable between ports: frames that come in at one go out where their receiver is, late, or not at all.

    python bad_link.py SECONDS PROBABILITY PORT PORT ...

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
_RECEIVER, _SENDER = slice(10, 16), slice(16, 22)  # of a frame, behind what open_port() adds


def open_port(name: str) -> socket.socket:
    """With what the kernel knows of each frame (checksums that are still missing, segments) before the frame."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    port.bind((name, _ALL_PROTOCOLS))
    return port


def main(delay_s: float, loss: float, names: list[str]) -> None:
    ports = [open_port(name) for name in names]
    places: dict[bytes, socket.socket] = {}
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
                places[frame[_SENDER]] = port
                known = places.get(frame[_RECEIVER])
                for other in [known] if known else [one for one in ports if one is not port]:
                    heapq.heappush(waiting, (time.monotonic() + delay_s, next(numbers), other, frame))


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
