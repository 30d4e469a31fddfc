"""`horovod.runner.common.util.host_hash`: a text that is the same for the processes of one host."""

from __future__ import annotations

import hashlib
import socket

from ringtrain.job.world import node_name


def host_hash(salt: str | None = None) -> str:
    """The name of this host, and a digest of what identifies it and of `salt`."""
    digest = hashlib.sha256(f"{node_name()}-{salt or ''}".encode()).hexdigest()
    return f"{socket.gethostname()}-{digest[:32]}"
