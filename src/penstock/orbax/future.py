"""What a handler's `async_save` returns: things whose `result` waits for work that goes on already."""

from __future__ import annotations

__all__ = (
    "ChainedFuture",
    "CommitFutureAwaitingContractedSignals",
    "Future",
    "NoopFuture",
    "PipelineFuture",
    "remaining_secs",
)

from penstock.orbax.v0.common.save_future import (
    ChainedFuture,
    CommitFutureAwaitingContractedSignals,
    Future,
    NoopFuture,
    PipelineFuture,
    remaining_secs,
)
