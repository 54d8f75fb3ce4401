"""Programs that are forks of a process that has imported what they need: a tenth of the time of a new one."""

from __future__ import annotations

__all__ = ("Process", "fork")

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Protocol, final

import pytest


class Process(Protocol):
    """What `subprocess.Popen` and a fork have in common."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def kill(self) -> None: ...


def fork(main: Callable[[Sequence[str]], int], given: Sequence[str], imported: Sequence[str]) -> Process:
    """Run a program with this process's environment.

    Args:
        main: It, as its module has it. What it returns is the exit status.
        given: Its arguments.
        imported: Modules that it needs. The first call of a test run decides which all forks have.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *imported])
    path = os.pathsep.join(filter(None, sys.path))
    environ = {**os.environ, "PYTHONPATH": path}
    process = context.Process(target=_run, args=(main, list(given), environ), daemon=True)
    # The first call starts the server of forks, which imports by the same path.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        process.start()

    return _Forked(process)


def _run(main: Callable[[Sequence[str]], int], given: Sequence[str], environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    sys.exit(main(given))


@final
class _Forked:
    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a fork", timeout)

        return code

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended since, as of a process that Popen began
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
