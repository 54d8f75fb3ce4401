"""The sole right to a name, where nothing can be locked: a file that one process alone can create."""

from __future__ import annotations

__all__ = ("Claim", "ClaimFiles", "StoreClaimFiles", "check_unclaimed")

import errno
import json
import os
import uuid
from contextlib import suppress
from hashlib import blake2s
from typing import Final, Protocol, cast, final

from penstock.handlers.stores.publishing.process_identity import (
    ProcessIdentity,
    ThisProcess,
    this_process,
)
from penstock.kernel.errors import CorruptCheckpointError, InUseError, StorageError
from penstock.kernel.protocols.stores import Hold, Store

_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR})
_OWNER: Final = "owner"


class ClaimFiles(Protocol):
    """The files of claims. Blocking; every failure is a `StorageError`."""

    def create(self, file: str, data: bytes) -> bool:
        """Create a file with its content in one step; return False if it is there."""
        ...

    def read(self, file: str) -> bytes | None:
        """Return the content of a file; None if it is not there."""
        ...

    def remove(self, file: str) -> None:
        """Remove a file, which is there."""
        ...


@final
class Claim(Hold):
    """The exclusive right to a path: a file next to it that names the holder. Blocking.

    A claim whose process has ended is broken. One that cannot be judged, since its process is of another
    machine or container, holds until somebody removes the file; the error names it.

    Args:
        files: Where it is.
        file: Its path; the directory above exists.
        path: What is claimed, for errors.

    Raises:
        InUseError: If somebody else claims it.
        StorageError: If the file cannot be created.
    """

    __slots__ = ("_data", "_file", "_files", "_pid", "_token")

    def __init__(self, files: ClaimFiles, file: str, path: str) -> None:
        self._files = files
        self._file = file
        self._pid = os.getpid()
        me, self._token = this_process(), uuid.uuid4().hex
        self._data = me.identity.encode(id=self._token, process=me.key)
        me.hold(self._token)
        try:
            self._create(file, path)
        except BaseException:
            me.let_go(self._token)
            raise

    def _create(self, file: str, path: str) -> None:
        if not self._files.create(file, self._data):
            check_unclaimed(self._files, file, path)
            if not self._files.create(file, self._data):
                raise InUseError(path, f"it was claimed by {file} just now")

    def release(self) -> None:
        """Give it up. Idempotent; never fails. In a fork of the process it does nothing.

        If the file cannot be removed, the next of this process that wants the path removes it.
        """
        if os.getpid() == self._pid:
            this_process().let_go(self._token)
            with suppress(StorageError, CorruptCheckpointError):
                if self._files.read(self._file) == self._data:
                    self._files.remove(self._file)


def check_unclaimed(files: ClaimFiles, file: str, path: str) -> None:
    """Return if a path is not claimed; a claim whose process has ended is removed. Blocking.

    The process that removes one claims its removal first, and then looks again whether it is still the same
    claim. So only one of several removes it, and the claim that follows stays.

    Args:
        files: Where the claim is.
        file: Its path.
        path: What is claimed.

    Raises:
        InUseError: If somebody claims it.
        StorageError: If the medium refuses.
    """
    data = files.read(file)
    if data is None:
        return

    owner, me = ProcessIdentity.decode(data), this_process()
    if not _is_own(data, me) and (owner is None or not owner.has_ended(me.identity)):
        by = "an unknown process" if owner is None else str(owner)
        raise InUseError(path, f"it is claimed by {by}; if that has ended, remove {file}")

    removal = Claim(files, f"{file}-{blake2s(data, digest_size=6).hexdigest()}", path)
    try:
        if files.read(file) == data:
            files.remove(file)
    finally:
        removal.release()


def _is_own(data: bytes, me: ThisProcess) -> bool:
    """True if a claim is one that this process gave up, and could not remove."""
    try:
        found: object = json.loads(data)
    except ValueError:
        return False

    if not isinstance(found, dict):
        return False

    said = cast("dict[str, object]", found)
    return me.has_given_up(str(said.get("process")), str(said.get("id")))


@final
class StoreClaimFiles:
    """Claims in any store: each is a directory with one file, since a store removes only directories.

    Args:
        store: Where they are.
    """

    __slots__ = ("_store",)

    def __init__(self, store: Store) -> None:
        self._store = store

    def create(self, file: str, data: bytes) -> bool:
        try:
            self._store.make_directory(file)
            return self._store.write_file(os.path.join(file, _OWNER), data, create=True)
        except StorageError as error:
            # It is there, or the directory went just now together with the claim that it was made for.
            if error.errno == errno.EEXIST or error.errno in _ABSENT:
                return False

            raise

    def read(self, file: str) -> bytes | None:
        try:
            return self._store.read_file(os.path.join(file, _OWNER))
        except StorageError as error:
            if error.errno in _ABSENT:
                return None

            raise

    def remove(self, file: str) -> None:
        try:
            self._store.remove_tree(file)
        except StorageError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:  # the next claim is there already
                raise
