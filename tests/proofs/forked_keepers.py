"""Keepers, and the processes by which they finish steps, as forks of one that has imported what they need.

To start an interpreter and to import costs a keeper 0.3 s of processor, and a finishing process 0.7 s. All
that runs is what runs otherwise, but for the beginning of a finishing process: a keeper has threads, and so
a process forks it that was forked from the keeper before it had any.
"""

from __future__ import annotations

__all__ = ("run_forked_keeper",)

import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, final

import pytest
from anyio import wait_readable

from penstock.keeper import finishing, process
from penstock.steps.finishing import main as finish

_MOST_BYTES: Final = 2**17
"""Of a message: what is to be run, with its environment."""


def run_forked_keeper(given: Sequence[str]) -> int:
    """Be a keeper with these arguments, in a process that was just forked; return its exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # as a keeper has it, and what it starts
    forks = _Forks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finishing, "open_process", forks.open_process)
        return process.main(given)


@final
class _Forks:
    """Has a process without threads fork, which ends with this one. What it has forked goes on."""

    def __init__(self) -> None:
        self._asks, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            self._asks.close()
            _fork_again_and_again(answers)

        answers.close()

    async def open_process(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: str | None, **_: object
    ) -> _Forked:
        """Begin to finish the steps that a command is for, as `anyio.open_process` would."""
        over, at_its_end = os.pipe()
        try:
            message = pickle.dumps((command[-1], dict(env), cwd))
            socket.send_fds(self._asks, [message], [at_its_end])
        except BaseException:
            os.close(over)
            raise
        finally:
            os.close(at_its_end)

        return _Forked(int(self._asks.recv(_MOST_BYTES)), over)


@final
class _Forked:
    """A process that finishes steps: as much of `anyio.abc.Process` as a keeper uses.

    Args:
        pid: Its number.
        over: A pipe that it writes its exit status into, and that is closed when it ends.
    """

    def __init__(self, pid: int, over: int) -> None:
        self.pid, self._over = pid, over
        self.returncode: int | None = None

    async def wait(self) -> int:
        """Return its exit status, once it has ended."""
        if self.returncode is None:
            await wait_readable(self._over)
            said = os.read(self._over, 1)
            while os.read(self._over, 1):
                pass  # until it has ended

            os.close(self._over)
            self.returncode = said[0] if said else -signal.SIGKILL

        return self.returncode

    def kill(self) -> None:
        """Kill it."""
        os.kill(self.pid, signal.SIGKILL)


def _fork_again_and_again(answers: socket.socket) -> None:
    while True:
        message, descriptors, *_ = socket.recv_fds(answers, _MOST_BYTES, 1)
        if not message:
            os._exit(0)  # the keeper has ended

        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

        (over,) = descriptors
        child = os.fork()
        if not child:
            answers.close()
            _finish(over, *pickle.loads(message))

        os.close(over)
        answers.send(str(child).encode())


def _finish(over: int, tier: str, environ: Mapping[str, str], folder: str | None) -> None:
    """Be a finishing process, as `python -m penstock.steps.finishing` is one."""
    status: Any = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):
            os.dup2(nothing, stream)
        if folder is not None:
            os.chdir(folder)

        os.environ.clear()
        os.environ.update(environ)
        status = finish([tier])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os.write(over, bytes([status]))
        os._exit(status)
