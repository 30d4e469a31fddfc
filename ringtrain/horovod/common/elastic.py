"""`horovod.common.elastic`: what a state is, and how a function of it is run again."""

from __future__ import annotations

from ringtrain.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "run_fn"]
