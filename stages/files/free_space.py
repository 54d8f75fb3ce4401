"""Room on the medium: whether a save fits before it begins, and which leaf did not fit."""

from __future__ import annotations

__all__ = ("check_room", "naming_leaf")

from collections.abc import Generator
from contextlib import contextmanager

from penstock.kernel.errors import NoSpaceError, StorageError
from penstock.kernel.messages.leaves import Leaf, Leaves
from penstock.kernel.messages.save import SavePlan
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.store_capabilities import FreeSpace


def check_room(run: SaveRun, leaves: Leaves, plan: SavePlan) -> None:
    """Compare what will be written with what is free. Blocking, but for one quick call.

    Leaves that are linked to a base are not among `leaves` and do not count. What a codec leaves of a chunk
    is not known beforehand: such a save is not refused, and the event `save.may_not_fit` says that it may
    fail later. A store that is no `FreeSpace` is not asked.

    Raises:
        NoSpaceError: If it does not fit; names the first leaf that does not.
        StorageError: If the medium does not say.
    """
    store = run.store
    each = [spec.nbytes for spec in plan.specs] if plan.joint is None else plan.joint.shares
    sizes = [each[index] for index in leaves.indices]
    needed = sum(sizes)
    if not needed or not isinstance(store, FreeSpace):
        return

    free = store.free_bytes(run.path)
    if free is None or needed <= free:
        return
    if not plan.sizes_known:
        run.events.warning("save.may_not_fit", path=run.path, bytes_needed=needed, bytes_free=free)
        return

    reached = 0
    for index, nbytes in zip(leaves.indices, sizes, strict=True):
        reached += nbytes
        if reached > free:
            raise NoSpaceError("save", run.path, needed, free, leaves.infos[index].key_path)


@contextmanager
def naming_leaf(leaf: Leaf) -> Generator[None]:
    """Have a `StorageError` of the block name the leaf that was being written."""
    try:
        yield
    except StorageError as error:
        if error.key_path is None:
            error.key_path = leaf.info.key_path
        raise
