"""The devices of the process."""

import threading

from cupy.cuda import runtime

_entered = threading.local()


class Device:
    """Current between `with` and its end, or from `use()` on. None: the one that is current now."""

    def __init__(self, device=None):
        self.id = runtime.getDevice() if device is None else int(device)

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self):
        return hash(self.id)

    def __repr__(self):
        return f"<CUDA Device {self.id}>"

    def __enter__(self):
        before = runtime.getDevice()
        _entered.__dict__.setdefault("devices", []).append(before)
        if before != self.id:
            runtime.setDevice(self.id)
        return self

    def __exit__(self, *raised):
        runtime.setDevice(_entered.devices.pop())

    def use(self):
        runtime.setDevice(self.id)
        return self

    def synchronize(self):
        with self:
            runtime.deviceSynchronize()
