"""How many processes of a job are in one place, such as on one host."""

from __future__ import annotations

__all__ = ("Neighbours",)

from copy import copy
from typing import final

from penstock.kernel.coordination.key_value_calls import KeyValueCalls
from penstock.kernel.coordination.operation_keys import ROOT
from penstock.kernel.protocols.coordinator import KeyValues

PLACES = f"{ROOT}/places/"
"""One key for each process, for as long as the job lives."""


@final
class Neighbours:
    """Counts the processes that are in one place, once they have said where they are.

    Args:
        service: The same for all processes.
        process_index: Which one this is.
        process_count: How many the job has, whether they save together or not.
    """

    __slots__ = ("_calls", "_index", "_n_processes", "_said")

    def __init__(self, service: KeyValues, process_index: int, process_count: int) -> None:
        self._calls = KeyValueCalls(service)
        self._index = process_index
        self._n_processes = process_count
        self._said: str | None = None

    def elsewhere(self) -> Neighbours:
        """Return what counts the same for the event loop that runs here."""
        other = copy(self)
        other._calls = self._calls.elsewhere()
        return other

    async def count(self, place: str) -> tuple[int, bool]:
        """Say that this process is in `place`; return how many are there, and whether all have said where.

        Raises:
            CoordinationError: If the service cannot be reached.
        """
        if self._said != place:
            await self._calls.put(f"{PLACES}{self._index}", place.encode(), replace=True)
            self._said = place

        places = await self._calls.under(PLACES)
        here = [index for index, found in places.items() if found == place.encode()]
        return max(len(here), 1), len(places) >= self._n_processes
