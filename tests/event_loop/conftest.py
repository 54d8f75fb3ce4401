"""Objects that nothing froze, for tests of the collector."""

from __future__ import annotations

__all__ = ("thawed",)

from tests.collecting import thawed
