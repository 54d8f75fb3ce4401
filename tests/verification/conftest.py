"""Tests of verification write to memory: what they show does not depend on a disk."""

from __future__ import annotations

__all__ = ("tmp_path",)

from tests.memory_folder import tmp_path
