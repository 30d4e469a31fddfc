"""`horovod.common.exceptions`: what to catch."""

from __future__ import annotations

from ringtrain.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """A framework of another version than Horovod was built for. Never raised: ringtrain is built for none."""

    def __init__(self, name: str, version: str, installed_version: str):
        super().__init__(f"{name} {version}, but Horovod was built for {installed_version}", name=name)
        self.version = version
        self.installed_version = installed_version
