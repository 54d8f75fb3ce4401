"""How the processes of a job agree, and the implementation for a single process."""

from __future__ import annotations

__all__ = (
    "Coordinator",
    "SingleProcessCoordinator",
)

from typing import Protocol, final

from anyio.lowlevel import checkpoint


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
