"""Where the tasks of all event loops of this process wait, for the log of a job that hangs."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any


def tell_tasks_after(seconds: float) -> None:
    """Print it once, after so many seconds, unless the process has ended by then."""
    timer = threading.Timer(seconds, lambda: sys.stdout.write(f"{task_stacks()}\n"))
    timer.daemon = True
    timer.start()


def task_stacks() -> str:
    """Return, for each task that is not done, its name and the places of the calls that it awaits."""
    told: list[str] = []
    for task, coroutine in _tasks():
        told.append(f"task {getattr(task, 'name', None) or task.get_name()}")
        told.extend(f"    {place}" for place in _places(coroutine))

    return "\n".join(told)


def _tasks() -> Iterator[tuple[Any, Any]]:
    of_trio: Any = getattr(sys.modules.get("trio.lowlevel"), "Task", ())
    for found in gc.get_objects():
        if isinstance(found, asyncio.Task) and not found.done():
            yield found, found.get_coro()
        elif of_trio and isinstance(found, of_trio):
            yield found, getattr(found, "coro", None)


def _places(coroutine: Any) -> Iterator[str]:
    while coroutine is not None:
        for kind in ("cr", "ag", "gi"):
            if hasattr(coroutine, f"{kind}_frame"):
                break
        else:
            return

        frame = getattr(coroutine, f"{kind}_frame")
        if frame is not None:
            yield f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"

        coroutine = getattr(coroutine, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
