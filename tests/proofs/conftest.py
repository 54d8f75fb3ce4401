"""Folders for proofs that write thousands of checkpoints."""

from __future__ import annotations

__all__ = ("folder",)

from tests.memory_folder import folder
