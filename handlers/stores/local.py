"""The local file system, and any other mounted file system that follows POSIX."""

from __future__ import annotations

__all__ = ("LocalStore",)

import errno
import os
import stat
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final, get_args

from penstock.handlers.stores.data_file import (
    DIRECT_FROM,
    PAGE,
    Arena,
    Io,
    LocalDataFile,
    LocalReadableFile,
)
from penstock.handlers.stores.directory_lock import DirectoryHold, DirectoryHolds, Identity, identity_at
from penstock.handlers.stores.file_system import (
    NO_CALL,
    FileSystem,
    SystemCalls,
    exchange,
    remove_tree,
    rename_to_absent,
)
from penstock.handlers.stores.regular_files import (
    Descriptor,
    SyncedFiles,
    create_whole,
    data_bytes,
    open_regular,
    read_whole,
    replace_whole,
    translated,
)
from penstock.kernel.errors import (
    BuildChangedError,
    ConfigError,
    LinkOutsideError,
    NotAFileError,
    PenstockError,
    StorageError,
)
from penstock.kernel.memory.buffers import file_memory
from penstock.kernel.protocols.stores import BuildToken, Directories, Placement, SystemFiles

Links: TypeAlias = Literal["inside", "any"]
"""The links that a checkpoint may have in it."""


def _check_link(path: str, allowed: list[str]) -> None:
    target = os.path.realpath(path)
    if not any(target == place or target.startswith(os.path.join(place, "")) for place in allowed):
        raise LinkOutsideError(path, target)


@final
@dataclass(slots=True)
class LocalBuild:
    """The state of one save's build: the claim in its `BuildToken`."""

    published: Identity | None = None  #: what was published; None if nothing was yet
    replaced: str = ""  #: where what the save replaced is; empty if it is removed, or nothing was replaced
    replaced_identity: Identity | None = None  #: what lay there when it had been replaced


@final
class LocalStore(Directories, SystemFiles):
    """Files and directories of a POSIX file system. Every method blocks.

    Failures are `StorageError`s with the operating system's error number: `errno.ENOENT` for a missing
    file. Symbolic links are followed. Child processes inherit no descriptors.

    Args:
        io: How large parts of data files are transferred. "auto": past the page cache (O_DIRECT) on local
            disks, except that bytes already in the page cache are read from there. "direct": past the page
            cache wherever the file system allows it. "buffered": through the page cache.
        links: Which symbolic links a checkpoint that is read may have in it: those that lead to another place
            "inside" of it, or "any".
        calls: The system's calls. For tests: such as a file system refuses.

    Raises:
        ConfigError: If `io` or `links` is none of these.
    """

    __slots__ = ("_arena", "_holds", "_io", "_links", "_synced", "_system")

    def __init__(self, *, io: Io = "auto", links: Links = "inside", calls: SystemCalls | None = None) -> None:
        if io not in get_args(Io):
            raise ConfigError("store.io", f"must be one of {', '.join(get_args(Io))}, not {io!r}")

        if links not in get_args(Links):
            raise ConfigError("store.links", f"must be one of {', '.join(get_args(Links))}, not {links!r}")

        self._io: Io = io
        self._links: Links = links
        self._synced = SyncedFiles()
        self._arena = Arena()  # empty while no data file is open for writing
        self._system = FileSystem(calls)
        self._holds = DirectoryHolds(self._system)

    def __deepcopy__(self, memo: object) -> LocalStore:
        """Return this store: it stands for the file system, and knows what this process holds there."""
        return self

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        """Return the kind of entry at `path`; None if there is nothing, or only a dangling link."""
        status = _status(path)
        if status is None:
            return None

        return "directory" if stat.S_ISDIR(status.st_mode) else "file"

    def size(self, path: str) -> int:
        """Return the length in bytes of the file at `path`.

        Raises:
            NotAFileError: If it is a pipe, a socket or a device, which have none.
        """
        with translated("stat", path):
            status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise NotAFileError(path, "a pipe, a socket or a device")

        return status.st_size

    def identity(self, path: str) -> object:
        """Return a value that changes if `path` is replaced by another entry; None if there is nothing.

        Includes the modification time, because the inode number of a removed directory is soon reused.
        """
        status = _status(path)
        return None if status is None else (status.st_dev, status.st_ino, status.st_mtime_ns)

    def check_writable(self, path: str) -> None:
        """Raise `StorageError` unless `path`, whose parents may be missing, could be created.

        Looks at the nearest parent that exists, and writes nothing; a full disk is not noticed.
        """
        parent = os.path.dirname(os.path.abspath(path))
        while (status := _status(parent)) is None:
            if os.path.islink(parent):
                raise StorageError("create", path, f"{parent!r} is a link that leads nowhere", errno.ENOENT)

            parent = os.path.dirname(parent)

        if not stat.S_ISDIR(status.st_mode):
            raise StorageError("create", path, f"{parent!r} is not a directory", errno.ENOTDIR)

        with translated("create", path):
            found = self._system.statvfs(parent)
        if found is not None and found.f_flag & os.ST_RDONLY:
            raise StorageError("create", path, f"{parent!r} is on a read-only file system", errno.EROFS)

        # The system will check the effective user, who differs from the real one in a set-uid program.
        effective = os.access in os.supports_effective_ids
        if not os.access(parent, os.W_OK | os.X_OK, effective_ids=effective):
            raise StorageError("create", path, f"no permission to write to {parent!r}", errno.EACCES)

    def free_bytes(self, path: str) -> int | None:
        """Return the room on the file system of `path`, as far as this user may take it. Quotas are unknown.

        None for a file system that counts no blocks, or does not say.
        """
        parent = os.path.abspath(path)
        while _status(parent) is None:
            parent = os.path.dirname(parent)

        with translated("statvfs", path):
            found = self._system.statvfs(parent)
        if found is None or not found.f_blocks:
            return None

        return (found.f_bfree if os.geteuid() == 0 else found.f_bavail) * found.f_frsize

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents; it may exist already.

        The directory entry of each created directory is durable when this returns.
        """
        path = os.path.abspath(path)
        missing: list[str] = []
        while _status(path) is None:
            missing.append(path)
            path = os.path.dirname(path)

        for made in reversed(missing):
            with translated("mkdir", made):
                try:
                    os.mkdir(made)
                except FileExistsError:
                    # Another process just made it, and may not have synced its entry yet.
                    if not os.path.isdir(made):
                        raise

            try:
                self.sync_directory(os.path.dirname(made))
            except StorageError:
                with suppress(OSError):  # else the next one would find it there, and take it for durable
                    os.rmdir(made)
                raise

        if not missing and self.kind(path) != "directory":
            raise StorageError("mkdir", path, "exists and is not a directory", errno.EEXIST)

    def hold(self, path: str) -> DirectoryHold:
        """Lock the directory; see `DirectoryHold`."""
        return self._holds.take(path)

    def make_held(self, path: str) -> DirectoryHold:
        """Create the directory at `path`, locked before it is seen, and its missing parents, durably.

        Raises:
            InUseError: If something is there.
        """
        self.make_directory(os.path.dirname(path))
        return self._holds.make(path)

    def hold_reading(self, path: str) -> DirectoryHold:
        """Lock the directory together with other readers; see `DirectoryHold`."""
        return DirectoryHold(path, shared=True, system=self._system)

    def list_directory(self, path: str) -> Sequence[str]:
        """Return the names in the directory, sorted."""
        with translated("list", path):
            return sorted(os.listdir(path))

    def list_folders(self, path: str) -> Sequence[str]:
        """Return the names of its subdirectories, sorted. Links are followed."""
        with translated("list", path), os.scandir(path) as entries:
            return sorted([entry.name for entry in entries if entry.is_dir()])

    def read_file(self, path: str) -> bytes:
        """Return the content of the file; see `read_whole` for what it raises about a file that is none."""
        with translated("read", path):
            return read_whole(path)

    def read_files(self, paths: Iterable[str]) -> Sequence[bytes | None]:
        """Return the content of each file; None for a missing one, a directory, or a name no file can have.

        Raises:
            NotAFileError: If one is a pipe, a socket or a device.
            CorruptCheckpointError: If one is too long for a document, or most of it is a hole.
            StorageError: If one cannot be read.
        """
        found: list[bytes | None] = []
        for path in paths:
            try:
                found.append(read_whole(path))
            except PenstockError:
                raise
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
                found.append(None)
            except OSError as error:
                raise StorageError.of("read", path, error) from error

        return found

    def file_sizes(self, paths: Iterable[str]) -> Sequence[int | None]:
        """Return the size of each file in bytes; -1 for what is no file, None where there is nothing.

        Raises:
            StorageError: If the status of one cannot be read.
        """
        found: list[int | None] = []
        for path in paths:
            try:
                status = os.stat(path)
            except (FileNotFoundError, NotADirectoryError, ValueError):
                found.append(None)
            except OSError as error:
                raise StorageError.of("stat", path, error) from error
            else:
                found.append(status.st_size if stat.S_ISREG(status.st_mode) else -1)

        return found

    def data_sizes(self, paths: Iterable[str]) -> Sequence[int]:
        """Return the bytes of each file outside of its holes; 0 for what is no file.

        Raises:
            StorageError: If one cannot be looked at.
        """
        found: list[int] = []
        for path in paths:
            try:
                found.append(_data_size(path))
            except (FileNotFoundError, NotADirectoryError, ValueError):
                found.append(0)
            except OSError as error:
                raise StorageError.of("stat", path, error) from error

        return found

    def check_links(self, root: str, directory: str) -> None:
        """Refuse links at and below `directory` that lead out of `root`, unless they are allowed.

        Opens no file. In the cache of the Hugging Face hub, all files of a snapshot are links to the `blobs`
        next to it: these are allowed.

        Raises:
            LinkOutsideError: If there is one.
            StorageError: If a directory cannot be listed.
        """
        if self._links == "any":
            return

        allowed = [os.path.realpath(root)]
        above, folder = os.path.split(os.path.dirname(allowed[0]))
        if folder == "snapshots":
            allowed.append(os.path.join(above, "blobs"))

        if directory != root and os.path.islink(directory):
            _check_link(directory, allowed)

        pending = [directory]
        while pending:
            path = pending.pop()
            with translated("list", path), os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        _check_link(entry.path, allowed)
                    elif entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)

    def write_file(self, path: str, data: bytes, *, create: bool = False) -> bool:
        """Write a whole file and make its content durable; see `Store.write_file`.

        The directory entry is durable only after `sync_directory`. Without `create` the file is not replaced
        in one step: after a failure it may hold any part of the content.
        """
        is_written = create_whole(path, data) if create else True
        if not create:
            replace_whole(path, data, synced=self._synced)

        self._holds.note_written(path)
        return is_written

    def replace_file(self, path: str, data: bytes) -> None:
        """Write a whole file, and replace one that is there in one step; see `Store.replace_file`.

        A crash may leave `<path>.penstock-new-<hex>`.
        """
        new = f"{path}.penstock-new-{uuid.uuid4().hex}"
        try:
            self.write_file(new, data)
            with translated("replace", path):
                os.replace(new, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(new)

            raise

        self._holds.note_written(path)

    def create_data_file(self, path: str) -> LocalDataFile:
        """Create a file, which must not exist yet, for writing at chosen offsets."""
        file = LocalDataFile(path, self._io, self._arena, self._synced)
        self._holds.note_written(path)
        return file

    def open_for_writing(self, path: str) -> LocalDataFile:
        """Open a data file that another process has created; see `SharedFiles`."""
        return LocalDataFile(path, self._io, self._arena, self._synced, create=False)

    def open_data_file(self, path: str) -> LocalReadableFile:
        """Open a file for reading at chosen offsets."""
        return LocalReadableFile(path, self._io)

    def map_file(self, path: str) -> memoryview:
        """Map a whole file, read-only and shared, in the same time for any size.

        The mapping lives as long as the view or any slice of it, even if the file is renamed or removed. It
        keeps no descriptor open.

        Use it only for files that never change: if a mapped file is truncated, a process that reads past its
        new end is killed (SIGBUS).

        Returns:
            The bytes; empty for an empty file.

        Raises:
            NotAFileError: If it is a pipe, a socket or a device.
            StorageError: If it cannot be opened or mapped.
        """
        file = Descriptor.of_regular(path)
        try:
            with translated("map", path):
                nbytes = os.fstat(file.number).st_size
                return file_memory(file.number, nbytes) if nbytes else memoryview(b"")
        finally:
            file.close()

    def sync_directory(self, path: str) -> None:
        """Make the directory's entries durable.

        Where a file system cannot do that, nothing more can be done, and it is logged once.
        """
        directory = Descriptor(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with translated("fsync", path):
                self._system.calls.fsync(directory.number)
        except StorageError as error:
            if error.errno not in NO_CALL:
                raise

            self._system.note_weaker("fsync", path)
        finally:
            directory.close()

    def sync_file(self, path: str) -> None:
        """Make the content of the file durable, unless this store did so after its last change."""
        file = Descriptor.of_regular(path)
        try:
            with translated("fsync", path):
                if not self._synced.knows(file.number):
                    os.fsync(file.number)
                    self._synced.note(file.number)
        finally:
            file.close()

    def sync_tree(self, path: str) -> None:
        """Make every file and directory at and below `path` durable. Links are not followed."""
        with translated("list", path):
            found = [(folder, files) for folder, _, files in os.walk(path, topdown=False, onerror=_reraise)]

        for folder, files in found:
            for name in files:
                self._sync_file(os.path.join(folder, name))

            self.sync_directory(folder)

    def begin_build(self, final: str, beside: str, file: str | None = None) -> BuildToken:
        """Return `beside` as the place to build: a name on the same file system, later renamed to `final`.

        Creates and locks nothing; the caller must hold the place while it builds there. A symbolic link that
        is there is removed: no save builds in one, and it would be in the way.
        """
        with suppress(OSError):
            if os.path.islink(beside):
                os.unlink(beside)

        return BuildToken(final, beside, file, LocalBuild())

    def publish(self, token: BuildToken) -> None:
        """Rename what was built to its final path, which must be free, in one step.

        Raises:
            BuildChangedError: If another program was at work there; then it is not published.
        """
        built = self._holds.built(token)
        self._move(token.built, token.final, built)
        if isinstance(token.claim, LocalBuild):
            token.claim.published = built

    def exchange(self, token: BuildToken) -> str:
        """Swap what was built with what it replaces in one step, so that neither name is ever absent.

        Where the file system cannot do that (renameat2 of Linux 3.15), the path is absent for a moment. See
        `file_system.exchange_in_steps` for what a crash in that moment leaves behind.

        A symbolic link at `final` is replaced itself; what it leads to stays.

        Raises:
            BuildChangedError: If another program was at work there; then it is undone.
        """
        build = token.claim if isinstance(token.claim, LocalBuild) else LocalBuild()
        built = self._holds.built(token)
        with translated("exchange", token.final):
            older = exchange(token.built, token.final, self._system.calls.renameat2)
        if older != token.built:
            self._system.note_weaker("renameat2", token.final)

        # Noted at once: another program may rename or replace it before it is deleted.
        build.replaced, build.replaced_identity = older, identity_at(older)
        problem = self._holds.problem_of(token, built)
        if problem is not None:
            raise self._given_back(problem, build, token.final, swap=True)

        build.published = built
        return older

    def discard(self, token: BuildToken) -> None:
        """Remove what was built; or, after its publication, what it replaced. The caller holds either.

        What others have put at the place since stays. They may have taken the place itself, if this process
        was silent for too long in a job of several.

        Raises:
            BuildChangedError: If another program took away what was published; then what it replaced stays.
        """
        build = token.claim if isinstance(token.claim, LocalBuild) else LocalBuild()
        if build.replaced:
            problem = self._holds.problem_of(token, build.published)
            if problem is not None:
                is_ours = identity_at(token.final) == build.published
                raise self._given_back(problem, build, token.final, swap=is_ours)
            if identity_at(build.replaced) != build.replaced_identity:
                gone, build.replaced = build.replaced, ""
                raise StorageError("remove", gone, "is not what was replaced any more", errno.ESTALE)

        if (build.published is None or token.file is not None) and self._holds.is_at(token.place):
            self.remove_tree(token.place)
        if not build.replaced:
            return

        if token.file is None:
            self.remove_tree(build.replaced)
        else:
            # It is next to the place, if the two could not be swapped in one step.
            with translated("remove", build.replaced), suppress(FileNotFoundError):
                os.unlink(build.replaced)

        build.replaced = ""

    def rename(self, source: str, destination: str) -> None:
        """Rename in one step. It is an error if the destination exists; it is never replaced.

        Raises:
            BuildChangedError: If `source` is held, and another program has put something else there.
        """
        hold = None if os.path.islink(source) else self._holds.held(source)  # or its target is
        self._move(source, destination, None if hold is None else hold.identity_of("", source))

    def _move(self, source: str, destination: str, expected: Identity | None) -> None:
        """Rename what has a certain identity, if one is given. Anything else is put back.

        Another program may act between a look at the names and the rename. So they are looked at afterwards.
        """
        with translated("rename", source):
            if not rename_to_absent(source, destination, self._system.calls.renameat2):
                self._system.note_weaker("renameat2", source)
        if expected is None or identity_at(destination) == expected:
            return

        with suppress(OSError):
            rename_to_absent(destination, source)

        problem = f"another program has put something else at {source!r}, or taken this away"
        raise BuildChangedError("rename", destination, problem)

    def _given_back(self, problem: str, build: LocalBuild, final: str, *, swap: bool) -> BuildChangedError:
        """Move the replaced checkpoint back to its path; return what was done.

        Args:
            problem: What another program did.
            build: Of the save.
            final: The path.
            swap: Whether what is there now came from where the save was built, and may go back there. Else
                it stays, and what was replaced gets a name that is never cleaned up.
        """
        older, build.replaced = build.replaced, ""
        if identity_at(older) != build.replaced_identity:
            return BuildChangedError("publish", final, f"{problem}, and what it was to replace")

        with translated("exchange", final):
            try:
                rename_to_absent(older, final, self._system.calls.renameat2)
            except FileExistsError:
                if not swap:
                    aside = f"{final}.penstock-aside-{uuid.uuid4().hex}"
                    os.rename(older, aside)
                    return BuildChangedError("publish", final, problem, aside)

                exchange(older, final, self._system.calls.renameat2)

        with suppress(StorageError):
            self.sync_directory(os.path.dirname(final))

        return BuildChangedError("publish", final, f"{problem}; the earlier checkpoint is there again")

    def share(self, source: str, destination: str) -> Literal["link"]:
        """Give the file at `source` a second name, which must be free, on the same file system.

        Its bytes are made durable: their writer, as `cp -r`, may not have synced them.

        Raises:
            StorageError: With EXDEV, EPERM, EMLINK or ENOTSUP where that is not possible. The file is not
                copied instead, because that would cost as much as writing the bytes again.
        """
        with translated("share", destination):
            os.link(os.path.realpath(source), destination)  # link the target, not a symlink
        try:
            self._sync_file(destination)
        except StorageError:
            os.unlink(destination)
            raise

        self._holds.note_written(destination)
        return "link"

    def kvstore_spec(self, directory: str) -> dict[str, Any]:
        """Return TensorStore's spec for a directory of files."""
        # The file driver treats a path as a directory only if it ends in a slash.
        return {"driver": "file", "path": os.path.join(directory, "")}

    @property
    def placement(self) -> Placement:
        """Chunks that are large enough for a direct transfer begin on a page boundary."""
        return Placement(page_bytes=PAGE, page_from_bytes=DIRECT_FROM)

    @staticmethod
    def _sync_file(path: str) -> None:
        if os.path.islink(path) or not os.path.isfile(path):
            return  # a link, pipe or socket has no bytes of its own

        file = Descriptor(path, os.O_RDONLY)
        try:
            with translated("fsync", path):
                os.fsync(file.number)
        finally:
            file.close()

    def remove_tree(self, path: str) -> None:
        """Remove a directory and everything in it. It may be absent, or be removed by others meanwhile.

        Of a symbolic link, only the link is removed. The caller holds the directory, or knows that no one
        else can build there.
        """
        with translated("remove", path):
            remove_tree(path, lambda: self._holds.give_up_spare(path))

        self._holds.note_removed(path)


def _data_size(path: str) -> int:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        return 0
    if status.st_blocks * 512 >= status.st_size:
        return status.st_size  # no holes, or few

    number, nbytes = open_regular(path)
    try:
        return data_bytes(number, nbytes)
    finally:
        os.close(number)


def _reraise(error: OSError) -> None:
    raise error


def _status(path: str) -> os.stat_result | None:
    try:
        with translated("stat", path):
            return os.stat(path)
    except StorageError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.EINVAL}:
            return None

        raise
