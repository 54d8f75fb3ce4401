"""How a process comes to the operation on a path that it is to take part in."""

from __future__ import annotations

__all__ = ("begin_operation", "find_operation")

from collections.abc import Callable

from anyio import CancelScope, move_on_after, sleep

from penstock.kernel.coordination.groups import differing_group
from penstock.kernel.coordination.job import Job
from penstock.kernel.coordination.operation_keys import Joining
from penstock.kernel.coordination.touch import Touch
from penstock.kernel.errors import PeerSilentError

LOOK_BEATS = 10
"""After so many beats without the primary a process looks whether that has another list of processes."""


async def begin_operation(job: Job, path: str, touch: Touch) -> None:
    """Say that an operation on `path` is to be joined. The primary's.

    Cancellation:
        Not before the service has answered, or `JobLimits.call_s` has passed: who ends it tells who joined.
    """
    key = job.join_key(path)
    job.open[key] = touch.identity
    with CancelScope(shield=True), move_on_after(job.limits.call_s):
        await touch.come()
        await job.calls.put(key, Joining(touch.identity, job.group).encoded(), replace=True)


async def find_operation(job: Job, path: str, enter: Callable[[str], Touch], *, is_local: bool) -> None:
    """Return once this process has come to the operation that the primary has begun. For the others.

    Args:
        job: What this process knows of the job.
        path: What the operation is about.
        enter: Returns what stays in touch about an operation; the same as before if that has the same id.
        is_local: Whether each process publishes on a disk of its own.

    Raises:
        PlansDifferError: If others have another list of those that take part.
        PeerSilentError: If the primary begins none within `JobLimits.patience_s`.
    """
    with move_on_after(job.limits.patience_s):
        while True:
            found = await job.calls.wait(job.join_key(path), LOOK_BEATS * job.limits.beat_s)
            if found is not None:
                if await enter(Joining.decoded(found).identity).come():
                    return

                # One that failed, which this process has left: the primary has not begun the next.
                await sleep(job.limits.beat_s)
                continue

            differs = await differing_group(job, path, is_local=is_local)
            if differs is not None:
                raise differs  # there is nothing of its own that others could have joined

    raise PeerSilentError({job.primary: None}, job.limits.patience_s)
