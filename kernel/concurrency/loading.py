"""Importing modules beside a running event loop."""

from __future__ import annotations

__all__ = ("import_beside_the_loop",)

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from anyio import create_task_group

from penstock.kernel.concurrency.interpreter_settings import calm_interpreter, count_as_old
from penstock.kernel.concurrency.threads import Threads

if TYPE_CHECKING:
    from penstock.kernel.config.config import LoopOptions

# AnyIO imports it at its first use, which is in the event loop. Its module for trio is loaded in no time.
import_module("anyio._backends._asyncio")


async def import_beside_the_loop(imports: Callable[[], object], options: LoopOptions) -> None:
    """Call a function that imports modules in a worker thread, so that the event loop runs meanwhile.

    A thread alone is not enough: the objects of some hundred modules set off full collections, and a thread
    that runs module code hands the interpreter on only every 5 ms. So both settings are changed, as for a
    save. A native library that is not in the page cache still holds the interpreter while it is read.

    Args:
        imports: What imports them.
        options: Which settings may be changed.

    Raises:
        ImportError: If one cannot be imported.

    Cancellation:
        Delivered once the imports are done.
    """
    async with create_task_group() as tasks:
        with calm_interpreter(tasks, options):
            await Threads(1).run(_import, imports, options.pause_collector)


def _import(imports: Callable[[], object], collector_paused: bool) -> None:
    imports()
    if collector_paused:
        count_as_old()  # modules stay
