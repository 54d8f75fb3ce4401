"""The module `serialization` of Orbax's API: the context that TensorStore opens arrays in."""

from __future__ import annotations

__all__ = ("get_ts_context",)

from penstock.orbax.tensorstore_specs import get_ts_context
