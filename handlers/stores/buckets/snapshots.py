"""A published checkpoint in a bucket, as one list and a few reads side by side tell it.

Opening a checkpoint asks some thirty times what is where, how long it is and what it says. Each question is
a request of tens of milliseconds. So everything below the prefix is listed once, with lengths and tags; short
objects are read at once; and what is asked afterwards is answered from that.
"""

from __future__ import annotations

__all__ = ("BucketSnapshot", "begin_snapshot", "decoded_snapshot")

import errno
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any, Final, Literal, final

import msgpack

from penstock.handlers.stores.buckets.bucket_builds import MARK
from penstock.handlers.stores.buckets.bucket_claims import CLAIM
from penstock.handlers.stores.buckets.bucket_files import BucketReadableFile
from penstock.handlers.stores.buckets.objects import ListedObject, Objects
from penstock.kernel.errors import StorageError, ThrottledError, UnreachableError
from penstock.kernel.pipeline.together import at_once
from penstock.kernel.protocols.stores import ReadableFile, Snapshot, Store, StoreWrapper, Transfers

_VERSION: Final = 1
"""Of what processes tell each other."""
_MOST_ENTRIES: Final = 20_000
"""What has more objects is asked about one by one."""
_FIRST_ENTRIES: Final = 1000
"""Of a checkpoint the mark is among so many; in a directory of many steps no more than that is listed."""
# A short document costs the latency of a request, whatever its length.
_SHORT: Final = 256 * 2**10
_MOST_READ: Final = 16
"""So many objects of at most so many bytes are read without being asked for: 4 MiB at most."""


@final
class BucketSnapshot(StoreWrapper, Snapshot):
    """A store to read one checkpoint from, as it was when it was listed. `begin_snapshot` makes it.

    What is asked about other paths, and all else, the store itself answers. See `Snapshot`.

    Args:
        store: Where the checkpoint is.
        client: Of the bucket.
        path: Of the checkpoint.
        key: The same, in the bucket.
        entries: What is below it, by key.
        mark: The content of the mark when the objects were listed before, if they were.
    """

    __slots__ = (
        "_before", "_client", "_compared", "_contents", "_entries", "_folders", "_key", "_lock",
        "_mark", "_n_asked", "_names", "path",
    )  # fmt: skip

    def __init__(
        self,
        store: Store,
        client: Objects,
        path: str,
        key: str,
        entries: Mapping[str, ListedObject],
        mark: bytes | None = None,
    ) -> None:
        self.path = path
        super().__init__(store)
        self._client, self._key, self._entries, self._before = client, key, entries, mark
        self._lock = Lock()
        self._contents: dict[str, bytes] = {}
        self._mark: bytes | None = None
        self._n_asked = self._compared = 0
        self._names: dict[str, set[str]] = {key: set()}  # of what is right in each folder
        self._folders: dict[str, set[str]] = {key: set()}
        for found in entries:
            self._note(found)

    def kvstore_spec(self, directory: str) -> dict[str, Any] | None:
        """Return the spec by which TensorStore itself reads there; that counts as a request here."""
        spec = self.inner.kvstore_spec(directory)
        if spec is not None:
            self._ask(self._key)

        return spec

    def reads(self) -> Sequence[Callable[[], None]]:
        """Return what reads short objects, each by one request. They may be called side by side."""
        short = [each for each in self._entries.values() if each.size <= _SHORT and CLAIM not in each.key]
        short = [each for each in short if each.key != f"{self._key}/{MARK}"]
        short.sort(key=lambda each: (each.key.count("/"), each.size))
        return [partial(self._read, each) for each in short[:_MOST_READ]]

    def _read(self, entry: ListedObject) -> None:
        try:
            found = self._client.read(entry.key)
        except (ThrottledError, UnreachableError):
            raise
        except StorageError:
            return  # a read of it says so

        if found is not None and len(found.data) == entry.size:
            self._contents[entry.key] = found.data

    def settle(self) -> BucketSnapshot | None:
        """Read the mark, after all else was read. If it is as listed, all belongs to one checkpoint.

        Returns:
            None if it does. Else another snapshot, to be read and settled: the checkpoint was replaced; or
            this server has other tags in its lists.

        Raises:
            StorageError: With `errno.ENOENT` if the mark is gone.
        """
        key = f"{self._key}/{MARK}"
        found = self._client.read(key)
        if found is None:
            raise StorageError("get", self._client.path(key), "nothing is there", errno.ENOENT)

        listed = self._entries[key].tag
        if found.data == self._before or (listed is not None and listed == found.list_tag):
            self._mark = self._contents[key] = found.data
            return None

        return begin_snapshot(self.inner, self._client, self.path, self._key, found.data)

    def recall(self, contents: Mapping[str, bytes], mark: bytes) -> None:
        """Take what another process read, in place of `reads` and `settle`."""
        self._contents |= contents
        self._mark = mark

    def is_current(self) -> bool:
        """Ask whether the mark is as it was."""
        self._ask(self._key)
        return self.identity_now() == self._mark

    def identity_now(self) -> object:
        """Return the identity now; by a request, if others were made since it was read."""
        with self._lock:
            n_asked = self._n_asked
            # No request was made since the mark was read: all that was answered is of one state.
            if n_asked == self._compared:
                return self._mark

        found = self._client.read(f"{self._key}/{MARK}")
        if found is None or found.data != self._mark:
            return None if found is None else found.data

        with self._lock:
            self._compared = n_asked
        return self._mark

    def encoded(self) -> bytes:
        """Encode the snapshot for other processes of the job."""
        rows = [[each.key[len(self._key) :], each.size, each.tag] for each in self._entries.values()]
        contents = {key[len(self._key) :]: data for key, data in self._contents.items()}
        # At level 1: names of objects are alike, and the service keeps this in the memory of one process.
        return zlib.compress(msgpack.packb([_VERSION, rows, contents, self._mark]), 1)

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        key = self._within(path)
        if key is None:
            found: Literal["file", "directory"] | None = self.inner.kind(path)
            return found
        if f"{key}/{MARK}" in self._entries:
            return "directory"
        if key in self._entries:
            return "file"

        return "directory" if key in self._names and key + CLAIM not in self._entries else None

    def size(self, path: str) -> int:
        key = self._within(path)
        found = self._entries.get(key) if key is not None else None
        if found is not None:
            return found.size

        self._ask(key)
        nbytes: int = self.inner.size(path)
        return nbytes

    def identity(self, path: str) -> object:
        """Return the identity as it was when the checkpoint was listed."""
        key = self._within(path)
        if key is None:
            return self.inner.identity(path)
        if key == self._key:
            return self._mark

        found = self._entries.get(f"{key}/{MARK}", self._entries.get(key))
        return ("within", self._mark, key) if found is None else (found.key, found.tag)

    def list_directory(self, path: str) -> Sequence[str]:
        key = self._within(path)
        if key is None:
            names: Sequence[str] = self.inner.list_directory(path)
            return names

        folders = self._visible(key, path)
        files = self._names[key] - self._folders.get(key, set())
        return sorted(folders | {name for name in files if CLAIM not in name})

    def list_folders(self, path: str) -> Sequence[str]:
        key = self._within(path)
        if key is None:
            names: Sequence[str] = self.inner.list_folders(path)
            return names

        return sorted(self._visible(key, path))

    def marked_folders(self, path: str, among: Collection[str] | None = None) -> Sequence[str]:
        key = self._within(path)
        if key is None:
            above, _, name = self.path.rpartition("/")
            if path == above and among is not None and set(among) == {name}:
                return [name]  # a snapshot is made of what is published alone

            return super().marked_folders(path, among)

        folders = self._folders.get(key, set())
        wanted = folders if among is None else folders & set(among)
        return sorted([name for name in wanted if f"{key}/{name}/{MARK}" in self._entries])

    def read_file(self, path: str) -> bytes:
        key = self._within(path)
        if key is not None and key in self._contents:
            return self._contents[key]

        self._ask(key)
        data: bytes = self.inner.read_file(path)
        return data

    def read_files(self, paths: Iterable[str]) -> Sequence[bytes | None]:
        return at_once(lambda path: self.read_file(path) if self.kind(path) == "file" else None, list(paths))

    def file_sizes(self, paths: Iterable[str]) -> Sequence[int | None]:
        return [self._file_size(path) for path in paths]

    def _file_size(self, path: str) -> int | None:
        if self.kind(path) == "directory":
            return -1
        try:
            return self.size(path)  # of one that is not listed the store is asked: the list may be stale
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None

            raise

    def open_data_file(self, path: str) -> ReadableFile:
        key = self._within(path)
        found = self._entries.get(key) if key is not None else None
        if found is None:
            self._ask(key)
            file: ReadableFile = self.inner.open_data_file(path)
            return file

        remote = BucketReadableFile(self._client, found.key, found.size)
        return _SnapshotFile(remote, self._contents.get(found.key), partial(self._ask, found.key))

    def _visible(self, key: str, path: str) -> set[str]:
        """Return the folders in a folder, without those that are being built."""
        if key not in self._names:
            raise _absent("list", path)

        return {
            name
            for name in self._folders.get(key, ())
            if CLAIM not in name
            and (f"{key}/{name}{CLAIM}" not in self._entries or f"{key}/{name}/{MARK}" in self._entries)
        }

    def _within(self, path: str) -> str | None:
        """Return the key of a path in the checkpoint; None for any other."""
        if path == self.path:
            return self._key

        return self._key + path[len(self.path) :].rstrip("/") if path.startswith(f"{self.path}/") else None

    def _ask(self, key: str | None) -> None:
        """Note that something of the checkpoint is read later than the mark."""
        with self._lock:
            self._n_asked += key is not None

    def _note(self, key: str) -> None:
        """Note in which folders a key is. Each folder is noted once."""
        is_folder = False
        while len(key) > len(self._key):
            above, _, name = key.rpartition("/")
            known = above in self._names
            self._names.setdefault(above, set()).add(name)
            if is_folder:
                self._folders.setdefault(above, set()).add(name)
            if known and is_folder:
                return

            key, is_folder = above, True


@final
class _SnapshotFile:
    """An object that may have been read already. What is asked for a second time is read anew.

    So bytes that were damaged on their way here are not what the second look sees.
    """

    __slots__ = ("_ask", "_data", "_given", "_remote", "_transfers")

    over_network: Literal[True] = True

    def __init__(self, remote: BucketReadableFile, data: bytes | None, ask: Callable[[], None]) -> None:
        self._remote, self._data, self._ask = remote, data, ask
        self._given: set[tuple[int, int]] = set()
        self._transfers = Transfers()

    @property
    def transfers(self) -> Transfers:
        return self._transfers + self._remote.transfers

    def read_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        data, needed = self._data, sum([buffer.nbytes for buffer in buffers])
        if data is None or offset + needed > len(data) or (offset, needed) in self._given:
            self._ask()
            self._remote.read_at(offset, buffers)
            return

        self._given.add((offset, needed))
        at = offset
        for buffer in buffers:
            if buffer.nbytes:
                buffer.cast("B")[:] = data[at : at + buffer.nbytes]
                at += buffer.nbytes

        self._transfers += Transfers(buffered_bytes=needed)

    def close(self) -> None:
        """Do nothing: no connection belongs to the file."""


def begin_snapshot(
    store: Store, client: Objects, path: str, key: str, mark: bytes | None = None
) -> BucketSnapshot | None:
    """List a checkpoint. Blocking; a request for each thousand objects.

    Returns:
        None if nothing is published right there, or if it has too many objects.
    """
    entries: dict[str, ListedObject] = {}
    for some in client.entries(key):
        entries |= {each.key: each for each in some}
        is_marked = f"{key}/{MARK}" in entries
        if len(entries) > _MOST_ENTRIES or (not is_marked and len(entries) >= _FIRST_ENTRIES):
            return None

    if f"{key}/{MARK}" not in entries:
        return None

    return BucketSnapshot(store, client, path, key, entries, mark)


def decoded_snapshot(
    store: Store, client: Objects, path: str, key: str, encoded: bytes
) -> BucketSnapshot | None:
    """Make the snapshot that `BucketSnapshot.encoded` encoded. It may be old: `is_current` says.

    Returns:
        None if it cannot be read, as from another version of penstock.
    """
    try:
        version, rows, contents, mark = msgpack.unpackb(zlib.decompress(encoded))
        if version != _VERSION:
            return None

        entries = {key + name: ListedObject(key + name, size, tag) for name, size, tag in rows}
        found = BucketSnapshot(store, client, path, key, entries)
        found.recall({key + name: data for name, data in contents.items()}, mark)
    except (zlib.error, ValueError, TypeError, msgpack.UnpackException):
        return None

    return found


def _absent(operation: str, path: str) -> StorageError:
    return StorageError(operation, path, "nothing is there", errno.ENOENT)
