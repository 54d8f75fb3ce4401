"""The place where one save builds a checkpoint, from its first file to its publication.

In a job one process makes the place, publishes it and removes it; the others only write there.
"""

from __future__ import annotations

__all__ = ("Workspace", "check_place", "how_to_replace", "make_name_durable")

import errno
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, final

from anyio import Lock, sleep

from penstock.handlers.stores.publishing.deletion import delete_checkpoint, hold_abandoned, remove_abandoned
from penstock.kernel.errors import (
    REPLACED_AT_ONCE,
    BuildChangedError,
    DestinationExistsError,
    InUseError,
    KeeperLostError,
    NotDurableError,
    NotSharedError,
    PathError,
    PipelineError,
    StorageError,
    UnsupportedByStoreError,
)
from penstock.kernel.protocols.stores import BRIEF_WAITS_S, Directories, Hold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.kernel.concurrency.threads import Threads
    from penstock.kernel.protocols.build_place import Overwrite
    from penstock.kernel.protocols.stores import BuildToken, Store


_ADVICE: Final = 'overwrite="delete-first" deletes it and then saves; until that ends, nothing is there'


_UNMARKED: Final = (
    "it has no commit_success.txt, so it is no checkpoint: a save or a copy was interrupted there. "
    "If nobody is about to complete it, `penstock gc --unmarked {}` removes it"
)


MayStrand: TypeAlias = Literal["never", "once begun", "always"]

SEEN_AFTER_S: Final = (0.1, 0.3, 0.6, 1.0, 2.0, 4.0)
"""Between looks for what another process has made: a network's file system may show it some seconds later."""

GIVEN_UP: Final = "given-up"
"""In the place of the next save to the same path, which removes it: what was taken back."""


def how_to_replace(store: Store) -> str:
    """Return the advice on how a save replaces a checkpoint in a store."""
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
        temporary: A path next to `final` that the store may use as the place to build. If it is `final`
            itself, the caller made that directory, and publishes or discards it.
        overwrite: Whether an existing checkpoint may be replaced. If `"delete-first"`, it is deleted before
            the first file is written, unless the store can replace it in one step.
        recognises: Returns whether a path holds a checkpoint that may be replaced; by default any directory
            does. Blocking.
        file: The one file in the workspace that becomes the checkpoint; None if all of it does.
        joins: Whether another process of the job makes the place, publishes it and removes it. Then this one
            only writes there, once it has entered it; checking and discarding are left to the other one.
        may_strand: From when on the caller brings the checkpoint elsewhere if its keeper is lost, once it is
            whole: if it is lost while this is built, or even if it was before.
    """

    __slots__ = (
        "_beside",
        "_deletes_first",
        "_file",
        "_folder",
        "_has_replaced",
        "_hold",
        "_is_checked",
        "_is_ours",
        "_joins",
        "_lock",
        "_made",
        "_mark",
        "_may_strand",
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
        "stranded",
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
        joins: bool = False,
        may_strand: MayStrand = "never",
    ) -> None:
        self.final = final
        self.temporary = final if joins else temporary
        """Where it is built: once `open` was called, the place the store gave."""
        self.identity: object = None  #: the `Store.identity` of what was built; set by `publish`
        self.left_behind: StorageError | None = None  #: why something could not be removed from the place
        self.published = False  #: whether the checkpoint is visible under its own name
        self.stranded: str | None = None
        """Why that does not count: it is whole, but here or in another process of the job it is in memory of
        the process alone, as long as its workspace is."""
        self._may_strand = may_strand
        self._beside = temporary
        self._store = store
        self._threads = threads
        self._joins = joins
        self._mark: str | None = None  # of a build that may be gone on with
        self._overwrite = overwrite
        self._deletes_first = overwrite == "delete-first" and store.directories is None
        self._recognises = recognises
        self._file = file
        self._folder: str | None = None
        self._lock = Lock(fast_acquire=True)
        self._made: set[str] = set()
        self._is_checked = False
        self._token: BuildToken | None = None  # if joined, only where a build is known by more than its path
        self._is_ours = False  # whether anything at the place is ours to remove
        self._hold: Hold | None = None
        self._has_replaced = False
        self._replaced: Hold | None = None  # on what the checkpoint replaced, until it is removed

    def path(self, relative: str) -> str:
        """Return where a file of the checkpoint is built; the place itself if `relative` is empty.

        Final only after `open`: the store may choose another place than `temporary`.

        Raises:
            PipelineError: If another process makes the place, and it is not entered yet.
        """
        if self._joins and "" not in self._made:
            raise PipelineError("nothing can be written before the processes agree: keep the stage `agree`")

        return os.path.join(self.temporary, relative) if relative else self.temporary

    def build_below(self, folder: str) -> None:
        """Build in `folder` below the place, which it leaves when it is published. Before `open`.

        Under its own name nothing is taken for what a later save builds in the same place. A store of
        objects gives each build a place that no other one has, and no folder is needed.
        """
        self._folder = folder

    def keep(self, mark: str) -> None:
        """Go on with an abandoned build that has an entry `mark`, and leave this one if it fails with one.

        Before `open`. Blocking.

        Args:
            mark: A name in the place, of what says how far the build is.

        Raises:
            UnsupportedByStoreError: If the store gives each build a place that no other one has.
        """
        if self._store.directories is None:
            raise UnsupportedByStoreError("go on with a build at", self.final, self._store, Directories)

        self._mark = mark

    def _has_mark(self, place: str) -> bool:
        return self._mark is not None and self._store.kind(os.path.join(place, self._mark)) is not None

    def check(self) -> None:
        """Check that the save can be published, before anything is written. Blocking.

        Raises:
            DestinationExistsError: If something is there and `overwrite` is off.
            PathError: If something is there that is not a checkpoint.
            UnsupportedByStoreError: If something is there and the store cannot replace it.
            StorageError: If it could not be created.
        """
        if self._joins:
            return
        try:
            self._check_now()
        except KeeperLostError:
            if self._may_strand != "always":
                raise

        self._is_checked = True

    def _check_now(self) -> None:
        kind = self._store.kind(self.final)
        if self._beside != self.final:
            if kind is not None:
                self._check_replaceable(kind)

            self._store.check_writable(self.final)
        elif kind != "directory":
            raise PathError(self.final, "is no directory to save into")

    async def open(self, directory: str = "") -> None:
        """Make the place to build, and `directory` in it, unless that was done before.

        The first call removes what an interrupted save left there.

        Raises:
            PenstockError: As `check`, if that was not called before.
            InUseError: If another save is building there.
            PipelineError: If another process makes the place, and it is not entered yet.
        """
        if directory in self._made:
            return

        async with self._lock:
            if "" not in self._made:
                self.path("")  # only `enter` makes the place of another process known
                await self._threads.run(self.open_now)
                self._made.add("")

            if directory not in self._made:
                await self._threads.run(self.make_directory, directory)
                self._made.add(directory)

    async def enter(self, place: str, waits_s: Sequence[float] = SEEN_AFTER_S) -> None:
        """Begin to write where another process builds; on its own disk each builds in its own place.

        Args:
            place: It was made by the other process, a moment ago.
            waits_s: How long to wait between looks for it. A network's file system may show it late.

        Raises:
            NotSharedError: If this process does not see it: the processes have disks of their own.
            StorageError: If the store cannot be asked.
            PenstockError: As `open`, on its own disk.
        """
        if not self._joins:
            await self.open()
            return

        store = self._store
        if (objects := store.objects) is not None:
            self._token = await self._threads.run(objects.join_build, self.final, place)
        else:
            waits = iter(waits_s)
            while await self._threads.run(store.kind, place) is None:
                wait_s = next(waits, None)
                if wait_s is None:
                    raise NotSharedError(self.final, place)

                await sleep(wait_s)

        self.temporary = place
        self._made.add("")

    def make_directory(self, relative: str) -> None:
        """Make a directory of the checkpoint, with those that it is in. Blocking.

        Raises:
            StorageError: If the store refuses; or if other processes gave the save up and took the place.
        """
        if self._folder is not None or self._joins:
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

    async def publish(self) -> str | None:
        """Make the checkpoint visible under its own path, in one step and durably.

        Returns:
            `stranded`: None, unless it was allowed to strand.

        Raises:
            DestinationExistsError: If another writer put something there meanwhile.
            InUseError: If what it replaces stays held: it is being deleted, or built in place.
            NotDurableError: If it is visible, and its name may not be durable. What it replaced stays, too.
            BuildChangedError: If another program changed what was built. What it was to replace stays.
            StorageError: If the store refuses. `published` tells whether the checkpoint is visible; if it was
                allowed to strand, and did, that is no error.
        """
        await self._threads.run(self.publish_now)
        return self.stranded

    async def discard(self) -> None:
        """Remove everything built and not published, unless another save is to go on with it."""
        if self._is_ours and not self.published:
            await self._threads.run(self.discard_now)

    def discard_now(self) -> None:
        """Blocking form of `discard`."""
        if self._is_ours and not self.published and self._has_mark(self.temporary):
            return
        if self._is_ours and not self.published and self._token is not None:
            self._store.discard(self._token)
            self._token = None

    async def withdraw(self) -> None:
        """Remove what was published, unless it replaced something: then there is no way back.

        Raises:
            InUseError: If it is being read.
            StorageError: If the medium refuses.
        """
        if self._is_ours and self.published and not self._has_replaced:
            await self._threads.run(delete_checkpoint, self._store, self.final, self._beside)
            self.published = False

    def release(self) -> None:
        """Let other saves build here. Idempotent. Called when the save has ended, successfully or not."""
        with ExitStack() as ends:  # one that fails does not keep the other
            for hold in (self._hold, self._replaced):
                if hold is not None:
                    ends.callback(hold.release)

            if self._joins and self._token is not None:  # it writes there no more
                token, self._token = self._token, None
                ends.callback(self._store.discard, token)

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
            self.check()
        if self._beside == self.final:
            return

        store = self._store
        if self._deletes_first:
            kind = store.kind(self.final)
            if kind is not None:  # which may have changed since the check
                self._check_replaceable(kind)
                delete_checkpoint(store, self.final, self._beside)

            self._overwrite = self._deletes_first = False  # what comes there now is another save's

        if self._token is None:
            try:
                if self._folder is not None and store.objects is not None:
                    self._token = store.objects.begin_shared_build(self.final, self._beside)
                else:
                    within = "/".join(filter(None, (self._folder, self._file))) or None
                    self._token = store.begin_build(self.final, self._beside, within)
            except StorageError as error:
                if error.errno == errno.EEXIST:  # it came after the check, and cannot be replaced
                    raise DestinationExistsError(self.final, how_to_replace(store)) from error

                raise

        place = self._token.place
        if (directories := store.directories) is not None:
            # What a crashed save left has the name of this place.
            if self._has_mark(place):
                self._hold = hold_abandoned(store, place)
            else:
                try:
                    self.left_behind = remove_abandoned(store, place, set_aside=True)
                except KeeperLostError:
                    if self._may_strand == "never":  # else what was left is lost with it
                        raise

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

    def publish_now(self) -> None:
        """Blocking form of `publish`."""
        token, store = self._token, self._store
        if token is None or self._joins:  # another one has made it visible
            self.identity = store.identity(self.final)
            self.published = True
            return

        try:
            # Asked before the rename: after it, another save may replace the checkpoint at any time.
            self.identity = store.identity(token.built)
            older = self._publish(token)
        except KeeperLostError as lost:
            directories = store.directories
            may_strand = self._may_strand != "never" and token.file is None
            if not may_strand or directories is None or store.kind(token.built) is None:
                raise

            directories.rename(
                token.built, self.final
            )  # in the memory of this process: the keeper has nothing
            self.stranded = str(lost)
            return

        self._has_replaced = older is not None
        self.published = True
        # Before anything that it replaced is removed: after a power loss one of the two must be there.
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

    async def take_back(self) -> bool:
        """Take the place away from the primary, which is silent; return whether it can publish no more.

        It publishes by a rename of what is in the place. So the first to rename decides, without a word
        to anybody: this, or the primary when it wakes. What was taken is where the next save removes it,
        and the hold of the primary is on that, so it is in no other's way. An `ObjectStore` has another
        way.

        Returns:
            False also where the store can do neither, or does not answer; and if this process publishes.

        Cancellation:
            At once; it goes on in its thread.
        """
        if not self._joins or "" not in self._made:
            return False

        return await self._threads.leaving_calls(0.0).run(self._take_back, self.temporary)

    def _take_back(self, built: str) -> bool:
        store = self._store
        if (objects := store.objects) is not None and self._token is not None:
            try:
                return objects.take_back(self._token)
            except StorageError:
                return False

        if (directories := store.directories) is None:
            return False

        place, identity = os.path.split(built)
        aside = f"{place}-{identity}"
        try:
            if store.kind(built) is not None:
                directories.rename(place, aside)
        except StorageError:  # another process was faster, or the primary is awake
            pass
        else:
            if store.kind(os.path.join(aside, identity)) is not None:
                self._put_down(directories, aside, place)
                return True

            with suppress(StorageError):  # the primary has left it just now, and somebody else has come
                directories.rename(aside, place)

        taken = (aside, os.path.join(place, GIVEN_UP))
        return any(store.kind(os.path.join(folder, identity)) is not None for folder in taken)

    @staticmethod
    def _put_down(store: Directories, aside: str, place: str) -> None:
        """Move the taken build to where the next save finds it, unless there is one already."""
        try:
            hold = store.make_held(place)
        except StorageError:
            return

        try:
            with suppress(StorageError):
                store.rename(aside, os.path.join(place, GIVEN_UP))
        finally:
            hold.release()
