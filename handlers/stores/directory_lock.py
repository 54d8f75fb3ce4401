"""Locking a directory, so that one process at a time builds, reads or deletes there."""

from __future__ import annotations

__all__ = (
    "UNHELD_SUFFIX",
    "DirectoryHold",
    "DirectoryHolds",
    "Identity",
    "check_name_is_free",
    "claim_name",
    "identity_at",
)

import errno
import fcntl
import os
from contextlib import suppress
from typing import Final, TypeAlias, final
from weakref import WeakValueDictionary

from penstock.handlers.stores.file_system import FileSystem, remove_tree, rename_only_to_absent
from penstock.handlers.stores.publishing.claims import Claim, check_unclaimed
from penstock.handlers.stores.publishing.paths import TEMPORARY_SUFFIX
from penstock.handlers.stores.regular_files import create_whole, read_whole, translated
from penstock.kernel.errors import BuildChangedError, InUseError, StorageError
from penstock.kernel.protocols.stores import BuildToken, Hold

Identity: TypeAlias = tuple[int, int]
"""Device and inode: of an entry that is open, or below one that is, no other one has it."""

# Some network file systems have no such lock. A file with the holder's name takes its place there.
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})

UNHELD_SUFFIX: Final = "-new"
"""Ends the name of a directory until it is held and gets its own name."""


@final
class DirectoryHold(Hold):
    """An flock on a directory. The system releases it when the process ends, even after a crash.

    The hold belongs to the directory, not to its name: it stays with it through a rename. Where the file
    system has no such lock, an exclusive hold is a claim, which belongs to the name.

    An exclusive hold keeps a second descriptor, so that the directory can be removed when the process has
    none left.

    Args:
        path: The directory to lock.
        shared: Whether other shared holds may exist at the same time.
        name: The path that it will be renamed to and is claimed by; `path` itself if empty.
        system: The system's calls.

    Raises:
        InUseError: If this process or another one already holds the directory, or if the directory was
            replaced meanwhile.
    """

    __slots__ = ("__weakref__", "_claim", "_path", "_pid", "_spare", "number", "written")

    def __init__(
        self, path: str, *, shared: bool = False, name: str = "", system: FileSystem | None = None
    ) -> None:
        self.written: set[str] = set()  #: files that this process has made in it, by their relative names
        self._pid = os.getpid()
        self.number = self._spare = -1  # once released, and in case the directory cannot be opened
        self._claim: Claim | None = None
        self._path = path
        with translated("hold", path):
            self.number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

        try:
            if not shared:
                with translated("hold", path):
                    self._spare = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

            system = system or FileSystem()
            try:
                system.calls.flock(self.number, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InUseError(path) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise StorageError.of("hold", path, error) from error

                system.note_weaker("flock", path)
                if shared:
                    check_name_is_free(path)
                else:
                    self._claim = claim_name(name or path)

            # It may have been removed or replaced between the open and the lock.
            with translated("hold", path):
                is_same = os.path.samestat(os.fstat(self.number), os.stat(path))
        except BaseException:
            self.release()
            raise

        if not is_same:
            self.release()
            raise InUseError(path)

    def is_at(self, path: str) -> bool:
        """True if `path` is the directory that is held; so it counts once it is not held any more."""
        if self.number < 0:
            return True

        with translated("stat", path), suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self.number), os.stat(path))

        return False

    def identity_of(self, relative: str, path: str) -> Identity:
        """Return the identity of an entry in the directory, wherever that is; of itself if empty.

        Raises:
            BuildChangedError: If the entry is not there, or a file that this process made in the directory.
        """
        number = self.number
        try:
            for name in self.written.copy():  # to which a handler that hangs may add
                os.stat(name, dir_fd=number, follow_symlinks=False)

            status = os.stat(relative or ".", dir_fd=number, follow_symlinks=False)
        except FileNotFoundError as error:
            problem = f"{error.filename!r}, which this save has written, is not there any more"
            raise BuildChangedError("publish", path, problem) from error
        except OSError as error:
            raise StorageError.of("stat", path, error) from error

        return status.st_dev, status.st_ino

    def give_up_spare(self) -> None:
        """Close the second descriptor: the directory is removed next."""
        spare, self._spare = self._spare, -1
        if spare >= 0:
            with suppress(OSError):  # it has only been opened
                os.close(spare)

    def release(self) -> None:
        """Release the lock. Idempotent.

        Raises:
            StorageError: If the descriptor could not be closed. The lock is released all the same.
        """
        self.give_up_spare()
        number, self.number = self.number, -1
        if number < 0:
            return

        # A forked child shares the lock and must not release it. This process must unlock explicitly,
        # because closing is not enough while a child still has the descriptor open.
        if os.getpid() == self._pid:
            with suppress(OSError):
                fcntl.flock(number, fcntl.LOCK_UN)
            if self._claim is not None:
                self._claim.release()

        with translated("release", self._path):
            os.close(number)

    __del__ = release


@final
class DirectoryHolds:
    """Takes the holds of one store, and knows those on whole directories by their paths.

    Args:
        system: The system's calls.
    """

    __slots__ = ("_alone", "_system")

    def __init__(self, system: FileSystem) -> None:
        self._system = system
        self._alone: WeakValueDictionary[str, DirectoryHold] = WeakValueDictionary()

    def take(self, path: str) -> DirectoryHold:
        """Hold the directory at `path` exclusively.

        Raises:
            InUseError: If anybody holds it.
        """
        hold = self._alone[path] = DirectoryHold(path, system=self._system)
        return hold

    def make(self, path: str) -> DirectoryHold:
        """Create the directory at `path`, in one that exists, held before it is seen. Its name is not synced.

        It is made under another name, held, and then renamed. Every process uses the same other name. So the
        next one finds what one left that was killed, and uses it; of several who are as far, one can hold it,
        and the others are refused.

        Where the file system cannot rename to a free name alone, it is made first and held then; who finds it
        in between may take it, and this call is refused. If it fails, nothing is left at `path`.

        Raises:
            InUseError: If something is at `path`, or another one was faster.
        """
        first, system = path + UNHELD_SUFFIX, self._system
        hold = _make_first(first, path, system)
        is_ours = False
        try:
            with translated("mkdir", path):
                is_ours = rename_only_to_absent(first, path, system.calls.renameat2)
        except StorageError as error:
            if error.errno in {errno.EEXIST, errno.ENOENT}:
                raise InUseError(path) from error

            raise
        finally:
            if not is_ours:
                _remove_if_empty(first)
                hold.release()

        if not is_ours:
            hold = _make_then_hold(path, system)
            system.note_weaker("renameat2", path)

        self._alone[path] = hold
        return hold

    def is_at(self, path: str) -> bool:
        """True if the directory that is held under `path` is there still, if there is one."""
        hold = self._alone.get(path)
        return hold is None or hold.is_at(path)

    def built(self, token: BuildToken) -> Identity:
        """Return the identity of a finished build at its place, with every file that was made in it.

        Raises:
            BuildChangedError: If another program has renamed, removed or replaced it, or a file in it.
            StorageError: If the medium refuses; with `errno.ENOENT` if nothing is there, and was not held.
        """
        hold, there = self.held(token.place), identity_at(token.built)
        if hold is None:
            if there is None:
                gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), token.built)
                raise StorageError.of("publish", token.built, gone) from gone

            return there

        built = hold.identity_of(token.file or "", token.place)
        if built != there:
            was = "taken it away" if there is None else "put something else there"
            problem = f"another program has {was} while this save was building"
            raise BuildChangedError("publish", token.built, problem)

        return built

    def problem_of(self, token: BuildToken, published: Identity | None) -> str | None:
        """Return what another program did to the checkpoint at `token.final`; None if it is whole.

        One that was removing the build goes on in the directory that it has opened, whatever its name is now.
        """
        if published is None or identity_at(token.final) != published:
            return "another program has renamed, removed or replaced what this save built"

        hold, prefix = self.held(token.place), "" if token.file is None else f"{token.file}/"
        for name in () if hold is None else hold.written.copy():
            path = os.path.join(token.final, name.removeprefix(prefix))
            if name.startswith(prefix) and identity_at(path) is None:
                return f"another program has removed {path!r}, which this save has written"

        return None

    def held(self, path: str) -> DirectoryHold | None:
        """Return the exclusive hold of this store that was taken at a path; None if there is none now."""
        hold = self._alone.get(path)
        return hold if hold is not None and hold.number >= 0 else None

    def note_written(self, path: str) -> None:
        """Note that this process has made a file, if it is in a directory that is held."""
        for reference in self._alone.valuerefs():  # a list, which other threads do not change
            hold, prefix = reference(), f"{reference.key}/"
            if hold is not None and path.startswith(prefix):
                hold.written.add(path.removeprefix(prefix))

    def note_removed(self, path: str) -> None:
        """Note that this process has removed what lay at a path, if that is in a directory that is held."""
        for reference in self._alone.valuerefs():
            hold, prefix = reference(), f"{reference.key}/"
            if hold is not None and path.startswith(prefix):
                within = path.removeprefix(prefix)
                names = hold.written.copy()  # to which other threads may add
                hold.written -= {name for name in names if name == within or name.startswith(f"{within}/")}

    def give_up_spare(self, path: str) -> None:
        """Close the descriptor that the hold on `path` keeps for its removal, if there is one."""
        hold = self._alone.get(path)
        if hold is not None:
            hold.give_up_spare()


def identity_at(path: str) -> Identity | None:
    """Return the identity of what is at a path, of a link that of the link; None if nothing is.

    Raises:
        StorageError: If the medium refuses.
    """
    with translated("stat", path):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None

    return status.st_dev, status.st_ino


def _make_first(first: str, path: str, system: FileSystem) -> DirectoryHold:
    """Make the empty directory `first`, later renamed to `path`, unless it exists, and hold it.

    Raises:
        InUseError: If somebody else holds it, or has removed it.
        StorageError: If the medium refuses, or something is in it.
    """
    is_made = True
    try:
        with translated("mkdir", path):
            os.mkdir(first)
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise
        is_made = False  # it was left there, or another one is as far

    try:
        hold = DirectoryHold(first, name=path, system=system)
    except InUseError as error:
        if is_made and error.more and os.path.lexists(path):  # a claim of the name needs this no more
            _remove_if_empty(first)
        raise InUseError(path, error.more) from error
    except BaseException as error:
        if isinstance(error, StorageError) and error.errno == errno.ENOENT:
            raise InUseError(path) from error
        if is_made:
            _remove_if_empty(first)
        raise

    try:
        if not is_made:
            _make_empty(first)
    except BaseException:
        hold.release()
        raise

    return hold


def _make_empty(path: str) -> None:
    """Empty a directory that is held. After a power loss it is there again with what was built in it.

    Its later name is not synced, and what is in it is. Under a name that is not ours, files are refused.
    """
    with translated("list", path):
        names = os.listdir(path)
    if names and TEMPORARY_SUFFIX not in os.path.basename(path):
        raise StorageError("mkdir", path, "holds something that no save has put there", errno.ENOTEMPTY)

    for name in names:
        child = os.path.join(path, name)
        with translated("remove", child):
            if os.path.isdir(child):
                remove_tree(child)
            else:
                os.unlink(child)


def _remove_if_empty(path: str) -> None:
    with suppress(OSError):
        os.rmdir(path)


def _make_then_hold(path: str, system: FileSystem) -> DirectoryHold:
    try:
        with translated("mkdir", path):
            os.mkdir(path)

        return DirectoryHold(path, system=system)
    except StorageError as error:
        if error.errno in {errno.EEXIST, errno.ENOENT}:  # it was there, or was taken and removed
            raise InUseError(path) from error

        raise


_SUFFIX: Final = ".penstock-claim"


def claim_name(path: str) -> Claim:
    """Claim what is at a path, by the file `.<name>.penstock-claim` next to it; see `Claim`.

    Raises:
        InUseError: If somebody else claims it.
        StorageError: If the file cannot be created.
    """
    return Claim(_LocalFiles(), _claim_file(path), path)


def check_name_is_free(path: str) -> None:
    """Return if `path` is not claimed; see `check_unclaimed`.

    Raises:
        InUseError: If somebody does.
        StorageError: If the medium refuses.
    """
    check_unclaimed(_LocalFiles(), _claim_file(path), path)


def _claim_file(path: str) -> str:
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(folder, f".{name}{_SUFFIX}")


@final
class _LocalFiles:
    def create(self, file: str, data: bytes) -> bool:
        try:
            return create_whole(file, data)
        except StorageError as error:
            if error.errno == errno.EEXIST:
                return False

            raise

    def read(self, file: str) -> bytes | None:
        try:
            with translated("read", file):
                return read_whole(file)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None

            raise

    def remove(self, file: str) -> None:
        with translated("remove", file):
            os.unlink(file)
