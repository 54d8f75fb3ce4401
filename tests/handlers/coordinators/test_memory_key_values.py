"""The service in memory behaves as a real one does."""

from __future__ import annotations

from tests.key_values_conformance import KeyValuesConformance

from penstock.kernel.protocols import KeyValues
from penstock.testing import MemoryKeyValues, StoppableKeyValues


class TestConformance(KeyValuesConformance):
    """What every service must do."""

    def make_views(self, count: int) -> list[KeyValues]:
        service = MemoryKeyValues()
        return [StoppableKeyValues(service) for _ in range(count)]
