"""Stops at every await point: acts just before the k-th time that an event loop lets somebody go on.

On asyncio everything that goes on does so through `call_soon`, also a task whose future is done; the
action is put in front of the k-th such call, when what the task waited for is granted and the task does
not know it yet. On trio an instrument acts before the k-th step of any task. Whatever else is suspended
then is suspended half-way. Counting on until the work ends visits every await point of every task.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import trio
from anyio.lowlevel import current_token
from trio.abc import Instrument


class Steps:
    """Counts, and acts once. `reached` says whether it has."""

    def __init__(self, at: int, act: Callable[[], object]) -> None:
        self.count = 0
        self.reached = False
        self._at = at
        self._act = act
        self._lock = threading.Lock()  # asyncio's other door, `call_soon_threadsafe`, is used by threads

    def due(self) -> bool:
        """Count a step; return whether it is the one to act before."""
        with self._lock:
            self.count += 1
            return self.count == self._at

    def act(self) -> None:
        """Do what was to be done."""
        self.reached = True
        self._act()


@contextmanager
def acting_at(at: int, act: Callable[[], object]) -> Generator[Steps]:
    """Call `act` before the at-th step (the first is 1) that the running loop makes in this context."""
    steps = Steps(at, act)
    stepping = _on_trio if current_token().backend_class.__module__.endswith("trio") else _on_asyncio
    with stepping(steps):
        yield steps


@contextmanager
def _on_asyncio(steps: Steps) -> Generator[None]:
    loop: Any = asyncio.get_running_loop()
    soon, threadsafe = loop.call_soon, loop.call_soon_threadsafe

    def call_soon(callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        if steps.due():
            soon(steps.act)

        return soon(callback, *args, context=context)

    def call_soon_threadsafe(callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        if steps.due():
            threadsafe(steps.act)

        return threadsafe(callback, *args, context=context)

    loop.call_soon, loop.call_soon_threadsafe = call_soon, call_soon_threadsafe
    try:
        yield
    finally:
        del loop.call_soon, loop.call_soon_threadsafe


@contextmanager
def _on_trio(steps: Steps) -> Generator[None]:
    instrument = _Stepping(steps)
    trio.lowlevel.add_instrument(instrument)
    try:
        yield
    finally:
        trio.lowlevel.remove_instrument(instrument)


class _Stepping(Instrument):
    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._steps.due():
            self._steps.act()
