"""How the processes of a job agree, and the implementation for a single process."""

from __future__ import annotations

__all__ = (
    "Coordinator",
    "KeyValues",
    "SingleProcessCoordinator",
)

from collections.abc import Mapping
from typing import Protocol, final

from anyio.lowlevel import checkpoint


class KeyValues(Protocol):
    """Small values that all processes of a job see: what a coordination service offers.

    Every call blocks, for a moment unless it says otherwise, and raises `CoordinationError` if the service
    cannot be reached. Keys are parts joined by slashes.
    """

    def put(self, key: str, value: bytes, replace: bool, /) -> bool:
        """Store a value; return False if there is one already and `replace` is off."""
        ...

    def wait(self, key: str, timeout_s: float, /) -> bytes | None:
        """Return a value as soon as there is one; None if that was not within `timeout_s`."""
        ...

    def under(self, prefix: str, /) -> Mapping[str, bytes]:
        """Return the values below `prefix`, by what follows it. A prefix ends with a slash."""
        ...

    def count(self, key: str, /) -> int:
        """Add one to a counter that starts at 0, and return it."""
        ...

    def delete(self, prefix: str, /) -> None:
        """Forget everything below `prefix`, or the one value of that key. Nothing need be there."""
        ...


class Coordinator(Protocol):
    """How the processes of one job agree. Every wait has a deadline."""

    @property
    def process_index(self) -> int: ...
    @property
    def process_count(self) -> int: ...
    @property
    def is_primary(self) -> bool: ...
    async def barrier(self, name: str, timeout_s: float) -> None:
        """Wait until every process has reached this call."""
        ...


@final
class SingleProcessCoordinator:
    """The `Coordinator` of a job with one process, which is the primary. It never waits."""

    __slots__ = ()

    @property
    def process_index(self) -> int:
        """Always 0."""
        return 0

    @property
    def process_count(self) -> int:
        """Always 1."""
        return 1

    @property
    def is_primary(self) -> bool:
        """Always true."""
        return True

    async def barrier(self, name: str, timeout_s: float) -> None:
        """Return at once.

        Cancellation:
            A checkpoint, as a real wait would be.
        """
        await checkpoint()
