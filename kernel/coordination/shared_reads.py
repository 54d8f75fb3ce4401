"""Reads of one process of a job, for the others that read the same.

Nothing need be done together: a process that restores alone reads by itself. The n-th time that one reads a
path, it looks for what another one left there as its own n-th. The first to come reads, and the others wait
for it, but not for long. What is told may be old: whoever takes it compares the identity of the checkpoint
first, and reads by itself if that is another one.

| key | who sets it | what it says |
| --- | --- | --- |
| `penstock/read/<path>/<n>/reader` | the first to come | which process reads |
| `penstock/read/<path>/<n>/<k>` | the reader | what it read, in pieces |
| `penstock/read/<path>/<n>/told` | the reader | how many pieces there are; none if it has nothing to tell |
"""

from __future__ import annotations

__all__ = ("MOST_BYTES", "JobReads")

import hashlib
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final, final

from anyio import CancelScope, move_on_after

from penstock.kernel.coordination.job import Job
from penstock.kernel.coordination.operation_keys import ROOT
from penstock.kernel.errors import CoordinationError

_PIECE: Final = 2**20
MOST_BYTES: Final = 16 * _PIECE
"""The service keeps it in the memory of one process. What is longer each process reads itself."""
_WAIT_S: Final = 10.0
"""For who reads. A process that waits longer reads itself."""
_TELLING_S: Final = 5.0
_KEPT: Final = 2
"""So many of its reads each process leaves with the service."""


@final
@dataclass(slots=True, eq=False)
class JobReads:
    """The reads that the processes of a job give each other. In one event loop.

    Args:
        job: Of this process.
    """

    job: Job
    _n: Counter[str] = field(default_factory=Counter[str])
    _left: deque[str] = field(default_factory=deque[str])  # the keys of what this process told

    async def turn(self, path: str) -> tuple[str, bytes | None]:
        """Return what another process read of `path`; None if this one is to read it, and then to `tell`.

        Returns:
            The turn; empty if there is nothing to be told. And what was read.

        Cancellation:
            Delivered at once. If this process was to read, the others wait for a while and read themselves.
        """
        digest = hashlib.blake2b(
            f"{self.job.member.group}\0{path}".encode("utf-8", "surrogateescape"), digest_size=12
        )
        place = f"{ROOT}/read/{digest.hexdigest()}"
        self._n[place] += 1
        turn, calls = f"{place}/{self._n[place]}", self.job.calls
        try:
            if await calls.put(f"{turn}/reader", str(self.job.member.index).encode()):
                return turn, None

            n_pieces = await calls.wait(f"{turn}/told", _WAIT_S)
            found = [await calls.wait(f"{turn}/{k}", 0.0) for k in range(int(n_pieces or 0))]
        except CoordinationError:
            return "", None

        pieces = [piece for piece in found if piece is not None]
        return "", b"".join(pieces) if found and len(pieces) == len(found) else None

    async def tell(self, turn: str, data: bytes) -> None:
        """Tell the others what was read; nothing if it could not be, or is too long. Forgets what is older.

        Cancellation:
            Delivered once the service has answered, after `_TELLING_S` at most.
        """
        if not turn:
            return

        calls = self.job.calls
        pieces = (
            [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)] if len(data) <= MOST_BYTES else []
        )
        self._left.append(turn)
        with CancelScope(shield=True), move_on_after(_TELLING_S):
            try:
                for k, piece in enumerate(pieces):
                    await calls.put(f"{turn}/{k}", piece)

                await calls.put(f"{turn}/told", str(len(pieces)).encode())
                while len(self._left) > _KEPT:
                    await calls.delete(f"{self._left.popleft()}/")
            except CoordinationError:
                return  # the others read themselves
