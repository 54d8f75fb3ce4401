"""Progress bars for what reads a checkpoint: the bytes this process has read, or the leaves."""

from __future__ import annotations

__all__ = ("read_each", "run_with_bar")

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio

from penstock.cli.terminal import Bar, NoBar, Output
from penstock.inspection.file_sizes import sizes_below
from penstock.inspection.stored_leaves import ItemFacts, LeafFacts
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import PenstockError
from penstock.kernel.protocols.leaf import KeyPath
from penstock.kernel.protocols.stores import Store
from penstock.stores.store_finder import store_of

T = TypeVar("T")
_EVERY_S: Final = 0.1
_COUNTS: Final = Path("/proc/self/io")


def run_with_bar(output: Output, path: str, function: Callable[[], Awaitable[T]]) -> T:
    """Run `function` in an event loop, and show meanwhile how much of what is at `path` was read.

    It is what the system counts for this process, so the last percent may be off; where it counts
    nothing, only the time is shown.

    Raises:
        BaseException: Whatever `function` raises, as it is.
    """
    return anyio.run(partial(_run, output, path, function))


async def read_each(
    store: Store, items: Sequence[ItemFacts], output: Output, digest: Callable[[Any], T]
) -> list[tuple[ItemFacts, LeafFacts, T]]:
    """Return what `digest` makes of the value of each leaf that has one, with a bar meanwhile.

    Args:
        store: Where the checkpoint is.
        items: Of one checkpoint, with the leaves to read.
        output: Where the bar is shown.
        digest: Takes an array, or a text; most values are not kept.

    Raises:
        PenstockError: What `read_stored_values` raises.
    """
    from penstock.inspection.leaf_values import read_stored_values

    found: dict[tuple[str, KeyPath], T] = {}
    chosen = [(item, [leaf for leaf in item.leaves if leaf.holds_value]) for item in items]
    with output.bar(sum(len(leaves) for _, leaves in chosen), "leaves") as bar:
        for item, leaves in chosen:
            by_keys = {leaf.keys: leaf for leaf in leaves}
            async for values in read_stored_values(store, Threads(), item, leaves):
                for keys, value in values.items():
                    found[item.name, keys] = digest(value)
                    bar.show(len(found), by_keys[keys].key_path)

    return [
        (item, leaf, found[item.name, leaf.keys])
        for item, leaves in chosen
        for leaf in leaves
        if (item.name, leaf.keys) in found
    ]


async def _run(output: Output, path: str, function: Callable[[], Awaitable[T]]) -> T:
    with output.bar(None, "bytes") as bar:
        if isinstance(bar, NoBar):
            return await function()

        found: list[T] = []
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_show, bar, path)
            try:
                found.append(await function())
            except Exception as error:
                failure = error  # raised below, as it is and not in a group

            tasks.cancel_scope.cancel()

    if failure is not None:
        raise failure

    return found[0]


async def _show(bar: Bar, path: str) -> None:
    before = _read_bytes()
    total = await anyio.to_thread.run_sync(_total, path)
    while True:
        now = _read_bytes()
        done = 0 if now is None or before is None else now - before
        bar.show(done if total is None else min(done, total), total=total)
        await anyio.sleep(_EVERY_S)


def _total(path: str) -> int | None:
    try:
        return sizes_below(*store_of(path)).nbytes
    except PenstockError:
        return None  # the command says what is wrong


def _read_bytes() -> int | None:
    try:
        return int(_COUNTS.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
