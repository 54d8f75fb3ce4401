"""Has the steps of managers that died brought to where they should be: `penstock.steps.finishing`, run anew.

That needs stores, credentials and arrays, and so a process for each directory of steps does it. Whatever goes
wrong there, the keeper stays: it may have the only copy.
"""

from __future__ import annotations

__all__ = ("Finishers",)

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain, repeat
from subprocess import DEVNULL
from typing import Final, final

from anyio import CancelScope, Event, open_process, sleep, to_thread
from anyio.abc import Process, TaskGroup

from penstock.handlers.stores.keeper.messages import TakeOver
from penstock.keeper.tree import OF_PROCESSES, Tree

_TRY_AGAIN_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
_FAILED: Final = 1
_IS_OVER: Final = (0, 2)
"""Exit statuses after which nothing is tried again: it is done, or never will be."""


@final
class Finishers:
    """The processes that finish steps, one at most for each directory of steps.

    Args:
        tree: All directories.
        socket: Of the keeper.
    """

    def __init__(self, tree: Tree, socket: str) -> None:
        self._tree, self._socket = tree, socket
        self._running: dict[str, _Finisher] = {}
        self._managers: dict[str, TakeOver] = {}  # the last one of each directory

    def start(self, path: str, tasks: TaskGroup) -> None:
        """Finish the steps of a manager that died. If that was the process that does it, it is run again."""
        if path not in self._running:
            finisher = _Finisher(self._tree, path, self._socket, self._managers.get(path))
            self._running[path] = finisher
            tasks.start_soon(self._run, path, finisher)

    async def _run(self, path: str, finisher: _Finisher) -> None:
        try:
            await finisher.run()
        finally:
            del self._running[path]

    async def take_over(self, request: TakeOver, process: int) -> None:
        """End what finishes steps of this tier, of whichever process of a job they are.

        Args:
            request: Of the manager that comes.
            process: That asks. One that finishes these steps itself changes nothing.
        """
        path = request.path.strip("/")
        found = [each for known, each in self._running.items() if _of_all(known) == _of_all(path)]
        if any(each.process == process for each in found):
            return

        self._managers[path] = request
        for each in found:
            await each.end()


@final
class _Finisher:
    """Finishes the steps of one directory. What fails is tried again, until another manager comes."""

    def __init__(self, tree: Tree, path: str, socket: str, manager: TakeOver | None) -> None:
        self._tree, self._path, self._socket, self._manager = tree, path, socket, manager
        self._scope = CancelScope()
        self._ended = Event()
        self.process: int | None = None  #: that does it now

    async def run(self) -> None:
        """Do it, until it is done, or never will be."""
        try:
            with self._scope:
                for wait_s in chain(_TRY_AGAIN_S, repeat(_TRY_AGAIN_S[-1])):
                    if not self._tree.owes(self._path) or await self._try() in _IS_OVER:
                        return

                    await sleep(wait_s)
        finally:
            self._ended.set()

    async def end(self) -> None:
        """End it, since another manager comes; return when no process is left."""
        self._scope.cancel()
        await self._ended.wait()

    async def _try(self) -> int:
        try:
            process = await self._start()
        except (OSError, ValueError) as error:  # as if there is no memory, or no such variable can be
            sys.stderr.write(f"penstock keeper: the steps in {self._path!r} are not finished: {error}\n")
            return _FAILED

        self.process = process.pid
        try:
            return await process.wait()
        finally:
            with CancelScope(shield=True), suppress(ProcessLookupError):
                if process.returncode is None:
                    process.kill()
                    await process.wait()

            self.process = None

    async def _start(self) -> Process:
        command = [sys.executable, "-P", "-m", "penstock.steps.finishing", f"keeper:///{self._path}"]
        folder = None if self._manager is None else self._manager.folder
        if folder is not None and not await to_thread.run_sync(os.path.isdir, folder):
            folder = None

        started: list[Process] = []
        with CancelScope(shield=True):  # or there might be one that nothing ends
            # What it cannot do is said where the keeper says its own errors.
            started.append(
                await open_process(
                    command, stdin=DEVNULL, stdout=DEVNULL, stderr=None, env=self._environ(), cwd=folder
                )
            )

        return started[0]

    def _environ(self) -> Mapping[str, str]:
        """Return the settings of the process that died, with the code of this one."""
        environ = dict(os.environ if self._manager is None else self._manager.environ)
        environ.pop("PYTHONPATH", None)
        if "PYTHONPATH" in os.environ:
            environ["PYTHONPATH"] = os.environ["PYTHONPATH"]

        # Files are copied: a training that comes meanwhile is to find its accelerators free.
        return {**environ, "PENSTOCK_STORE__KEEPER__SOCKET": self._socket, "JAX_PLATFORMS": "cpu"}


def _of_all(path: str) -> str:
    """Return the path of a tier without the directory that each process of a job has."""
    first, _, inside = path.partition("/")
    return inside.partition("/")[2] if first == OF_PROCESSES else path
