"""The place where one save builds a checkpoint, from its first file to its publication."""

from __future__ import annotations

__all__ = ("Workspace", "check_place", "how_to_replace", "make_name_durable")

import errno
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, final

from anyio import Lock

from penstock.handlers.stores.publishing.deletion import delete_checkpoint, remove_abandoned
from penstock.kernel.errors import (
    REPLACED_AT_ONCE,
    BuildChangedError,
    DestinationExistsError,
    InUseError,
    NotDurableError,
    PathError,
    StorageError,
    UnsupportedByStoreError,
)
from penstock.kernel.protocols.holds import BRIEF_WAITS_S
from penstock.kernel.protocols.stores import Directories, Hold

if TYPE_CHECKING:
    from penstock.kernel.concurrency.threads import Threads
    from penstock.kernel.protocols.build_place import Overwrite
    from penstock.kernel.protocols.stores import BuildToken, Store


_ADVICE: Final = 'overwrite="delete-first" deletes it and then saves; until that ends, nothing is there'


_UNMARKED: Final = (
    "it has no commit_success.txt, so it is no checkpoint: a save or a copy was interrupted there. "
    "If nobody is about to complete it, `penstock gc --unmarked {}` removes it"
)


def how_to_replace(store: Store) -> str:
    """Say what makes a save replace what is in a store."""
    return _ADVICE if store.directories is None else REPLACED_AT_ONCE


def make_name_durable(store: Store, path: str, older: str | None = None) -> None:
    """Make the name of a checkpoint durable that was published just now. Blocking.

    If that fails, nothing is undone: that would be as little durable. Both states are whole, and one of them
    is at the path after a power loss. `remove_abandoned` deletes the older one only once the name is durable.

    Args:
        store: Where it is.
        path: Of the checkpoint.
        older: Where the one is that it replaced, if it did.

    Raises:
        NotDurableError: If the medium refuses. The checkpoint can be restored.
    """
    try:
        store.sync_directory(os.path.dirname(path))
    except StorageError as error:
        raise NotDurableError(path, older, error) from error


def check_place(store: Store, place: str) -> None:
    """Refuse to make a directory below a place that is gone, since that would bring it back.

    A process that slept through the end of a save must not write where a later one builds.

    Raises:
        StorageError: If it is gone.
    """
    if store.kind(place) is None:
        raise StorageError("mkdir", place, "the save was ended, and what it built removed", errno.ENOENT)


@final
class Workspace:
    """Gets a place to build from the store, creates directories in it, and publishes or discards it.

    Nothing is written before `open` is first called, so that bad input leaves no trace. It changes and
    removes only what it holds: of several saves to one path, one at a time builds, the others are refused.

    Args:
        store: Where the checkpoint will be.
        threads: For the store's blocking calls.
        final: The checkpoint's own absolute path.
        temporary: A path beside `final` that the store may use as the place to build. If it is `final`
            itself, the caller made that directory, and publishes or discards it.
        overwrite: Whether an existing checkpoint may be replaced. If `"delete-first"`, it is deleted before
            the first file is written, unless the store can replace it in one step.
        recognises: Returns whether a path holds a checkpoint that may be replaced; by default any directory
            does. Blocking.
        file: The one file in the workspace that becomes the checkpoint; None if all of it does.
    """

    __slots__ = (
        "_beside",
        "_file",
        "_folder",
        "_has_replaced",
        "_hold",
        "_is_checked",
        "_is_ours",
        "_lock",
        "_made",
        "_overwrite",
        "_recognises",
        "_replaced",
        "_store",
        "_threads",
        "_token",
        "final",
        "identity",
        "left_behind",
        "published",
        "temporary",
    )

    def __init__(
        self,
        store: Store,
        threads: Threads,
        final: str,
        temporary: str,
        *,
        overwrite: Overwrite,
        recognises: Callable[[str], bool] = lambda _: True,
        file: str | None = None,
    ) -> None:
        self.final = final
        self.temporary = temporary  #: where it is built; once `open` was called, the place the store gave
        self.identity: object = None  #: the `Store.identity` of what was built; set by `publish`
        self.left_behind: StorageError | None = None  #: why something could not be removed from the place
        self.published = False  #: whether the checkpoint is visible under its own name
        self._beside = temporary
        self._store = store
        self._threads = threads
        self._overwrite = overwrite
        self._recognises = recognises
        self._file = file
        self._folder: str | None = None
        self._lock = Lock(fast_acquire=True)
        self._made: set[str] = set()
        self._is_checked = False
        self._token: BuildToken | None = None
        self._is_ours = False  # whether anything at the place is ours to remove
        self._hold: Hold | None = None
        self._has_replaced = False
        self._replaced: Hold | None = None  # on what the checkpoint replaced, until it is removed

    @property
    def is_joined(self) -> bool:
        """False: this process makes the place, publishes it and removes it."""
        return False

    async def take_back(self) -> bool:
        """Return False: this process publishes what is built here, and need not take it from another."""
        return False

    def path(self, relative: str) -> str:
        """Return where a file of the checkpoint is built; the place itself if `relative` is empty.

        Final only after `open`: the store may choose another place than `temporary`.
        """
        return os.path.join(self.temporary, relative) if relative else self.temporary

    def build_below(self, folder: str) -> None:
        """Build in `folder` below the place, which it leaves when it is published. Before `open`.

        Under a name of its own nothing is taken for what a later save builds in the same place. A store of
        objects gives each build a place that no other one has, and no folder is needed.
        """
        self._folder = folder

    @property
    def _deletes_first(self) -> bool:
        return self._overwrite == "delete-first" and self._store.directories is None

    @property
    def _in_place(self) -> bool:
        return self._beside == self.final

    async def check(self) -> None:
        """Check that the save can be published, before anything is written.

        Raises:
            DestinationExistsError: If something is there and `overwrite` is off.
            PathError: If something is there that is not a checkpoint.
            UnsupportedByStoreError: If something is there and the store cannot replace it.
            StorageError: If it could not be created.
        """
        await self._threads.run(self.check_now)

    def check_now(self) -> None:
        """Blocking form of `check`, for a caller in a worker thread."""
        self._check()
        self._is_checked = True

    async def open(self, directory: str = "") -> None:
        """Make the place to build, and `directory` in it, unless that was done before.

        The first call removes what an interrupted save left there.

        Raises:
            PenstockError: As `check`, if that was not called before.
            InUseError: If another save is building there.
        """
        if directory in self._made:
            return

        async with self._lock:
            if "" not in self._made:
                await self._threads.run(self.open_now)
                self._made.add("")

            if directory not in self._made:
                await self._threads.run(self.make_directory, directory)
                self._made.add(directory)

    async def enter(self, place: str) -> None:
        """Open a place on a disk that the primary, which builds in `place`, does not share.

        Raises:
            PenstockError: As `open`.
        """
        await self.open()

    def make_directory(self, relative: str) -> None:
        """Make a directory of the checkpoint, with those that it is in. Blocking.

        Raises:
            StorageError: If the store refuses; or if other processes gave the save up and took the place.
        """
        if self._folder is not None:
            check_place(self._store, self.temporary)

        self._store.make_directory(self.path(relative))

    async def restart(self) -> None:
        """Remove everything built so far, and begin again with the next `open`."""
        async with self._lock:
            await self._threads.run(self._restart_now)
            self._made.clear()

    def _restart_now(self) -> None:
        self.discard_now()
        self.release()
        self._is_ours = False

    async def publish(self) -> None:
        """Make the checkpoint visible under its own path, in one step and durably.

        Raises:
            DestinationExistsError: If another writer put something there meanwhile.
            InUseError: If what it replaces stays held: it is being deleted, or built in place.
            NotDurableError: If it is visible, and its name may not be durable. What it replaced stays, too.
            BuildChangedError: If another program changed what was built. What it was to replace stays.
            StorageError: If the store refuses. `published` tells whether the checkpoint is visible.
        """
        await self._threads.run(self.publish_now)

    async def discard(self) -> None:
        """Remove everything built and not published, if there is anything."""
        if self._is_ours and not self.published:
            await self._threads.run(self.discard_now)

    def discard_now(self) -> None:
        """Blocking form of `discard`."""
        if self._is_ours and not self.published and self._token is not None:
            self._store.discard(self._token)
            self._token = None

    async def withdraw(self) -> None:
        """Remove what was published, unless it replaced something: then there is no way back.

        Raises:
            InUseError: If it is being read.
            StorageError: If the medium refuses.
        """
        if self.published and not self._has_replaced:
            await self._threads.run(delete_checkpoint, self._store, self.final, self._beside)
            self.published = False

    def release(self) -> None:
        """Let other saves build here. Idempotent. Called when the save has ended, successfully or not."""
        with ExitStack() as ends:  # one that fails does not keep the other
            for hold in (self._hold, self._replaced):
                if hold is not None:
                    ends.callback(hold.release)

    def _check(self) -> None:
        kind = self._store.kind(self.final)
        if self._in_place:
            if kind != "directory":
                raise PathError(self.final, "is no directory to save into")
            return

        if kind is not None:
            self._check_replaceable(kind)

        self._store.check_writable(self.final)

    def _check_replaceable(self, kind: str) -> None:
        if not self._overwrite:
            store = self._store
            is_unmarked = store.objects is not None and store.objects.is_unmarked(self.final)
            advice = _UNMARKED.format(self.final) if is_unmarked else how_to_replace(store)
            raise DestinationExistsError(self.final, advice)
        if kind != ("directory" if self._file is None else "file"):
            raise PathError(self.final, f"is a {kind}, not a checkpoint; it is not overwritten")
        if not self._recognises(self.final):
            raise PathError(self.final, f"is a {kind} but not a checkpoint; only checkpoints are overwritten")
        if not self._deletes_first and self._store.directories is None:
            raise UnsupportedByStoreError("replace", self.final, self._store, Directories, _ADVICE)

    def open_now(self) -> None:
        """Blocking form of `open`."""
        if not self._is_checked:
            self.check_now()
        if self._in_place:
            return

        store = self._store
        if self._token is None:
            self._token = self._begin()

        place = self._token.place
        if (directories := store.directories) is not None:
            self.left_behind = remove_abandoned(store, place, set_aside=True)
            self._hold = directories.make_held(place)
            self._is_ours = True
        else:
            self._is_ours = True  # the store gave the place to this save alone
            store.remove_tree(place)
            store.make_directory(place)

        self.temporary = place
        if self._folder is not None and store.objects is None:
            self.temporary = os.path.join(place, self._folder)
            store.make_directory(self.temporary)

    def _begin(self) -> BuildToken:
        if self._deletes_first:
            kind = self._store.kind(self.final)
            if kind is not None:  # which may have changed since the check
                self._check_replaceable(kind)
                delete_checkpoint(self._store, self.final, self._beside)

            self._overwrite = False  # what comes there now is another save's

        within = "/".join([name for name in (self._folder, self._file) if name])
        try:
            if self._folder is not None and (objects := self._store.objects) is not None:
                return objects.begin_shared_build(self.final, self._beside)

            return self._store.begin_build(self.final, self._beside, within or None)
        except StorageError as error:
            if error.errno == errno.EEXIST:  # it came after the check, and cannot be replaced
                raise DestinationExistsError(self.final, how_to_replace(self._store)) from error

            raise

    def publish_now(self) -> None:
        """Blocking form of `publish`."""
        token, store = self._token, self._store
        if token is None:
            self.identity = store.identity(self.final)
            self.published = True
            return

        self.identity = store.identity(token.built)
        older = self._publish(token)
        self._has_replaced = older is not None
        self.published = True
        make_name_durable(store, self.final, older)
        try:
            if older is not None or token.file is not None:
                store.discard(token)
        except BuildChangedError:
            raise
        except StorageError as error:
            self.left_behind = error

        try:
            self.release()
        except StorageError as error:
            self.left_behind = error

    def _publish(self, token: BuildToken) -> str | None:
        """Publish, waiting for a brief hold of what is there.

        Returns:
            Where what was replaced is; None if nothing was.
        """
        directories = self._store.directories
        for wait_s in (*BRIEF_WAITS_S, None):
            # Any other store looks by itself, and refuses what is there.
            replacing = directories is not None and directories.kind(self.final) is not None
            if replacing and not self._overwrite:
                raise DestinationExistsError(self.final, how_to_replace(self._store))

            try:
                if directories is not None and replacing:
                    return self._exchange(directories, token)

                self._store.publish(token)
            except StorageError as error:
                is_gone = error.errno == errno.ENOENT or isinstance(error, BuildChangedError)
                if self._folder and is_gone and self._store.kind(token.built) is None:
                    problem = "the other processes gave this save up, and took away what was built"
                    raise StorageError("publish", token.built, problem, errno.ENOENT) from error

                came_or_went = error.errno == (errno.ENOENT if replacing else errno.EEXIST)
                if not self._overwrite and came_or_went:
                    raise DestinationExistsError(self.final, how_to_replace(self._store)) from error
                if (not isinstance(error, InUseError) and not came_or_went) or wait_s is None:
                    raise

                time.sleep(wait_s)
            else:
                return None

        raise AssertionError("the last attempt returns or raises")

    def _exchange(self, directories: Directories, token: BuildToken) -> str:
        if self._file is not None:  # the old one comes to be in the place, which is held
            return directories.exchange(token) or token.built

        # Held as by a reader, so that readers do not matter: they notice that they were overtaken. Those who
        # delete do, and those who would take what was replaced for what an interrupted save left.
        self._replaced = directories.hold_reading(self.final)
        try:
            return directories.exchange(token) or token.built
        except BaseException:
            self._replaced.release()
            raise
