"""One writer at a time in a directory that many checkpoints are saved into."""

from __future__ import annotations

__all__ = ("WRITER", "WriterHold")

import errno
import os
from threading import Lock
from typing import TYPE_CHECKING, Final, final

from penstock.handlers.stores.publishing.claims import Claim, StoreClaimFiles
from penstock.kernel.errors import InUseError, RootInUseError, StorageError

if TYPE_CHECKING:
    from penstock.kernel.protocols.stores import Hold, Store

WRITER: Final = ".penstock-writer"
"""A directory that is there while somebody writes. It is held: the root itself is held by readers."""

_TRIES: Final = 3
"""The writer before this one may be removing the directory just now."""

_NOT_WRITABLE: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT})


@final
class WriterHold:
    """The exclusive right to write into the directory at `root`. Blocking; thread-safe.

    It ends with the process, however that ends. What a crash leaves behind is taken over by the next writer.
    On a store with leases that is so when the lease is over. On one that has neither it is a `Claim`, which
    must be removed by hand after a crash on another machine.

    It is taken before each save and each deletion: on opening it may have failed, since the disk was full,
    and another program may have removed its directory since.

    Args:
        store: Where `root` is.
        root: A directory.
    """

    __slots__ = ("_hold", "_lock", "_place", "_root", "_store")

    def __init__(self, store: Store, root: str) -> None:
        self._store = store
        self._root = root
        self._place = os.path.join(root, WRITER)
        self._hold: Hold | None = None
        self._lock = Lock()

    @property
    def is_held(self) -> bool:
        """True if it was taken."""
        return self._hold is not None

    def take_if_writable(self) -> StorageError | None:
        """Take it; return why it cannot be, where nothing can be written: a full disk, a read-only one.

        Raises:
            RootInUseError, StorageError: As `take`.
        """
        try:
            self.take()
        except StorageError as error:
            if error.errno in _NOT_WRITABLE:
                return error

            raise

        return None

    def take(self) -> None:
        """Take it, unless it is held already.

        Raises:
            RootInUseError: If somebody else holds it, in this process or another.
            StorageError: If the medium refuses.
        """
        with self._lock:
            if self._hold is not None:
                if self._hold.is_at(self._place):
                    return

                lost, self._hold = self._hold, None  # its directory is gone, and another one may be held
                lost.release()

            self._take()

    def _take(self) -> None:
        for left in reversed(range(_TRIES)):
            try:
                self._hold = self._acquired()
            except StorageError as error:
                if error.errno not in {errno.EBUSY, errno.ENOENT}:
                    raise
                if not left:
                    more = error.more if isinstance(error, InUseError) else ""
                    raise RootInUseError(self._root, more) from error
            else:
                return

    def confirm(self) -> None:
        """Return if it is still held, or never was. Before what cannot be undone.

        Raises:
            ClaimLostError: If it is a lease, and another process holds it now.
            StorageError: If the medium does not say.
        """
        if self._hold is not None:
            self._hold.confirm()

    def release(self) -> None:
        """Give it up. Idempotent.

        Raises:
            StorageError: If the directory could not be removed; it is given up all the same.
        """
        hold, self._hold = self._hold, None
        if hold is None:
            return

        try:
            if self._store.directories is not None:
                self._store.remove_tree(self._place)
        finally:
            hold.release()

    def _acquired(self) -> Hold:
        if (objects := self._store.objects) is not None:
            return objects.hold_root(self._place)
        if self._store.directories is None:
            return Claim(StoreClaimFiles(self._store), self._place, self._root)

        self._store.make_directory(self._place)
        return self._store.hold(self._place)
