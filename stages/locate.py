"""The first stage of a restore: a path to the checkpoint there, with its documents read."""

from __future__ import annotations

__all__ = ("Locate",)

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import final

from penstock.kernel.messages import Located, RestoreRequest
from penstock.kernel.run import RestoreRun
from penstock.kernel.stage import Actor


@final
@dataclass(frozen=True, slots=True)
class Locate:
    """Takes a `RestoreRequest`, yields a `Located`. Reads documents and index, no array bytes.

    Raises:
        NotACheckpointError: If there is nothing to restore at the path.
        IncompleteCheckpointError: If a save was interrupted there.
        CorruptCheckpointError: If a document is damaged.
    """

    @property
    def concurrency(self) -> int:
        """One: there is one path."""
        return 1

    @asynccontextmanager
    async def open(self, run: RestoreRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one restore."""

        async def locate(request: RestoreRequest, /) -> Located:
            checkpoint = await run.threads.run(run.layout.open, run.store, request.path, request.item)
            return Located(checkpoint, request.like, request.has_like)

        yield locate
