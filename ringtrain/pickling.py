"""Objects as bytes, with the help of cloudpickle where it is installed: that takes lambdas and local classes, too."""

from __future__ import annotations

import importlib
import pickle
from typing import Any


def pickler() -> Any:
    """cloudpickle if it is installed, else pickle. Both have `dumps`; `pickle.loads` reads what either wrote."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def dumps(obj: Any) -> bytes:
    """The object for another rank, which runs the same script: by pickle where that is enough.

    It refers to the classes of the script, where cloudpickle sends copies of them. An instance of a copy is no instance
    of the receiver's class.
    """
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        chosen = pickler()
        if chosen is pickle:
            raise
    data: bytes = chosen.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    return data
