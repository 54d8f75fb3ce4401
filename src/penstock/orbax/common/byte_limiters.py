"""The memory budget as Orbax's handlers ask for it: wait for bytes, release bytes."""

from __future__ import annotations

__all__ = ("ByteLimiter", "Limiters", "leaf_size")

import sys
from dataclasses import dataclass
from typing import final

from penstock.kernel.memory.byte_account import ByteAccount, ByteLease
from penstock.kernel.memory.regulator import Flow, MemoryRegulator


@final
class ByteLimiter:
    """What Orbax calls a `ByteLimiter`, over an account of penstock's. Use it in one event loop.

    Args:
        account: Where the bytes come from.
    """

    __slots__ = ("_account", "_held")

    def __init__(self, account: ByteAccount) -> None:
        self._account = account
        self._held: list[ByteLease] = []

    @property
    def max_bytes(self) -> int:
        """Bytes that may be reserved at once."""
        return self._account.limit

    async def wait_for_bytes(self, requested_bytes: int) -> None:
        """Wait until so many bytes are free, and reserve them.

        A request above the limit is not refused: it waits until nothing else is reserved.

        Cancellation:
            Reserves nothing.
        """
        lease = await self._account.acquire(requested_bytes, admit_oversize=True)
        self._held.append(lease)

    async def release_bytes(self, requested_bytes: int) -> None:
        """Release bytes. Never waits.

        Raises:
            ValueError: If more are released than are reserved.
        """
        missing = requested_bytes
        while missing and self._held:
            lease = self._held[-1]
            with lease.split(min(missing, lease.nbytes)) as part:
                missing -= part.nbytes

            if not lease.nbytes:
                self._held.pop()

        if missing:
            raise ValueError(f"{requested_bytes} bytes were released, {missing} more than were reserved")


@final
@dataclass(frozen=True, slots=True)
class Limiters:
    """The byte limiters that handlers get in one save or restore, as large as its memory budget.

    They have accounts of their own. A handler's leaves are leased already when it is called, so it must
    not wait for the budget again, or it could wait for itself. What it never releases ends with the call.

    Attributes:
        in_flight: Bounds the bytes being written or read.
        device_host: Bounds the bytes being copied from devices.
    """

    in_flight: ByteLimiter
    device_host: ByteLimiter

    @classmethod
    def of(cls, memory: MemoryRegulator, flow: Flow) -> Limiters:
        """Make the limiters of one save or restore."""
        in_flight, held = memory.in_flight(flow).limit, memory.limit_of(flow)
        return cls(ByteLimiter(ByteAccount(in_flight)), ByteLimiter(ByteAccount(held)))


def leaf_size(value: object) -> int:
    """Return the bytes of a value: its `nbytes`, or else the size of the Python object."""
    nbytes = getattr(value, "nbytes", None)
    return nbytes if isinstance(nbytes, int) else sys.getsizeof(value)
