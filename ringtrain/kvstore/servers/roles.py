"""The role of this process in a job of servers and workers, by MXNet's variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

WORKER, SERVER, SCHEDULER = "worker", "server", "scheduler"
ROLES = (WORKER, SERVER, SCHEDULER)
ROLE_VARIABLE = "DMLC_ROLE"


class Role(NamedTuple):
    """`name` is "" if the scheduler decides between worker and server."""

    name: str
    host: str  # of the scheduler
    port: int
    workers: int
    servers: int  # 0: one in each worker
    task: int | None  # which worker or server
    attempt: int  # how often it was started before
    address: str  # the name of this host for other processes, or ""


def of_environment(environ: Mapping[str, str] = os.environ, name: str | None = None) -> Role | None:
    """Returns None without a scheduler.

    Args:
        name: the role, where the caller knows it.

    Raises:
        ValueError: a variable is missing, or is not a number or role.
    """
    given = environ.get(ROLE_VARIABLE, "") if name is None else name
    if "DMLC_PS_ROOT_URI" not in environ:
        if not given:
            return None
        raise ValueError(f"a {given} has to know where the scheduler is: set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT")
    if given not in (*ROLES, ""):
        raise ValueError(f"DMLC_ROLE is one of {', '.join(ROLES)}, not {given!r}")
    return Role(
        name=given,
        host=environ["DMLC_PS_ROOT_URI"].strip("[]"),
        port=_number(environ, "DMLC_PS_ROOT_PORT", 1),
        workers=_number(environ, "DMLC_NUM_WORKER", 1),
        servers=_number(environ, "DMLC_NUM_SERVER", 0),
        task=_number(environ, "DMLC_TASK_ID", 0) if environ.get("DMLC_TASK_ID") else None,
        attempt=_number(environ, "DMLC_NUM_ATTEMPT", 0) if environ.get("DMLC_NUM_ATTEMPT") else 0,
        address=environ.get("DMLC_NODE_HOST", "").strip("[]"),
    )


def _number(environ: Mapping[str, str], name: str, least: int) -> int:
    text = environ.get(name, "")
    if not text.isdigit() or int(text) < least:
        raise ValueError(f"{name} is to be a number from {least} on, but is {text!r}")
    return int(text)
