"""Ranks that are actors of Ray, as `horovod.ray` has them: `RayExecutor`; and `RingtrainConfig` for Ray Train.

Needs `pip install "ringtrain[ray]"` on all nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringtrain.ray.elastic_executor import ElasticRayExecutor, RayHostDiscovery
from ringtrain.ray.executor import RayExecutor, Settings

if TYPE_CHECKING:
    from ringtrain.ray.train import RingtrainConfig

__all__ = ["ElasticRayExecutor", "RayExecutor", "RayHostDiscovery", "RingtrainConfig", "Settings"]


def __getattr__(name: str) -> Any:
    """Ray Train is imported with the first use of its part: it needs more packages than Ray itself."""
    if name == "RingtrainConfig":
        from ringtrain.ray.train import RingtrainConfig

        return RingtrainConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
