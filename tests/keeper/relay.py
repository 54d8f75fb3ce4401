"""A relay between clients and a keeper, which kills or stops the keeper at a chosen question."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread
from typing import Literal

from penstock.handlers.stores.keeper.messages import MOST_DESCRIPTORS, Head

When = Literal["before", "after"]


class Relay:
    """Passes on what clients ask, and what the keeper answers, descriptors included.

    Args:
        path: Its own socket.
        keeper: The keeper's.
        watch: Called with each question, before it is passed on.
    """

    def __init__(self, path: str, keeper: str, watch: Callable[[bytes], object] | None = None) -> None:
        self._path, self._keeper, self._watch = path, keeper, watch
        self._lock = Lock()
        self._open: list[socket.socket] = []
        self._left, self._when = -1, "before"
        self._strike: Callable[[], object] = _nothing
        self.n_asked = 0  #: questions since `strike_at`
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen(64)
        Thread(target=self._accept, daemon=True).start()

    def strike_at(self, n: int, when: When, strike: Callable[[], object]) -> None:
        """Call `strike` at the nth question from now on: before it is asked, or once it is answered."""
        with self._lock:
            self._left, self._when, self._strike, self.n_asked = n, when, strike, 0

    def close(self) -> None:
        """End it as a keeper ends: nobody listens, and every connection breaks."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)

        with self._lock:
            for one in [self._listening, *self._open]:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

                one.close()

            self._open.clear()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                keeper = socket.socket(socket.AF_UNIX)
                with self._lock:
                    self._open += [client, keeper]
                try:
                    keeper.connect(self._keeper)
                except OSError:
                    client.close()
                    keeper.close()
                else:
                    Thread(target=self._serve, args=(client, keeper), daemon=True).start()

    def _serve(self, client: socket.socket, keeper: socket.socket) -> None:
        with suppress(OSError, ValueError), client, keeper:
            while question := _message(client):
                data, _ = question
                if self._watch is not None:
                    self._watch(data)

                is_due = self._count()
                if is_due and self._when == "before":
                    self._strike()

                keeper.sendall(data)
                answer = _message(keeper)
                if answer is None:
                    return
                if is_due and self._when == "after":
                    self._strike()

                data, descriptors = answer
                socket.send_fds(client, [data], descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)

    def _count(self) -> bool:
        with self._lock:
            self.n_asked += 1
            self._left -= 1
            return self._left == 0


def _message(source: socket.socket) -> tuple[bytes, list[int]] | None:
    head, descriptors, _, _ = socket.recv_fds(source, Head.nbytes, MOST_DESCRIPTORS)
    if not head:
        return None

    data = bytearray(head)
    _fill(source, data, Head.nbytes)
    nbytes, _ = Head.decode(bytes(data))
    _fill(source, data, Head.nbytes + nbytes)
    return bytes(data), descriptors


def _fill(source: socket.socket, data: bytearray, nbytes: int) -> None:
    while len(data) < nbytes:
        more = source.recv(nbytes - len(data))
        if not more:
            raise ConnectionResetError

        data += more


def _nothing() -> None:
    """Do nothing."""
