"""`horovod.runner.common.util.codec`: objects as text."""

from __future__ import annotations

import base64
import pickle
from typing import Any

from ringtrain.pickling import pickler


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """The pickle of an object in base64."""
    encoded = base64.b64encode(pickler().dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """The object. The text must be as trustworthy as the script: it is read by pickle."""
    return pickle.loads(base64.b64decode(encoded))
