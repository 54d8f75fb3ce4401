"""Ends saves when their process exits, gets a SIGTERM, or forks, or their loop is closed."""

from __future__ import annotations

__all__ = ("Stopping",)

import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

from anyio import CancelScope, Event, move_on_after
from anyio.abc import TaskGroup

from penstock.checkpointer.save_future import SaveFuture
from penstock.checkpointer.saves import BackgroundSaves
from penstock.config.config import StoppingOptions
from penstock.kernel.concurrency.threads import HomeProcess, LoopHandle, start

LOOK_S = 0.2  # between two checks whether the relevant threads still run
WATCH_S = 1.0  # the same, for as long as a Checkpointer is open


@final
class Stopping:
    """One Checkpointer's care for the end of its process, for SIGTERM and for forks.

    Args:
        options: As configured.
        background: Its saves.
    """

    __slots__ = (
        "_background",
        "_came",
        "_loop",
        "_options",
        "_previous",
        "_sigterm_came",
        "home",
        "keeps",
        "keeps_alive",
    )

    def __init__(self, options: StoppingOptions, background: BackgroundSaves) -> None:
        self._options = options
        self._background = background
        self.home = HomeProcess()  #: where it was entered: a fork has a copy of this object
        self._loop: LoopHandle | None = None
        self._came: Event | None = None
        self._previous: Any = None
        self._sigterm_came = False
        self.keeps_alive = False
        """Whether the interpreter waits for its saves, as it ends without this loop's thread. A loop in the
        main thread needs no waiting: it has ended when the interpreter ends."""
        self.keeps: object = None  #: kept from being collected before the loop that it belongs to

    @property
    def sigterm_came(self) -> bool:
        """True if a SIGTERM is being held back, or was."""
        return self._sigterm_came

    @contextmanager
    def watching(self, tasks: TaskGroup) -> Generator[None]:
        """Install the handling of exit, SIGTERM and fork, while the Checkpointer is open."""
        self.home, self._loop, self._came = HomeProcess(), LoopHandle(), Event()
        self.keeps_alive = self._options.at_exit != "abandon" and threading.current_thread().daemon
        with self._watching_loop(self._loop):
            if self._options.sigterm_s <= 0:
                yield
                return

            scope = CancelScope()
            tasks.start_soon(self._wait_and_go, scope, self._came, name="penstock SIGTERM")
            try:
                with self.holding_sigterm():
                    yield
            finally:
                scope.cancel()

    @contextmanager
    def _watching_loop(self, loop: LoopHandle) -> Generator[None]:
        """Have a thread end the saves of this context if its loop is closed, or its thread ends, meanwhile.

        Nothing else would: a loop that was stopped and closed runs no clean-up. Where the loop's thread is a
        daemon, so are its worker threads, and the interpreter does not wait for them.
        """
        loop_thread = threading.current_thread()
        if not loop.can_be_closed or loop_thread.daemon:
            yield
            return

        left = threading.Event()
        watcher = threading.Thread(
            target=_watch_loop,
            args=(loop, loop_thread, left, self._background),
            name="penstock watches its event loop",
            daemon=False,  # it is what ends the other threads when the interpreter waits for them
        )
        start(watcher)
        try:
            yield
        finally:
            left.set()

    def keep_alive(self, save: SaveFuture) -> None:
        """Make the interpreter wait for a save at exit. For a loop whose thread would die with it."""
        loop_thread = threading.current_thread()
        # Not a daemon, so the interpreter joins it before it ends; it serves no other purpose.
        keeper = threading.Thread(
            target=_keep_alive,
            args=(save, loop_thread, self._options.at_exit_s),
            name=f"penstock keeps alive {save.path}",
            daemon=False,
        )
        start(keeper)

    @contextmanager
    def holding_sigterm(self) -> Generator[None]:
        """Hold SIGTERM back in this context while saves are under way, if so configured.

        Does nothing outside the main thread: Python handles signals only there.
        """
        wanted = self._options.sigterm_s > 0 and threading.current_thread() is threading.main_thread()
        if not wanted:
            yield
            return

        self._previous = signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            yield
        finally:
            self._let_go()

    def _on_sigterm(self, _: int, __: FrameType | None) -> None:
        """Begin to wait for the saves. At the second signal, or without saves, let the signal act."""
        if self._sigterm_came or self._loop is None or self._came is None or not self._background.under_way:
            self._sigterm_came = True
            self._let_go()
            return

        self._sigterm_came = True
        self._loop.post(self._came.set)

    async def _wait_and_go(self, scope: CancelScope, came: Event) -> None:
        with scope:
            await came.wait()
            with move_on_after(self._options.sigterm_s):
                await self._background.wait_ended()

            # To the main thread, perhaps not the loop's; there it is handled as the second SIGTERM.
            os.kill(os.getpid(), signal.SIGTERM)

    def _let_go(self) -> None:
        if signal.getsignal(signal.SIGTERM) != self._on_sigterm:
            return

        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
        if self._sigterm_came:
            signal.raise_signal(signal.SIGTERM)


def _watch_loop(
    loop: LoopHandle, loop_thread: threading.Thread, left: threading.Event, background: BackgroundSaves
) -> None:
    """Return when the Checkpointer was left. If its loop can no longer run, end what waits for it."""
    while not left.wait(WATCH_S):
        if not loop.is_closed and loop_thread.is_alive():
            continue

        loop.end_workers()
        for path in background.abandon():
            _tell(
                f"the event loop ended in the middle of the save of {path!r}; it was not completed, and what "
                "was there before is as it was. Leave the Checkpointer before the loop is stopped"
            )

        return


def _keep_alive(save: SaveFuture, loop_thread: threading.Thread, most_s: float) -> None:
    """Return when the save has ended or can no longer end."""
    over = threading.Event()
    save.add_done_callback(lambda _: over.set())
    ending_since: float | None = None
    while not over.wait(LOOK_S):
        if not loop_thread.is_alive():
            return
        if threading.main_thread().is_alive():
            continue

        ending_since = time.monotonic() if ending_since is None else ending_since
        if time.monotonic() - ending_since > most_s:
            _tell(f"the save of {save.path!r} did not end within {most_s:g} s of interpreter exit")
            return

    # While the main thread runs, its own code sees the failure.
    if not threading.main_thread().is_alive() and save.exception() is not None:
        _tell(f"the save of {save.path!r} failed during interpreter exit: {save.exception()}")


def _tell(problem: str) -> None:
    """Report on stderr; no code is left that could see the failure."""
    sys.stderr.write(f"penstock: {problem}\n")
