"""A progress bar for what reads a checkpoint from end to end: how many bytes this process has read."""

from __future__ import annotations

__all__ = ("run_with_bar",)

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import anyio

from penstock.cli.terminal import Bar, NoBar, Output
from penstock.inspection.file_sizes import sizes_below
from penstock.kernel.errors import PenstockError
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
