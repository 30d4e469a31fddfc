"""What each process of a job with servers is told, by the variables that MXNet knows: DMLC_ROLE and its relatives."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ringtrain.job.interfaces import address_towards, addresses_of, usual_address
from ringtrain.runner.allocation.hosts import is_this_host
from ringtrain.runner.roles.cast import SERVER, WORKER, Process
from ringtrain.runner.roles.terms import RoleTerms

# launch.py's first port for the scheduler, and what it tries besides
_PORTS = range(9091, 10000)
_INTERFACE_VARIABLE = "DMLC_INTERFACE"
_URI_VARIABLE, _PORT_VARIABLE = "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"


class Root(NamedTuple):
    """Where the scheduler listens. Nobody else takes the port while `holder` is open; it listens to nothing itself."""

    address: str
    port: int
    holder: socket.socket


def open_root(hosts: Sequence[str], environ: Mapping[str, str]) -> Root:
    """At this host's address towards the others, on the first free port, but for what the user has set.

    Raises OSError where no port is free, and ValueError where the variable is none.
    """
    address = environ.get(_URI_VARIABLE) or _own_address(hosts, environ)
    named = environ.get(_PORT_VARIABLE)
    for port in [int(named)] if named else _PORTS:
        holder = _held(address, port)
        if holder is not None:
            return Root(address, port, holder)
    tried = f"port {named}" if named else f"none of the ports {_PORTS[0]}-{_PORTS[-1]}"
    raise OSError(f"{tried} of {address} is free for the scheduler; set {_PORT_VARIABLE} to another one")


def _held(address: str, port: int) -> socket.socket | None:
    """None where it is taken. Another ringlaunch finds it taken, the scheduler may listen there all the same."""
    family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    holder = socket.socket(family, kind)
    try:
        holder.bind(place)
    except OSError:
        holder.close()
        return None
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def _own_address(hosts: Sequence[str], environ: Mapping[str, str]) -> str:
    remote = [host for host in hosts if not is_this_host(host)]
    if not remote:
        return "127.0.0.1"
    # this host may have no such interface where it has only the scheduler
    with contextlib.suppress(ValueError):
        named = addresses_of(environ.get(_INTERFACE_VARIABLE, ""))
        if named:
            return named[0]
    with contextlib.suppress(OSError):
        return address_towards(remote[0])
    return usual_address()  # ssh will say what is wrong


def variables_of(
    process: Process, attempt: int, host: str, root: Root, terms: RoleTerms, environ: Mapping[str, str]
) -> dict[str, str]:
    """For a process on `host` that has failed `attempt` times."""
    variables = {
        _URI_VARIABLE: root.address,
        _PORT_VARIABLE: str(root.port),
        "DMLC_NUM_WORKER": str(terms.cast.workers),
        "DMLC_NUM_SERVER": str(terms.cast.servers),
        "DMLC_ROLE": process.role,
        "DMLC_TASK_ID": str(process.task),
        "DMLC_NUM_ATTEMPT": str(attempt),
        "DMLC_JOB_CLUSTER": "ssh" if terms.hosts else "local",
    }
    if terms.keeps_servers:
        variables["RINGTRAIN_KV_KEEP"] = "1"
    # who names an interface is asked for the address that this has on each host
    address = None if environ.get(_INTERFACE_VARIABLE) else _address_of(host, root)
    if address is not None:
        variables["DMLC_NODE_HOST"] = address
    own: Mapping[str, Mapping[str, str]] = {WORKER: terms.of_workers, SERVER: terms.of_servers}
    return {**variables, **own.get(process.role, {})}


def _address_of(host: str, root: Root) -> str | None:
    """In digits: a host may know its own name by an address that no other one reaches."""
    if is_this_host(host):
        return root.address
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None  # a name that ssh alone knows
