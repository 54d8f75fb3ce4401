"""Connections to the keeper of this host. Every call blocks, for a limited time."""

from __future__ import annotations

__all__ = ("Connection", "Connections")

import errno
import os
import select
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Final, TypeVar, final

from penstock.handlers.stores.keeper.messages import (
    MOST_DESCRIPTORS,
    Head,
    Refused,
    Release,
    Request,
    check_folder,
    decode_answer,
    default_socket,
    encode_request,
    is_own_peer,
)
from penstock.kernel.errors import ConfigError, InUseError, KeeperLostError, StorageError

A = TypeVar("A")

LONGEST_SOCKET: Final = 107
"""Bytes of the path of a Unix socket on Linux."""

_OF_THE_SILENT: Final = 10
"""So much less is waited for one that was silent the last time: a save that fails asks many times more."""


@final
class Connection:
    """One connection. One thread at a time calls.

    Args:
        path: The keeper's socket.
        answer_s: How long an answer may take.

    Raises:
        KeeperLostError: If there is no keeper, or it is another user's.
    """

    __slots__ = ("_path", "_pid", "_socket")

    def __init__(self, path: str, answer_s: float) -> None:
        self._path, self._pid = path, os.getpid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            check_folder(os.path.dirname(path))
            self._socket.settimeout(answer_s)
            self._socket.connect(path)
            is_own = is_own_peer(self._socket)
        except OSError as error:
            self.close()
            raise _lost(path, error) from error

        if not is_own:
            self.close()
            raise KeeperLostError(path, "the process that listens there is another user's", errno.EACCES)

    def wait_at_most(self, answer_s: float) -> None:
        """Wait so long for later answers."""
        self._socket.settimeout(answer_s)

    def call(self, operation: str, path: str, request: Request, answer: type[A]) -> tuple[A, list[int]]:
        """Ask the keeper; return its answer, and the descriptors that came with it: the caller's to close.

        Args:
            operation: What is done, for errors.
            path: What it is about, for errors.
            request: The question.
            answer: The type of the answer.

        Raises:
            StorageError: If the keeper refuses; an `InUseError` where something is held.
            KeeperLostError: If it does not answer, or not in time. Then this connection is of no more use.
        """
        try:
            found, descriptors = self._answer(request, answer)
        except BaseException as error:  # a later answer would be taken for this one
            self.close()
            if isinstance(error, OSError | ValueError):
                raise _lost(self._path, error) from error

            raise

        if isinstance(found, Refused):
            raise _refused(operation, path, found)

        return found, descriptors

    @property
    def is_open(self) -> bool:
        """True if the keeper has neither ended nor said anything that was not asked."""
        if self._socket.fileno() < 0:
            return False

        look = select.poll()
        look.register(self._socket, select.POLLIN)
        return not look.poll(0)

    def release(self) -> None:
        """Say that what this connection holds is given up, and close it. Does not block, and never fails.

        In a fork of the process it is closed alone, since the hold is that of the process that took it.
        """
        if self._socket.fileno() >= 0 and os.getpid() == self._pid:
            body = encode_request(Release())
            with suppress(OSError):
                self._socket.setblocking(False)
                self._socket.send(Head.encode(body) + body)

        self.close()

    def close(self) -> None:
        """Close it. Idempotent."""
        self._socket.close()

    def _answer(self, request: Request, answer: type[A]) -> tuple[A | Refused, list[int]]:
        body = encode_request(request)
        self._socket.sendall(Head.encode(body) + body)
        head, descriptors, _, _ = socket.recv_fds(self._socket, Head.nbytes, MOST_DESCRIPTORS)
        try:
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)

            # At its end the stream gives no bytes, and `_receive` says so.
            nbytes, _ = Head.decode(head + self._receive(Head.nbytes - len(head)))
            found = decode_answer(self._receive(nbytes), answer)
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)

            raise

        return found, descriptors

    def _receive(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        rest = memoryview(data)
        while rest:
            moved = self._socket.recv_into(rest)
            if not moved:
                raise ConnectionResetError(errno.ECONNRESET, "it has closed the connection")

            rest = rest[moved:]

        return data


@final
class Connections:
    """Connections that are used one after the other by whichever thread calls. Thread-safe.

    Args:
        path: The keeper's socket; None for that of this user.
        answer_s: How long an answer may take.
        on_lost: Called when the keeper is found to be lost, before that is raised.

    Raises:
        ConfigError: If the path is too long for a socket, or this system has no keepers.
    """

    __slots__ = ("_answer_s", "_idle", "_is_silent", "_lock", "_on_lost", "_pid", "path")

    def __init__(
        self,
        path: str | None,
        answer_s: float,
        *,
        on_lost: Callable[[KeeperLostError], object] = lambda _: None,
    ) -> None:
        self._answer_s, self._on_lost = answer_s, on_lost
        self._is_silent = False  # since the last question
        self._lock = Lock()
        self._idle: list[Connection] = []
        self._pid = os.getpid()
        if sys.platform != "linux":
            raise ConfigError("store.keeper", "a keeper needs Linux; leave the memory tier out here")

        self.path = default_socket() if path is None else os.path.abspath(path)
        if len(os.fsencode(self.path)) > LONGEST_SOCKET:
            problem = f"{self.path!r} is longer than a socket's path may be, which is {LONGEST_SOCKET} bytes"
            raise ConfigError("store.keeper.socket", problem)

    def open(self) -> Connection:
        """Return a new connection, which is the caller's.

        Raises:
            KeeperLostError: If there is no keeper.
        """
        with self._noting_silence():
            return Connection(self.path, self._limit_s)

    def call(self, operation: str, path: str, request: Request, answer: type[A]) -> A:
        """Ask the keeper as `Connection.call` does, where no descriptors come with the answer."""
        found, descriptors = self.call_for_file(operation, path, request, answer)
        for descriptor in descriptors:
            os.close(descriptor)

        return found

    def call_for_file(
        self, operation: str, path: str, request: Request, answer: type[A]
    ) -> tuple[A, list[int]]:
        """Ask the keeper as `Connection.call` does."""
        connection = self._taken()
        try:
            with self._noting_silence():
                connection.wait_at_most(self._limit_s)
                found = connection.call(operation, path, request, answer)
                self._is_silent = False
                return found
        finally:
            self._put_back(connection)

    @property
    def _limit_s(self) -> float:
        return self._answer_s / _OF_THE_SILENT if self._is_silent else self._answer_s

    @contextmanager
    def _noting_silence(self) -> Generator[None]:
        try:
            yield
        except KeeperLostError as lost:
            self._is_silent = lost.errno == errno.ETIMEDOUT
            self._on_lost(lost)
            raise

    def close(self) -> None:
        """Close what is not in use. Later calls open new ones."""
        with self._lock:
            idle, self._idle = self._idle, []

        for connection in idle:
            connection.close()

    def _taken(self) -> Connection:
        with self._lock:
            if os.getpid() != self._pid:  # the answers to two processes would get mixed up
                self._idle, self._pid = [], os.getpid()

            while self._idle:
                connection = self._idle.pop()
                if connection.is_open:
                    return connection

                connection.close()  # the keeper has ended since; there may be another one

        return self.open()

    def _put_back(self, connection: Connection) -> None:
        with self._lock:
            if connection.is_open:
                self._idle.append(connection)
                return

        connection.close()

    __del__ = close


def _refused(operation: str, path: str, refused: Refused) -> StorageError:
    if refused.errno == errno.EBUSY:
        return InUseError(path)

    return StorageError(operation, path, refused.problem, refused.errno)


def _lost(path: str, error: Exception) -> KeeperLostError:
    if isinstance(error, TimeoutError):
        return KeeperLostError(path, "it does not answer in time", errno.ETIMEDOUT)
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return KeeperLostError(path, "no process listens there", errno.ECONNREFUSED)

    problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, OSError) and error.filename is not None:
        problem = f"its folder {error.filename!r} {problem}"

    number = error.errno if isinstance(error, OSError) and error.errno is not None else errno.EPROTO
    return KeeperLostError(path, problem, number)
