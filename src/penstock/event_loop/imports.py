"""Importing modules while an event loop runs."""

from __future__ import annotations

__all__ = ("NeededModules", "import_beside_the_loop", "load")

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

from penstock.event_loop.interpreter_settings import calm_part, count_as_old
from penstock.kernel.concurrency.threads import Threads

if TYPE_CHECKING:
    from penstock.event_loop.interpreter_settings import LoopOptions

NeededModules: TypeAlias = Mapping[str, str]
"""Modules, each with a name that it defines after its own imports."""

# AnyIO imports it at its first use, which is in the event loop. Its module for trio is loaded in no time.
import_module("anyio._backends._asyncio")


async def load(modules: NeededModules, options: LoopOptions) -> None:
    """Import modules as `import_beside_the_loop` does; if all are there, do nothing, not even a checkpoint.

    Args:
        modules: The modules.
        options: Which settings may be changed.
    """
    # A module is in `sys.modules` from the beginning of its import, which may be under way in a thread; its
    # names are not.
    missing = [module for module, name in modules.items() if not hasattr(sys.modules.get(module), name)]
    if missing:
        await import_beside_the_loop(lambda: [import_module(module) for module in missing], options)


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
    async with calm_part(options):
        await Threads(1).run(_import, imports, options.pause_collector)


def _import(imports: Callable[[], object], collector_paused: bool) -> None:
    imports()
    if collector_paused:
        count_as_old()  # modules stay
