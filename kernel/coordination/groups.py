"""Finds out that the processes of a job were given different lists of those that take part."""

from __future__ import annotations

__all__ = ("differing_group",)

from contextlib import suppress

from penstock.kernel.coordination.job import Job
from penstock.kernel.coordination.operation_keys import Joining, OperationKeys, join_folder
from penstock.kernel.coordination.touch import Touch
from penstock.kernel.coordination.verdicts import verdict_of
from penstock.kernel.errors import CoordinationError, PlansDifferError


async def differing_group(job: Job, path: str, *, is_local: bool) -> PlansDifferError | None:
    """Look whether others begin an operation with another list, which shares a process with that of this one.

    They are told, if that is so: they would wait for processes that do not come. Groups that share none
    know nothing of each other.

    Args:
        job: What this process knows of it.
        path: What the operation is about.
        is_local: Whether each process publishes on a disk of its own.

    Returns:
        What this process is to raise.
    """
    for data in (await job.calls.under(join_folder(path, job.about))).values():
        found = Joining.decoded(data)
        if found.group == job.group or not found.shares_processes(job.processes):
            continue

        theirs, own = (
            f"[{group.replace(',', ', ')}]" if group else "all" for group in (found.group, job.group)
        )
        line = f"option active_processes: others have {theirs}, process {job.index} has {own}"
        error = PlansDifferError(job.index, (line,))
        touch = Touch(job, OperationKeys(found.identity), path, is_local=is_local)
        with suppress(CoordinationError):
            await touch.claim(verdict_of(error, job.index, "join"))

        return error

    return None
