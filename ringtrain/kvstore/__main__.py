"""`python -m ringtrain.kvstore server` or `scheduler`: a process of a job, until the job is over."""

from __future__ import annotations

import argparse
import sys

from ringtrain.kvstore.servers.roles import SCHEDULER, SERVER
from ringtrain.kvstore.servers.server import run_server


def main() -> int:
    """Returns the exit status: 0 when the job is over, 1 if this process never had one."""
    parser = argparse.ArgumentParser(prog="python -m ringtrain.kvstore", description=__doc__)
    parser.add_argument("role", choices=(SERVER, SCHEDULER), help="what this process is; DMLC_* variables say the rest")
    role = parser.parse_args().role
    try:
        run_server(role=role)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"ringtrain kvstore {role}: {error}", file=sys.stderr)
        return 1
    return 0


sys.exit(main())
