"""Finishes what a manager that died has left in a tier: `python -m penstock.steps.finishing TIER`.

A keeper runs it in a process of its own when the training that saved into it is gone. It opens a manager on
the same tiers and root, which brings the newest step wherever it is not yet, and deletes nothing.
"""

from __future__ import annotations

__all__ = ("finish", "main")

import sys
from functools import partial

import anyio

from penstock.handlers.stores.publishing.paths import path_or_url
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import PenstockError, RootInUseError
from penstock.steps.keep_policies import KeepAll
from penstock.steps.manager import CheckpointManager
from penstock.steps.tier_record import read_record
from penstock.steps.tiers import Disk, Memory, path_of
from penstock.stores.store_finder import store_at


async def finish(tier: str) -> bool:
    """Bring the newest step of a tier to the other tiers of its root, and to the root.

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
    if record.n_processes > 1:  # here is a part of each step
        return False

    memory = Memory(keep=KeepAll())
    inside = path_of(memory, record.root)
    tiers = [memory if each == inside else Disk(each, keep=KeepAll()) for each in record.tiers]
    try:
        async with CheckpointManager(record.root, tiers=tiers, names=record.names) as manager:
            await manager.wait()
    except RootInUseError:
        return True

    return True


def main(arguments: list[str]) -> int:
    """Finish one tier; return 0 if that is done, 2 if it cannot be, 1 if it failed and may be tried again."""
    try:
        return 0 if anyio.run(partial(finish, arguments[0])) else 2
    except PenstockError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
