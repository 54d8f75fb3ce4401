"""What every case of a job needs: what it knows of the job, a Checkpointer, and limits."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

import penstock
from penstock.config import Config, JobLimits
from penstock.errors import PeerError
from penstock.testing import Hang

LIMITS = JobLimits(join_s=40.0, write_s=40.0, silence_s=20.0, beat_s=0.5, call_s=10.0)
HASTY = JobLimits(join_s=40.0, write_s=40.0, silence_s=5.0, beat_s=0.5, call_s=5.0)


@dataclass
class Here:
    """What a case knows of the job."""

    folder: Path  #: the same for all processes
    rank: int
    count: int
    client: Any  #: of jax's coordination service
    leaves_at_once: bool = False

    @property
    def last(self) -> int:
        return self.count - 1

    async def meet(self, name: str) -> None:
        """Wait until all processes are here."""
        await anyio.to_thread.run_sync(
            self.client.wait_at_barrier, f"{self.folder.name} {name}", 30_000, abandon_on_cancel=True
        )

    def names(self) -> list[str]:
        """Return what lies in the case's folder."""
        return sorted(os.listdir(self.folder)) if self.folder.exists() else []


@asynccontextmanager
async def checkpointer(
    store: Any = None, limits: JobLimits = LIMITS, **options: Any
) -> AsyncGenerator[penstock.Checkpointer]:
    """Open a Checkpointer, and see that nothing is left of its budget at the end."""
    async with penstock.Checkpointer(store=store, config=Config(processes=limits), **options) as opened:
        yield opened

    assert opened.statistics().leased == 0, opened.statistics()


async def told_by(save: Awaitable[object]) -> list[Any]:
    """Wait for a save that another process ends; return what the error says of that one."""
    try:
        await save
    except PeerError as error:
        return [type(error).__name__, list(error.processes), error.peer_stage]

    return ["saved"]


async def reached_and_heard(hang: Hang) -> None:
    """Wait until this process hangs, and all others have heard where it is."""
    await hang.wait_reached()
    await anyio.sleep(2 * HASTY.beat_s)
