"""The local file system, and any other mounted file system that behaves as POSIX says."""

from __future__ import annotations

__all__ = ("LocalStore",)

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Sequence
from typing import Any, Literal, final, get_args

from penstock.handlers.stores import small_files as many
from penstock.handlers.stores.aligned_buffers import Arena
from penstock.handlers.stores.atomic_rename import exchange, rename_to_absent
from penstock.handlers.stores.data_file import LocalDataFile
from penstock.handlers.stores.descriptor import Descriptor, translated
from penstock.handlers.stores.direct_io import DIRECT_FROM, PAGE, Io
from penstock.handlers.stores.directory_lock import DirectoryHold
from penstock.handlers.stores.memory_mapping import map_file
from penstock.handlers.stores.readable_file import LocalReadableFile
from penstock.handlers.stores.whole_files import create_whole, replace_whole
from penstock.kernel.errors import ConfigError, StorageError
from penstock.kernel.protocols.store_capabilities import Placement
from penstock.kernel.protocols.stores import BuildToken


@final
class LocalStore:
    """Files and directories of a POSIX file system: a `Store` with every capability. Every method blocks.

    Failures are `StorageError`s that keep the operating system's number: a file that is not there
    has `errno.ENOENT`. Symbolic links are followed. No descriptor is inherited by child processes.

    Args:
        io: How large parts of data files travel. "auto": past the page cache (O_DIRECT) on local
            disks, except that bytes in the page cache are read from there. "direct": past the page
            cache wherever the file system allows it. "buffered": through the page cache.

    Raises:
        ConfigError: If `io` is none of these.
    """

    __slots__ = ("_arena", "_io")

    def __init__(self, *, io: Io = "auto") -> None:
        if io not in get_args(Io):
            raise ConfigError("store.io", f"must be one of {', '.join(get_args(Io))}, not {io!r}")

        self._io: Io = io
        self._arena = Arena()  # empty while no data file is open for writing

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        """Say what lies at `path`; None if nothing does, or a link that leads nowhere."""
        status = _status(path)
        if status is None:
            return None

        return "directory" if stat.S_ISDIR(status.st_mode) else "file"

    def size(self, path: str) -> int:
        """Return the length in bytes of the file at `path`."""
        with translated("stat", path):
            return os.stat(path).st_size

    def identity(self, path: str) -> object:
        """Return a value that differs once something else lies at `path`; None if nothing does.

        Includes the time, because the inode number of a removed directory is soon reused.
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
            read_only = os.statvfs(parent).f_flag & os.ST_RDONLY
        if read_only:
            raise StorageError("create", path, f"{parent!r} is on a read-only file system", errno.EROFS)

        # As the user whose rights the system will check, who in a set-uid program is not the real one.
        effective = os.access in os.supports_effective_ids
        if not os.access(parent, os.W_OK | os.X_OK, effective_ids=effective):
            raise StorageError("create", path, f"no permission to write to {parent!r}", errno.EACCES)

    def make_directory(self, path: str) -> None:
        """Create it and its missing parents; it may exist.

        The entry of each directory that was missing is durable when this returns.
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
                    # Somebody else made it just now, and may not have synced its entry yet.
                    if not os.path.isdir(made):
                        raise

            self.sync_directory(os.path.dirname(made))

        if not missing and self.kind(path) != "directory":
            raise StorageError("mkdir", path, "exists and is not a directory", errno.EEXIST)

    def hold(self, path: str) -> DirectoryHold:
        """Hold the directory; see `DirectoryHold`."""
        return DirectoryHold(path)

    def hold_reading(self, path: str) -> DirectoryHold:
        """Hold the directory beside other readers; see `DirectoryHold`."""
        return DirectoryHold(path, shared=True)

    def list_directory(self, path: str) -> Sequence[str]:
        """Names in the directory, sorted."""
        with translated("list", path):
            return sorted(os.listdir(path))

    def list_folders(self, path: str) -> Sequence[str]:
        """Names of the directories in the directory, sorted; links are followed."""
        with translated("list", path), os.scandir(path) as entries:
            return sorted([entry.name for entry in entries if entry.is_dir()])

    def read_file(self, path: str) -> bytes:
        """Return all that the file holds."""
        with translated("read", path), open(path, "rb", buffering=0) as file:
            return file.readall()

    def read_files(self, paths: Iterable[str]) -> Sequence[bytes | None]:
        """Return what each file holds; None where there is none."""
        return many.read_files(paths)

    def file_sizes(self, paths: Iterable[str]) -> Sequence[int | None]:
        """Return the bytes of each file; -1 of a directory, and None where there is nothing."""
        return many.file_sizes(paths)

    def write_file(self, path: str, data: bytes, *, create: bool = False) -> bool:
        """Write a whole file and make its content durable; see `Store.write_file`.

        The directory entry is not durable before `sync_directory`. Without `create` the file is not
        replaced in one step: after a failure it may be there with any part of the content.
        """
        if create:
            return create_whole(path, data)

        replace_whole(path, data)
        return True

    def create_data_file(self, path: str) -> LocalDataFile:
        """Create a file that does not exist yet, for writing at chosen offsets."""
        return LocalDataFile(path, self._io, self._arena)

    def open_data_file(self, path: str) -> LocalReadableFile:
        """Open a file for reading at chosen offsets."""
        return LocalReadableFile(path, self._io)

    def map_file(self, path: str) -> memoryview:
        """Return the file's bytes without reading them; see `memory_mapping.map_file`."""
        return map_file(path)

    def sync_directory(self, path: str) -> None:
        """Make the directory's entries durable.

        A file system that cannot sync a directory at all says EINVAL, which is accepted: nothing
        more could be done there.
        """
        directory = Descriptor(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with translated("fsync", path):
                os.fsync(directory.number)
        except StorageError as error:
            if error.errno != errno.EINVAL:
                raise
        finally:
            directory.close()

    def sync_tree(self, path: str) -> None:
        """Make durable every file and directory at and below `path`; links are not followed."""
        with translated("list", path):
            found = [(folder, files) for folder, _, files in os.walk(path, topdown=False, onerror=_reraise)]

        for folder, files in found:
            for name in files:
                self._sync_file(os.path.join(folder, name))

            self.sync_directory(folder)

    def begin_build(self, final: str, beside: str, file: str | None = None) -> BuildToken:
        """Return `beside` as the place: a name on the same file system, to be renamed to `final`.

        Nothing is done: whoever builds there holds the place.
        """
        return BuildToken(final, beside, file)

    def publish(self, token: BuildToken) -> None:
        """Rename what was built to its own path, which must be free, in one step."""
        self.rename(token.built, token.final)

    def exchange(self, token: BuildToken) -> None:
        """Swap what was built and what it replaces in one step, so that neither name is ever absent.

        Where the file system has no such step (renameat2 of Linux 3.15), the path is absent for a
        moment. See `atomic_rename.exchange_in_steps` for what a crash in that moment leaves behind.
        """
        with translated("exchange", token.final):
            exchange(token.built, token.final)

    def discard(self, token: BuildToken) -> None:
        """Remove the place and all in it."""
        self.remove_tree(token.place)

    def rename(self, source: str, destination: str) -> None:
        """Rename in one step; a destination that exists is an error, not replaced."""
        with translated("rename", source):
            rename_to_absent(source, destination)

    def share(self, source: str, destination: str) -> Literal["link"]:
        """Give the file at `source` a second name, which must be free, on the same file system.

        Raises:
            StorageError: With EXDEV, EPERM, EMLINK or ENOTSUP where that is not possible. A copy would
                cost what it costs to write the bytes anew, so none is made.
        """
        with translated("share", destination):
            os.link(os.path.realpath(source), destination)  # of a symbolic link: the file it leads to

        return "link"

    def kvstore_spec(self, directory: str) -> dict[str, Any]:
        """Return TensorStore's spec of a directory of files."""
        # The file driver takes a path for a directory only if it ends in a slash.
        return {"driver": "file", "path": os.path.join(directory, "")}

    @property
    def placement(self) -> Placement:
        """Chunks that are worth a direct transfer begin on a page."""
        return Placement(page_bytes=PAGE, page_from_bytes=DIRECT_FROM)

    @staticmethod
    def _sync_file(path: str) -> None:
        if os.path.islink(path) or not os.path.isfile(path):
            return  # a link, a pipe, a socket: nothing with bytes of its own

        file = Descriptor(path, os.O_RDONLY)
        try:
            with translated("fsync", path):
                os.fsync(file.number)
        finally:
            file.close()

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all that is in it. It may be absent, and others may be removing it, too."""
        with translated("remove", path):
            while os.path.lexists(path):
                try:
                    shutil.rmtree(path)
                except FileNotFoundError:
                    continue  # somebody else removed an entry: look again


def _reraise(error: OSError) -> None:
    raise error


def _status(path: str) -> os.stat_result | None:
    try:
        with translated("stat", path):
            return os.stat(path)
    except StorageError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR}:
            return None

        raise
