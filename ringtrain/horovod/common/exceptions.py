"""`horovod.common.exceptions`: what to catch."""

from __future__ import annotations

from ringtrain.errors import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed. Not raised before hvd.elastic is there.

    Args:
        skip_sync: whether the state of the ranks is the same already.
    """

    def __init__(self, skip_sync: bool):
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A framework of another version than Horovod was built for. Never raised: ringtrain is built for none."""

    def __init__(self, name: str, version: str, installed_version: str):
        super().__init__(f"{name} {version}, but Horovod was built for {installed_version}", name=name)
        self.version = version
        self.installed_version = installed_version
