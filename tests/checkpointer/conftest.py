"""Folders in memory, for tests that save often."""

from __future__ import annotations

__all__ = ("folder",)

from tests.memory_folder import folder
