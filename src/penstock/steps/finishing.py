"""Finishes what a manager that died has left in a tier: `python -m penstock.steps.finishing TIER`.

A keeper runs it in a process of its own when the training that saved into it is gone. It opens a manager on
the same tiers and root, which brings the newest step wherever it is not yet, and deletes no step.

Of a job, each keeper has parts of the steps. So each runs it for each process that was there, and these
processes agree as those of the job did; by files in the root, since the service of the job has ended with it.
"""

from __future__ import annotations

__all__ = ("finish", "finish_together", "main")

import secrets
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final

import anyio

from penstock.handlers.coordinators.job_coordinator import JobCoordinator
from penstock.handlers.coordinators.job_options import JobLimits, JobOptions
from penstock.handlers.coordinators.store_key_values import StoreKeyValues
from penstock.handlers.stores.publishing.paths import OF_PROCESSES, path_or_url
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import CoordinationError, PenstockError, RootInUseError, StorageError
from penstock.kernel.protocols.save_format import SaveFormat
from penstock.kernel.protocols.stores import Store
from penstock.steps.keep_policies import KeepAll
from penstock.steps.manager import CheckpointManager
from penstock.steps.tier_record import TierRecord, read_record
from penstock.steps.tiers import Disk, Memory, path_of
from penstock.stores.store_finder import store_at

PLACE: Final = "_PENSTOCK_FINISHING"
"""In the root: where these processes agree. It is removed when they are done."""

LIMITS: Final = JobLimits(join_s=120.0, silence_s=30.0, beat_s=4.0)
"""The others may have to wait until the keepers of all hosts know that the job is gone, and longer than a
keeper waits between two tries: so all that fail at different times come together again. Each beat is some
requests to the store that the root is in."""

_LOOKS_S: Final = 2.0


async def finish(tier: str, limits: JobLimits = LIMITS) -> bool:
    """Bring the newest step of a tier to the other tiers of its root, and to the root.

    Args:
        tier: Its directory.
        limits: How long the processes of a job wait for each other.

    Returns:
        False if the tier does not say what it is a tier of. True, too, if another manager has the root by
        now: it does that itself.

    Raises:
        PenstockError: If it cannot be brought there now.
    """
    path = path_or_url(tier)
    record = await Threads(1).run(read_record, store_at(path), path)
    if record is None or not record.root or record.names is None:
        return False

    memory, process = Memory(keep=KeepAll()), _process_of(path)
    if record.processes and process is None:  # it does not say whose parts these are
        return False

    inside = path_of(memory, record.root, process)
    forms = {each: SaveFormat(**form) for each, form in record.formats.items()}
    codecs = {each: form.codec for each, form in forms.items()}
    tiers = [
        memory if each == inside else Disk(each, keep=KeepAll(), codec=codecs.get(each))
        for each in record.tiers
    ]
    form = forms.get(record.root)
    manager = partial(CheckpointManager, record.root, tiers=tiers, names=record.names, save_format=form)
    try:
        if process is None:
            async with manager() as opened:
                await opened.wait()
        else:
            job = JobOptions(local_root=record.local_root)

            async def bring(coordinator: JobCoordinator) -> None:
                async with manager(coordinator=coordinator, job=job) as opened:
                    await opened.wait()

            await finish_together(record, process, bring, limits)
    except RootInUseError:
        return True

    return True


def _process_of(path: str) -> int | None:
    """Return whose directory in the keeper a path is in; None if it is of no process of a job."""
    if not path.startswith(f"{OF_PROCESSES}/"):
        return None

    index = path[len(OF_PROCESSES) + 1 :].partition("/")[0]
    return int(index) if index.isdigit() else None


async def finish_together(
    record: TierRecord,
    process: int,
    work: Callable[[JobCoordinator], Awaitable[object]],
    limits: JobLimits = LIMITS,
    store: Store | None = None,
) -> None:
    """Do some work in each of the processes that finish for those of a job, which agree by files in the root.

    Each attempt has a directory of its own, which the first of them names: what an earlier one has left there
    is not taken for what is said now. Who has come to one that was given up goes on to the next as soon as
    that has a name. The last one to succeed removes all.

    Args:
        record: Of the tier.
        process: For which of them.
        work: Done with what they agree by; once more for each newer attempt.
        limits: How long they wait for each other.
        store: That the root is in; by default the one of its path.

    Raises:
        CoordinationError: If the first one does not come.
        PenstockError: What `work` raises in the newest attempt.
    """
    run, place = Threads(2).run, f"{record.root}/{PLACE}"
    store = store_at(record.root) if store is None else store
    known = StoreKeyValues(store, place)

    async def remove() -> None:
        with suppress(StorageError):  # who is still in an earlier attempt writes there; it does no harm
            await run(store.remove_tree, place)

    if process == record.processes[0]:
        await remove()
        await run(known.put, "attempt", secrets.token_hex(8).encode(), True)

    attempt = await run(known.wait, "attempt", limits.join_s)
    if attempt is None:
        raise CoordinationError(f"no process finishes the steps of process {record.processes[0]} of the job")

    async def newer() -> bytes | None:
        with suppress(CoordinationError):  # the next look may succeed
            found = await run(known.wait, "attempt", 0.0)
            return None if found == attempt else found

        return None

    while True:
        service = StoreKeyValues(store, f"{place}/{attempt.decode()}")
        options = JobOptions(active_processes=record.processes)
        coordinator = JobCoordinator(service, process, record.processes[-1] + 1, limits, options)
        failure = await _until(newer, partial(work, coordinator))
        following = await newer()
        if failure is None:
            break
        if following is None:
            raise failure

        attempt = following

    if await run(service.count, "finished") == len(record.processes):
        await remove()


async def _until(
    newer: Callable[[], Awaitable[object]], work: Callable[[], Awaitable[object]]
) -> PenstockError | None:
    """Do some work, but no longer than until there is something newer; return why it is not done."""
    failure: PenstockError | None = CoordinationError("the others have begun anew")
    async with anyio.create_task_group() as tasks:

        async def look() -> None:
            while True:
                await anyio.sleep(_LOOKS_S)
                if await newer() is not None:
                    tasks.cancel_scope.cancel()

        tasks.start_soon(look)
        try:
            await work()
            failure = None
        except PenstockError as error:
            failure = error

        tasks.cancel_scope.cancel()

    return failure


def main(arguments: list[str]) -> int:
    """Finish one tier; return 0 if that is done, 2 if it cannot be, 1 if it failed and may be tried again."""
    try:
        return 0 if anyio.run(partial(finish, arguments[0])) else 2
    except PenstockError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
