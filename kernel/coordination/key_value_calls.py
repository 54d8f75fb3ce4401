"""Calls of the coordination service, from an event loop."""

from __future__ import annotations

__all__ = ("KeyValueCalls",)

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar, final

from anyio import current_time

from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.protocols.coordinator import KeyValues

T = TypeVar("T")

LONGEST_WAIT_S = 10.0
"""Of one call. A process cannot exit before the threads that it has left behind are back."""

MOST_WAITS = 64
"""Threads of their own: a wait for another process must not keep a save's writes from running."""


@final
class KeyValueCalls:
    """The calls of `KeyValues`, each in a worker thread that a cancellation leaves behind.

    What was left still takes effect, so callers shield what must be known to have happened.
    """

    __slots__ = ("_service", "_threads", "counted")

    def __init__(self, service: KeyValues) -> None:
        self._service = service
        self._threads = Threads(MOST_WAITS).leaving_calls(0.0)
        self.counted: Counter[str] = Counter()  #: how often each call was made

    def elsewhere(self) -> KeyValueCalls:
        """Return calls of the same service for the event loop that runs here."""
        return KeyValueCalls(self._service)

    async def put(self, key: str, value: bytes, *, replace: bool = False) -> bool:
        """See `KeyValues.put`."""
        return await self._run(self._service.put, key, value, replace)

    async def put_to_its_end(self, key: str, value: bytes, left_s: float) -> None:
        """Replace a value. A cancellation waits for the answer, but no longer than `left_s`.

        So what is deleted next does not come back, unless the service is slow.
        """
        self.counted["put"] += 1
        await self._threads.leaving_calls(left_s).run(self._service.put, key, value, True)

    async def put_once(self, key: str, own: bytes) -> bool:
        """Set a key to what nobody else sets; return whether it has that value.

        It may be called again: what was not confirmed in time may have been heard nevertheless.
        """
        return await self.put(key, own) or await self.wait(key, 0.0) == own

    async def wait(self, key: str, timeout_s: float) -> bytes | None:
        """See `KeyValues.wait`. Made of several calls if it is long."""
        end = current_time() + timeout_s
        while (left_s := end - current_time()) > LONGEST_WAIT_S:
            found = await self._run(self._service.wait, key, LONGEST_WAIT_S)
            if found is not None:
                return found

        return await self._run(self._service.wait, key, max(left_s, 0.0))

    async def under(self, prefix: str) -> Mapping[str, bytes]:
        """See `KeyValues.under`."""
        return await self._run(self._service.under, prefix)

    async def by_process(self, prefix: str) -> dict[int, bytes]:
        """Return what the processes said under a prefix, by their index, ascending.

        Made ready in the worker thread: of 10,000 processes that takes some milliseconds.
        """
        return await self._run(self._by_process, prefix)

    async def count(self, key: str) -> int:
        """See `KeyValues.count`."""
        return await self._run(self._service.count, key)

    async def delete(self, prefix: str) -> None:
        """See `KeyValues.delete`."""
        await self._run(self._service.delete, prefix)

    def _by_process(self, prefix: str) -> dict[int, bytes]:
        found = self._service.under(prefix)
        return dict(sorted([(int(index), value) for index, value in found.items()]))

    async def _run(self, function: Callable[..., T], *args: object) -> T:
        self.counted[function.__name__] += 1
        return await self._threads.run(function, *args)
