"""The memory budget of a Checkpointer: from its arguments, from its configuration, or shared."""

from __future__ import annotations

__all__ = (
    "MemoryKeywords",
    "config_and_regulator",
)

from penstock.checkpointer.parts import MemoryKeywords, config_and_regulator
