"""The directory that a checkpoint is built in, for handlers that write files by themselves."""

from __future__ import annotations

__all__ = ("TemporaryDirectory",)

import os
from typing import Any, final

from penstock.handlers.formats.common.temporary_names import TEMPORARY_SUFFIX
from penstock.handlers.formats.orbax.documents.file_names import COMMIT_MARK
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.errors import DestinationExistsError
from penstock.kernel.protocols.store_capabilities import Hold
from penstock.orbax.common.handler_paths import handler_path
from penstock.orbax.v0.common.v0_options import AtomicityMode, AtomicityOptions, FileOptions


@final
class TemporaryDirectory:
    """One directory on its way to its own name: made, filled by somebody, marked complete, published.

    All blocking.

    Args:
        store: Where.
        final: Its own absolute path.
        overwrite: Whether what lies there may be replaced; it is, in one step, at the end.
        atomicity: Whether it is built beside its place or in it.
        files: Its permissions.
    """

    def __init__(
        self,
        store: LocalStore,
        final: str,
        *,
        overwrite: bool = False,
        atomicity: AtomicityOptions | None = None,
        files: FileOptions | None = None,
    ) -> None:
        self._store = store
        self._final = final
        self._overwrite = overwrite
        self._in_place = atomicity is not None and atomicity.mode is AtomicityMode.COMMIT_FILE
        self._mode = None if files is None else files.path_permission_mode
        self._temporary = final if self._in_place else final + TEMPORARY_SUFFIX
        self._hold: Hold | None = None

    def __repr__(self) -> str:
        return f"TemporaryDirectory({self._temporary!r})"

    def get(self) -> Any:
        """The path that it is built under."""
        return handler_path(self._temporary)

    def get_final(self) -> Any:
        """Its own path."""
        return handler_path(self._final)

    def check(self) -> None:
        """Make sure that it can be published.

        Raises:
            DestinationExistsError: If something lies there that may not be replaced.
        """
        if self._store.kind(self._final) is not None and not self._overwrite:
            raise DestinationExistsError(self._final)

    def create(self, *, hold: bool = True) -> None:
        """Make it, empty; what an interrupted save left there is removed.

        Args:
            hold: Whether nobody else may build there meanwhile; not needed in a directory that is held.

        Raises:
            StorageError: If somebody is building there right now, or the medium refuses.
        """
        stale = self._store.hold(self._temporary) if self._store.kind(self._temporary) else None
        try:
            self._store.remove_tree(self._temporary)
        finally:
            if stale is not None:
                stale.release()

        self._store.make_directory(self._temporary)
        if hold:
            self._hold = self._store.hold(self._temporary)
        if self._mode is not None:
            os.chmod(self._temporary, self._mode)

    def publish(self, *, synced: bool) -> None:
        """Mark it complete and give it its own name, durably.

        Args:
            synced: Whether all files in it are on the medium already.

        Raises:
            DestinationExistsError: If somebody else put something there meanwhile.
        """
        store = self._store
        if synced:
            store.sync_directory(self._temporary)
        else:
            store.sync_tree(self._temporary)

        store.write_file(os.path.join(self._temporary, COMMIT_MARK), b"Checkpoint commit was successful")
        store.sync_directory(self._temporary)
        if not self._in_place:
            token = store.begin_build(self._final, self._temporary)
            replacing = store.kind(self._final) is not None
            if replacing and not self._overwrite:
                raise DestinationExistsError(self._final)
            if replacing:
                store.exchange(token)
            else:
                store.publish(token)

            store.sync_directory(os.path.dirname(self._final))
            if replacing:
                store.remove_tree(self._temporary)

        self.release()

    def discard(self) -> None:
        """Remove it and what is in it."""
        self._store.remove_tree(self._temporary)
        self.release()

    def release(self) -> None:
        """Let others build there. Idempotent."""
        if self._hold is not None:
            self._hold.release()
            self._hold = None
