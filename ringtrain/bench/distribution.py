"""Ways to train a torch model on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The name of the one that leaves every rank its own gradients.
ALONE = "no communication"


@dataclass(frozen=True)
class Distribution:
    """One way to average the gradients. `distribute` takes a torch model and its optimizer, and returns what is used in
    place of them."""

    name: str
    distribute: Callable[[Any, Any], tuple[Any, Any]]
