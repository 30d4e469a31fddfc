"""Addresses of this host."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket

import ringtrain._core as _core

INTERFACES_VARIABLE = "RINGTRAIN_SOCKET_INTERFACES"


def addresses_of(interfaces: str) -> list[str]:
    """Addresses of this host on what is named, interfaces or ranges such as 10.1.0.0/16, in that order.

    Raises ValueError where there is none.
    """
    found: list[str] = []
    here = _core.interface_addresses()
    for word in filter(None, interfaces.split(",")):
        if re.fullmatch(r"[0-9a-fA-F.:]+/\d+", word):
            network = ipaddress.ip_network(word, strict=False)
            matching = [address for _, address in here if ipaddress.ip_address(address.partition("%")[0]) in network]
        else:
            matching = _of_one_family([address for name, address in here if name == word])
        if not matching:
            known = ", ".join(f"{name} {address}" for name, address in here)
            raise ValueError(f"socket_interfaces={word}: this host has no such interface or address, but {known}")
        found += [address for address in matching if address not in found]
    return found


def _of_one_family(addresses: list[str]) -> list[str]:
    """IPv4 where there is some: an interface has an address of each family, and is used once."""
    return [address for address in addresses if "." in address][:1] or addresses[:1]


def usual_address() -> str:
    """One that other hosts probably know this one by."""
    others = [
        address
        for name, address in _core.interface_addresses()
        if name != "lo" and not re.match("docker|virbr|veth|cni", name) and not address.startswith("fe80:")
    ]
    return next(iter(sorted(others, key=lambda address: ":" in address)), "127.0.0.1")


def address_towards(host: str) -> str:
    """That of this host from which packets to another one would go. Sends none."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as sock:
        sock.connect(address)
        return str(sock.getsockname()[0])
