"""What the coordination service keeps of operations that failed, for processes that come to them late."""

from __future__ import annotations

__all__ = ("MOST_OUTCOMES", "forget", "keep_outcome")

from typing import Final

from penstock.kernel.coordination.job import Job
from penstock.kernel.coordination.operation_keys import Joining, OperationKeys, outcome_key

MOST_OUTCOMES: Final = 4
"""Of how many operations that failed the keys are kept, for processes that have not come or not left."""


async def keep_outcome(job: Job, identity: str, join_key: str) -> None:
    """Keep the keys of an operation until as many others have failed after it. The primary's.

    The service itself knows which are kept: operations fail in one Checkpointer after another, each of which
    is closed before the late ones come.

    Args:
        job: What this process knows of the job.
        identity: Of the operation.
        join_key: What says that it is to be joined.
    """
    calls = job.calls
    number = await calls.count(outcome_key(job.index))
    key = outcome_key(job.index, number % MOST_OUTCOMES)
    oldest = await calls.wait(key, 0.0)
    await calls.put(key, f"{identity} {join_key}".encode(), replace=True)
    if oldest is not None:
        old_identity, _, old_key = oldest.decode().partition(" ")
        await forget(job, old_identity, old_key)


async def forget(job: Job, identity: str, join_key: str | None = None) -> None:
    """Delete all keys of an operation, and what says that it is to be joined, if that still does.

    Args:
        job: What this process knows of the job.
        identity: Of the operation.
        join_key: What may say that it is to be joined. The primary's; None if nothing does.
    """
    if join_key is not None:
        await _take_back(job, identity, join_key)

    await job.calls.delete(OperationKeys(identity).all)


async def _take_back(job: Job, identity: str, key: str) -> None:
    said = await job.calls.wait(key, 0.0)
    if said is not None and Joining.decoded(said).identity == identity:
        await job.calls.delete(key)

    now = job.open.get(key)
    if now == identity:
        del job.open[key]
    elif now is not None:  # begun meanwhile, by the next save to that path
        await job.calls.put(key, Joining(now, job.group).encoded(), replace=True)
