"""A store that simulates a crash and the loss of volatile data. Public as `penstock.testing.CrashStore`."""

from __future__ import annotations

__all__ = ("Crash", "CrashStore", "RecordedDisk")

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, final

from penstock.handlers.stores.directory_lock import UNHELD_SUFFIX
from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.stores import BuildToken, DataFile, Hold, Store, StoreWrapper, Transfers
from penstock.testing.faulty_store import UNCOUNTED
from penstock.testing.volatile_disk import (
    Content,
    DirectoryEntry,
    DiskWrite,
    Effect,
    Inode,
    Names,
    PowerLoss,
    Resize,
    SyncFile,
    SyncNames,
    VolatileDisk,
)

T = TypeVar("T")


@final
class Crash(StorageError):
    """The machine of a `CrashStore` has stopped; every further operation raises this."""


@final
class CrashStore(StoreWrapper):
    """Passes operations on, and records what would survive a power loss.

    The bytes of a file survive once they are synced, and a name in a directory (made, renamed or
    removed) once that directory is synced. Only operations that change something are counted, from 1. It can
    do what the inner store can, and no more. Thread-safe; keeps all content in memory.

    To try every power loss in a course of saves, record it once, then write what each of them leaves:

    ```python
    store = CrashStore(LocalStore(), root)
    ...  # save to it
    for n, loss in enumerate(store.power_losses()):
        loss.write(f"{folder}/{n}")
        ...  # restore from there
    ```

    Args:
        inner: The store that does the work, on files of the operating system.
        root: The directory in which all of it happens, and which `lose_power` rewrites. What is there is
            durable.
        unsynced: Files below `root` of which the names are durable and the bytes are not: some time after
            `cp -r`, for example.
    """

    def __init__(
        self, inner: Store, root: str | os.PathLike[str], *, unsynced: Iterable[str | os.PathLike[str]] = ()
    ) -> None:
        super().__init__(inner)
        self._root = Path(root).absolute()
        self._disk = RecordedDisk(self._root, [os.path.abspath(path) for path in unsynced])
        self._lock = threading.RLock()
        self._last: int | None = None
        self._n_changes = 0

    def call(self, operation: str, *given: Any, **options: Any) -> Any:
        """Pass on a call that changes nothing; each other call has its own method below."""
        if operation in UNCOUNTED:
            return super().call(operation, *given, **options)

        with self._lock:
            self._check(operation, str(given[0]))
            return super().call(operation, *given, **options)

    @property
    def n_changes(self) -> int:
        """Operations so far that changed something."""
        return self._n_changes

    @property
    def n_effects(self) -> int:
        """The number of their effects on the medium: a `remove_tree` is many removals. As in `PowerLoss`."""
        with self._lock:
            return self._disk.n_effects

    def stop_after(self, k: int) -> None:
        """Perform the k-th change, then raise `Crash` from every operation. 0: from the first one."""
        self._last = k

    def lose_power(self) -> None:
        """Set the files under `root` to what would be found after a power loss now.

        Of the possible states of the file system, it is the one with the least content. The recording
        begins again.
        """
        with self._lock:
            least = self._disk.least()
            for path in self._root.iterdir():
                self.inner.remove_tree(str(path)) if path.is_dir() else path.unlink()

            least.write(self._root)
            self._disk = RecordedDisk(self._root)
            self._last = None

    def power_losses(self, *, limit: int = 32) -> Iterator[PowerLoss]:
        """Yield what a power loss after each effect recorded so far may leave. Call it when all is recorded.

        Names whose directory was not synced may be changed or not. Bytes whose file was not synced may be
        there, or not, or in part. What was possible after the effect before is left out.

        Args:
            limit: How many choices of lost names are tried after each effect.
        """
        return self._disk.power_losses(limit)

    def make_directory(self, path: str) -> None:
        make = partial(super().make_directory, path)
        self.change("make_directory", path, make, lambda _: self._disk.made_directories(path))

    def write_file(self, path: str, data: bytes, *, create: bool = False) -> bool:
        def effects(written: bool) -> Iterable[Effect]:
            if not create:
                return self._disk.replaced(path, data)

            return self._disk.created_in_one_step(path, data) if written else ()

        write = partial(super().write_file, path, data, create=create)
        return self.change("write_file", path, write, effects)

    def replace_file(self, path: str, data: bytes) -> None:
        replace = partial(super().replace_file, path, data)
        self.change("replace_file", path, replace, lambda _: self._disk.replaced_in_one_step(path, data))

    def create_data_file(self, path: str) -> DataFile:
        return self._created("create_data_file", path, partial(super().create_data_file, path))

    def create_long_file(self, path: str, nbytes: int) -> DataFile:
        return self._created("create_long_file", path, partial(super().create_long_file, path, nbytes))

    def _created(self, name: str, path: str, create: Callable[[], DataFile]) -> DataFile:
        file = self._disk.new_node()
        inner = self.change(name, path, create, lambda _: self._disk.named(path, file))
        return _CrashDataFile(self, path, inner, file)

    def sync_directory(self, path: str) -> None:
        sync = partial(super().sync_directory, path)
        self.change("sync_directory", path, sync, lambda _: self._disk.synced_names(path))

    def publish(self, token: BuildToken) -> None:
        publish = partial(super().publish, token)
        self.change("publish", token.built, publish, lambda _: self._disk.moved(token.built, token.final))

    def discard(self, token: BuildToken) -> None:
        discard = partial(super().discard, token)
        self.change("discard", token.place, discard, lambda _: self._disk.removed(token.place))

    def remove_tree(self, path: str) -> None:
        remove = partial(super().remove_tree, path)
        self.change("remove_tree", path, remove, lambda _: self._disk.removed(path))

    def exchange(self, token: BuildToken) -> str | None:
        exchange = partial(super().exchange, token)
        return self.change(
            "exchange", token.built, exchange, lambda _: self._disk.exchanged(token.built, token.final)
        )

    def rename(self, source: str, destination: str) -> None:
        rename = partial(super().rename, source, destination)
        self.change("rename", source, rename, lambda _: self._disk.moved(source, destination))

    def share(self, source: str, destination: str) -> Literal["link", "copy"]:
        def effects(way: Literal["link", "copy"]) -> Iterable[Effect]:
            if way == "copy":
                return self._disk.copied(source, destination)

            return self._disk.linked(source, destination)

        return self.change("share", source, partial(super().share, source, destination), effects)

    def open_for_writing(self, path: str) -> DataFile:
        file = super().open_for_writing(path)
        return _CrashDataFile(self, path, file, self._disk.there(path))

    def sync_file(self, path: str) -> None:
        sync = partial(super().sync_file, path)
        self.change("sync_file", path, sync, lambda _: (SyncFile(self._disk.there(path)),))

    def make_held(self, path: str) -> Hold:
        make = partial(super().make_held, path)
        return self.change("make_held", path, make, lambda _: self._disk.made_held(path))

    def sync_tree(self, path: str) -> None:
        sync = partial(super().sync_tree, path)
        self.change("sync_tree", path, sync, lambda _: self._disk.synced_tree(path))

    def change(
        self, name: str, path: str, action: Callable[[], T], effects: Callable[[T], Iterable[Effect]]
    ) -> T:
        """Perform a change and record its effects, unless the machine has stopped. Used by the files, too."""
        with self._lock:
            self._check(name, path)
            result = action()
            self._n_changes += 1
            self._disk.record(effects(result))
            return result

    def _check(self, name: str, path: str) -> None:
        if self._last is not None and self._n_changes >= self._last:
            raise Crash(name, path, f"the machine stopped after change {self._last}")


@final
class _CrashDataFile:
    def __init__(self, store: CrashStore, path: str, inner: DataFile, file: Inode) -> None:
        self._store = store
        self._path = path
        self._inner = inner
        self._file = file
        self._end = self._allocated = 0

    @property
    def transfers(self) -> Transfers:
        return self._inner.transfers

    def allocate(self, nbytes: int) -> None:
        def effects(_: None) -> Iterable[Effect]:
            if nbytes <= max(self._allocated, self._end):
                return ()

            self._allocated = nbytes
            return (Resize(self._file, nbytes),)

        self._store.change("data.allocate", self._path, lambda: self._inner.allocate(nbytes), effects)

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        def effects(_: None) -> Iterable[Effect]:
            data = b"".join(buffers)
            self._end = max(self._end, offset + len(data))
            return (DiskWrite(self._file, offset, data),)

        self._store.change(
            "data.write_at", self._path, lambda: self._inner.write_at(offset, buffers), effects
        )

    def sync(self) -> None:
        def effects(_: None) -> Iterable[Effect]:
            if self._allocated > self._end:  # room that was not used is given back
                yield Resize(self._file, self._end)

            yield SyncFile(self._file)

        self._store.change("data.sync", self._path, self._inner.sync, effects)

    def close(self) -> None:
        self._inner.close()


@final
class RecordedDisk:
    """The files below a directory, and every effect on them since.

    Methods named after what was done yield its effects one by one. Each one must be recorded before the next
    one is asked for; `record` does so.

    Args:
        root: The directory. What is there is durable.
        unsynced: Files below it of which the names are durable, and the bytes are not.
    """

    __slots__ = ("_disk", "_effects", "_first", "_numbers", "_root")

    def __init__(self, root: Path, unsynced: Iterable[str] = ()) -> None:
        self._root = root
        self._numbers = itertools.count(1)
        self._effects: list[Effect] = []
        self._disk = disk = VolatileDisk()
        for effect in self._appeared(root, disk.top, {}):
            disk.apply(effect)

        files = {self.there(path) for path in unsynced}
        for effect in self._synced(disk.top):
            if not (isinstance(effect, SyncFile) and effect.file in files):
                disk.apply(effect)

        self._first = disk.copy()

    @property
    def n_effects(self) -> int:
        """Effects recorded so far."""
        return len(self._effects)

    def record(self, effects: Iterable[Effect]) -> None:
        """Record effects as they come."""
        for effect in effects:
            self._effects.append(effect)
            self._disk.apply(effect)

    def least(self) -> PowerLoss:
        """Return the power loss now that leaves the least."""
        return PowerLoss(self.n_effects, next(self._disk.contents(1)))

    def power_losses(self, limit: int) -> Iterator[PowerLoss]:
        """Yield what a power loss after each effect may leave; see `CrashStore.power_losses`."""
        disk = self._first.copy()
        before: set[Content] = set()
        for n_effects in range(len(self._effects) + 1):
            if n_effects:
                disk.apply(self._effects[n_effects - 1])

            now = dict.fromkeys(disk.contents(limit))
            for content in now:
                if content not in before:
                    yield PowerLoss(n_effects, content)

            before = set(now)

    # What was done

    def made_held(self, path: str) -> Iterator[Effect]:
        """The directory at `path` was made under another name, held and renamed.

        Its missing parents are durable; neither of its names is synced.
        """
        yield from self.made_directories(os.path.dirname(path))
        made = path + UNHELD_SUFFIX
        if self.find(made) is None:
            yield Names((self._entry(made, self.new_node(is_directory=True)),))

        yield from self._emptied(made)  # one that a loss left there is used

        yield from self.moved(made, path)

    def made_directories(self, path: str) -> Iterator[Effect]:
        """The directory at `path` was made, and its missing parents, durably."""
        above = self._disk.top
        for name in self._parts(path):
            node = self._disk.names(above).get(name)
            if node is None:
                node = self.new_node(is_directory=True)
                yield Names((DirectoryEntry(above, name, node),))
                yield SyncNames(above)

            above = node

    def named(self, path: str, file: Inode) -> Iterator[Effect]:
        """`path` is a name of `file` now, which may have others."""
        yield Names((self._entry(path, file),))

    def created(self, path: str, data: bytes) -> Iterator[Effect]:
        """A file with this content was written, and its content synced."""
        file = self.new_node()
        yield Names((self._entry(path, file),))
        yield DiskWrite(file, 0, data)
        yield SyncFile(file)

    def created_in_one_step(self, path: str, data: bytes) -> Iterator[Effect]:
        """A file was written under another name first, so that no reader sees a part of it."""
        beside = f"{path}.penstock-new"
        yield from self.created(beside, data)
        yield from self.named(path, self.there(beside))
        yield from self.removed(beside)

    def replaced_in_one_step(self, path: str, data: bytes) -> Iterator[Effect]:
        """A file was written under another name, which then became this one."""
        beside = f"{path}.penstock-new"
        yield from self.created(beside, data)
        yield from self.moved(beside, path)

    def replaced(self, path: str, data: bytes) -> Iterator[Effect]:
        """The file at `path` was written anew, in place, and synced. It may not have been there."""
        file = self.find(path)
        if file is None:
            yield from self.created(path, data)
            return

        yield Resize(file, 0)
        yield DiskWrite(file, 0, data)
        yield SyncFile(file)

    def copied(self, source: str, destination: str) -> Iterator[Effect]:
        """The file at `source` was copied, and the copy synced."""
        yield from self.created(destination, self._disk.data(self.there(source)))

    def linked(self, source: str, destination: str) -> Iterator[Effect]:
        """The file at `source` got a second name, and its content was synced, under both names."""
        file = self.there(source)
        yield from self.named(destination, file)
        yield SyncFile(file)

    def synced_names(self, path: str) -> Iterator[Effect]:
        """The directory at `path` was synced."""
        yield SyncNames(self.there(path))

    def synced_tree(self, path: str) -> Iterator[Effect]:
        """All below `path` was synced, and what others wrote there is known from now on."""
        yield from self._appeared(Path(path), self.there(path), {})
        yield from self._synced(self.there(path))

    def removed(self, path: str) -> Iterator[Effect]:
        """The file or the tree at `path` was removed, one name at a time. It may not have been there."""
        node = self.find(path)
        if node is not None:
            if node.is_directory:
                yield from self._emptied(path)

            yield Names((self._entry(path, None),))

    def moved(self, source: str, destination: str) -> Iterator[Effect]:
        """`source` was renamed."""
        yield Names((self._entry(destination, self.there(source)), self._entry(source, None)))

    def exchanged(self, first: str, second: str) -> Iterator[Effect]:
        """Two names were swapped."""
        yield Names((self._entry(first, self.there(second)), self._entry(second, self.there(first))))

    def find(self, path: str) -> Inode | None:
        """Return what is at `path`; None if nothing is."""
        node: Inode | None = self._disk.top
        for name in self._parts(path):
            if node is None:
                break

            node = self._disk.names(node).get(name)

        return node

    def there(self, path: str) -> Inode:
        """Return what is at `path`."""
        node = self.find(path)
        assert node is not None, f"{path} is not there"
        return node

    def size(self, file: Inode) -> int:
        """Return the length of a file in bytes, as everybody sees it now."""
        return len(self._disk.data(file))

    def new_node(self, *, is_directory: bool = False) -> Inode:
        """Return a file or directory that has no name yet."""
        return Inode(next(self._numbers), is_directory)

    def _emptied(self, path: str) -> Iterator[Effect]:
        for name in sorted(self._disk.names(self.there(path))):
            yield from self.removed(os.path.join(path, name))

    def _appeared(self, path: Path, directory: Inode, seen: dict[tuple[int, int], Inode]) -> Iterator[Effect]:
        """Return what others wrote into a directory. `seen` tells files of two names, by inode."""
        with os.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)

        for entry in found:
            status = entry.stat()
            key = status.st_dev, status.st_ino
            known = self._disk.names(directory).get(entry.name)
            node = known or seen.get(key) or self.new_node(is_directory=entry.is_dir())
            is_new = key not in seen
            seen[key] = node
            if known is None:
                yield Names((DirectoryEntry(directory, entry.name, node),))
            if node.is_directory:
                yield from self._appeared(Path(entry.path), node, seen)
            elif is_new and (data := Path(entry.path).read_bytes()) != self._disk.data(node):
                yield Resize(node, len(data))
                yield DiskWrite(node, 0, data)

    def _synced(self, directory: Inode) -> Iterator[Effect]:
        for node in self._disk.names(directory).values():
            if node.is_directory:
                yield from self._synced(node)
            else:
                yield SyncFile(node)

        yield SyncNames(directory)

    def _entry(self, path: str, node: Inode | None) -> DirectoryEntry:
        return DirectoryEntry(self.there(os.path.dirname(path)), os.path.basename(path), node)

    def _parts(self, path: str) -> Sequence[str]:
        return Path(path).relative_to(self._root).parts
