"""The life of the process: one for each user and host, at a socket in a folder that is that user's own.

A file lock decides between two that are started. It ends with the process; its file stays.
"""

from __future__ import annotations

__all__ = ("IS_RUNNING", "arguments", "main", "running_keepers", "share_of_memory")

import fcntl
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio

from penstock.handlers.stores.keeper.messages import check_folder
from penstock.keeper.pages import PagePool
from penstock.keeper.server import Keeper
from penstock.kernel.memory.memory_limit import MemoryReading, SystemMemory

IS_RUNNING: Final = 3
"""The exit status of one that finds another one there."""

_MODULE: Final = "penstock.keeper"
_BACKLOG: Final = 128
_SHARE: Final = 2
_LEAST_MARGIN: Final = 16 * 2**20
_MOST_MARGIN: Final = 2**30
_MARGIN: Final = 20  # the part of all memory that is left to others


def arguments(socket_path: str, limit_bytes: int | None, idle_s: float, *, detached: bool) -> list[str]:
    """Return the arguments of `main`.

    Args:
        socket_path: Where it listens.
        limit_bytes: The most memory for files; None for `share_of_memory`.
        idle_s: After how many seconds without a client it ends; `inf` for never.
        detached: Whether it goes on in the background, and the process that was started ends once it listens.
    """
    return [socket_path, "auto" if limit_bytes is None else str(limit_bytes), str(idle_s), str(int(detached))]


def running_keepers() -> Sequence[str]:
    """Return the sockets of this user's keepers on this host, as far as `/proc` shows their processes.

    There is one for each place where programs look for it: a login has another `XDG_RUNTIME_DIR` than a job.
    """
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if (process / "cmdline").stat().st_uid == os.geteuid() and _MODULE in words[:4]:
                found.add(words[words.index(_MODULE) + 1])

    return sorted(found)


def share_of_memory(reading: MemoryReading) -> int:
    """Return how many bytes a keeper takes by itself: half of what is free when it starts."""
    return reading.free // _SHARE


def main(given: Sequence[str]) -> int:
    """Run a keeper until it is stopped, idle, or ended by SIGTERM or SIGINT.

    Returns:
        The exit status: 0; `IS_RUNNING`; 1 if the folder is none for a keeper, which stderr says.
    """
    path, limit, idle_s, detached = given
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # which says that somebody opens a file that has a lease
    try:
        lock = _locked(path)
        if lock is None:
            return IS_RUNNING

        listener = _listening(path)
    except OSError as error:
        where = f" {error.filename!r}" if error.filename else ""
        sys.stderr.write(f"penstock keeper:{where} {error.strerror}\n")
        return 1

    if detached == "1":
        _go_on_detached(path)

    # Each data file is a descriptor, and the usual limit is low.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    memory = SystemMemory()
    reading = memory.read()
    margin = min(max(reading.limit // _MARGIN, _LEAST_MARGIN), _MOST_MARGIN)
    limit_bytes = share_of_memory(reading) if limit == "auto" else int(limit)
    pool = PagePool(limit_bytes, lambda: memory.read().free, margin)
    keeper = Keeper(path, pool, float(idle_s) if math.isfinite(float(idle_s)) else math.inf)
    try:
        anyio.run(_serve, keeper, listener)
    finally:
        with suppress(OSError):
            os.unlink(path)
        os.close(lock)  # only now may another one listen there

    return 0


async def _serve(keeper: Keeper, listener: socket.socket) -> None:
    async def stop_by_signal() -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
            async for _ in received:
                keeper.stop()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop_by_signal)
        await keeper.serve(listener)
        tasks.cancel_scope.cancel()


def _locked(path: str) -> int | None:
    """Return the lock, once this is the only keeper at the path; None if there is another one."""
    folder = os.path.dirname(path)
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)

    check_folder(folder)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(f"{path}.lock", flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None

    return lock


def _listening(path: str) -> socket.socket:
    with suppress(FileNotFoundError):
        os.unlink(path)  # the lock says that no process listens there

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(before)

    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _go_on_detached(path: str) -> None:
    """Go on in a child, which has neither the terminal nor the streams; this process ends at once.

    Whose child this process is learns by its end that the keeper listens. The keeper is the system's child.
    """
    if os.fork():
        os._exit(0)

    os.setsid()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    log = os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    for stream, number in ((0, nothing), (1, nothing), (2, log)):
        os.dup2(number, stream)

    for number in (nothing, log):
        if number > 2:
            os.close(number)
