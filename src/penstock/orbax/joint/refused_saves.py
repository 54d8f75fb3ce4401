"""Telling the other processes of a job that this one takes no part in a save."""

from __future__ import annotations

__all__ = ("refuse_save",)

from contextlib import suppress
from functools import partial

from penstock.blocking.background import run_sync
from penstock.checkpointer.checkpointer import Checkpointer
from penstock.kernel.config.job_options import JobOptions
from penstock.kernel.errors import PenstockError


def refuse_save(path: str, error: Exception, job: JobOptions) -> None:
    """Tell the others, who would wait for this process, why it does not come. Blocking; raises nothing of it.

    Args:
        path: What is to be saved, as they name it.
        error: What this process failed with before it began.
        job: Which processes save together.
    """
    with suppress(PenstockError):  # of a process that is no part of the job
        run_sync(partial(_refuse, path, error, job))


async def _refuse(path: str, error: Exception, job: JobOptions) -> None:
    async with Checkpointer(job=job) as checkpointer:
        operation = checkpointer.engine.at(path).operation(path)
        if operation is not None:
            await operation.refuse(error)
