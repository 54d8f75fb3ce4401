"""A store that simulates a crash and the loss of volatile data. Public as `penstock.testing.CrashStore`."""

from __future__ import annotations

__all__ = ("Crash", "CrashStore")

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, final

from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.store_capabilities import (
    BuildHolds,
    Exchanges,
    FolderListing,
    ForeignFiles,
    Hold,
    KvStoreSpecs,
    ManyFiles,
    MappedFiles,
    Placement,
    PreferredPlacement,
    ReadHolds,
    Renames,
    SharedFiles,
)
from penstock.kernel.protocols.stores import BuildToken, DataFile, ReadableFile, Store
from penstock.kernel.protocols.transfers import Transfers

T = TypeVar("T")


@final
class Crash(StorageError):
    """The machine of a `CrashStore` has stopped; every further operation raises this."""


@dataclass(slots=True)
class _File:
    now: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass(slots=True)
class _Directory:
    now: dict[str, _Node] = field(default_factory=dict[str, "_Node"])
    durable: dict[str, _Node] = field(default_factory=dict[str, "_Node"])


_Node: TypeAlias = _File | _Directory


@final
class CrashStore:
    """Passes operations on, and records what would survive a power loss.

    The bytes of a file survive once they are synced, and a name in a directory (made, renamed or
    removed) once that directory is synced. Initial content is durable. Only operations that change something
    are counted, from 1. It has the capabilities of the inner store and no others. Thread-safe; keeps all
    content in memory.

    Args:
        inner: The store that does the work, on files of the operating system.
        root: The directory in which all of it happens, and which `lose_power` rewrites.
    """

    exchange: Callable[[BuildToken], None]
    rename: Callable[[str, str], None]
    share: Callable[[str, str], Literal["link", "copy"]]
    map_file: Callable[[str], memoryview]
    sync_tree: Callable[[str], None]
    kvstore_spec: Callable[[str], dict[str, Any]]
    placement: Placement
    hold: Callable[[str], Hold]
    hold_reading: Callable[[str], Hold]
    list_folders: Callable[[str], Sequence[str]]
    read_files: Callable[[Iterable[str]], Sequence[bytes | None]]
    file_sizes: Callable[[Iterable[str]], Sequence[int | None]]

    def __init__(self, inner: Store, root: str | os.PathLike[str]) -> None:
        self._inner = inner
        self._root = Path(root)
        self._top = _scan(self._root)
        self._lock = threading.RLock()
        self._last: int | None = None
        self._n_changes = 0
        self._show_changes(inner)
        self._show_looks(inner)

    # The inner store's capabilities become attributes of this instance, so that `isinstance` finds exactly
    # those.

    def _show_changes(self, inner: Store) -> None:
        if isinstance(inner, Exchanges):
            self.exchange = partial(self._exchange, inner)
        if isinstance(inner, Renames):
            self.rename = partial(self._rename, inner)
        if isinstance(inner, SharedFiles):
            self.share = partial(self._share, inner)
        if isinstance(inner, ForeignFiles):
            self.sync_tree = partial(self._sync_tree, inner)

    def _show_looks(self, inner: Store) -> None:
        if isinstance(inner, MappedFiles):
            self.map_file = partial(self._look, "map_file", action=inner.map_file)
        if isinstance(inner, BuildHolds):
            self.hold = partial(self._look, "hold", action=inner.hold)
        if isinstance(inner, ReadHolds):
            self.hold_reading = partial(self._look, "hold_reading", action=inner.hold_reading)
        if isinstance(inner, FolderListing):
            self.list_folders = partial(self._look, "list_folders", action=inner.list_folders)
        if isinstance(inner, ManyFiles):
            read_files, file_sizes = inner.read_files, inner.file_sizes
            self.read_files = lambda paths: self._look("read_files", "", lambda _: read_files(paths))
            self.file_sizes = lambda paths: self._look("file_sizes", "", lambda _: file_sizes(paths))
        if isinstance(inner, KvStoreSpecs):
            self.kvstore_spec = inner.kvstore_spec
        if isinstance(inner, PreferredPlacement):
            self.placement = inner.placement

    @property
    def n_changes(self) -> int:
        """Operations so far that changed something."""
        return self._n_changes

    def stop_after(self, k: int) -> None:
        """Perform the k-th change, then raise `Crash` from every operation. 0: from the first one."""
        self._last = k

    def lose_power(self) -> None:
        """Set the files under `root` to what would be found after a power loss now.

        Of the possible states of the file system, it is the one with the least content.
        """
        with self._lock:
            for path in self._root.iterdir():
                self._inner.remove_tree(str(path)) if path.is_dir() else path.unlink()

            _write(self._top, self._root)
            self._top = _scan(self._root)
            self._last = None

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        return self._look("kind", path, self._inner.kind)

    def size(self, path: str) -> int:
        return self._look("size", path, self._inner.size)

    def identity(self, path: str) -> object:
        return self._look("identity", path, self._inner.identity)

    def check_writable(self, path: str) -> None:
        self._look("check_writable", path, self._inner.check_writable)

    def list_directory(self, path: str) -> Sequence[str]:
        return self._look("list_directory", path, self._inner.list_directory)

    def read_file(self, path: str) -> bytes:
        return self._look("read_file", path, self._inner.read_file)

    def open_data_file(self, path: str) -> ReadableFile:
        return self._look("open_data_file", path, self._inner.open_data_file)

    def make_directory(self, path: str) -> None:
        def note() -> None:
            node = self._top
            for name in Path(path).relative_to(self._root).parts:
                if name not in node.now:
                    node.durable[name] = node.now[name] = _Directory()

                node = _directory(node.now[name])

        self.change("make_directory", path, lambda: self._inner.make_directory(path), note)

    def write_file(self, path: str, data: bytes, *, create: bool = False) -> bool:
        written: list[bool] = []

        def write() -> bool:
            written.append(self._inner.write_file(path, data, create=create))
            return written[0]

        def note() -> None:
            if written[0]:
                file = self._parent(path).now.setdefault(_name(path), _File())
                assert isinstance(file, _File)
                file.now, file.durable = bytearray(data), data

        return self.change("write_file", path, write, note)

    def create_data_file(self, path: str) -> DataFile:
        file = _File()

        def note() -> None:
            self._parent(path).now[_name(path)] = file

        inner = self.change("create_data_file", path, lambda: self._inner.create_data_file(path), note)
        return _CrashDataFile(self, path, inner, file)

    def sync_directory(self, path: str) -> None:
        def note() -> None:
            directory = self._find(path)
            directory.durable = dict(directory.now)

        self.change("sync_directory", path, lambda: self._inner.sync_directory(path), note)

    def begin_build(self, final: str, beside: str, file: str | None = None) -> BuildToken:
        return self._look("begin_build", final, lambda _: self._inner.begin_build(final, beside, file))

    def publish(self, token: BuildToken) -> None:
        def note() -> None:
            self._move(token.built, token.final)

        self.change("publish", token.built, lambda: self._inner.publish(token), note)

    def discard(self, token: BuildToken) -> None:
        def note() -> None:
            self._parent(token.place).now.pop(_name(token.place), None)

        self.change("discard", token.place, lambda: self._inner.discard(token), note)

    def remove_tree(self, path: str) -> None:
        def note() -> None:
            self._parent(path).now.pop(_name(path), None)

        self.change("remove_tree", path, lambda: self._inner.remove_tree(path), note)

    def _exchange(self, inner: Exchanges, token: BuildToken) -> None:
        def note() -> None:
            a, b = self._parent(token.built).now, self._parent(token.final).now
            first, second = _name(token.built), _name(token.final)
            a[first], b[second] = b[second], a[first]

        self.change("exchange", token.built, lambda: inner.exchange(token), note)

    def _rename(self, inner: Renames, source: str, destination: str) -> None:
        def note() -> None:
            self._move(source, destination)

        self.change("rename", source, lambda: inner.rename(source, destination), note)

    def _share(self, inner: SharedFiles, source: str, destination: str) -> Literal["link", "copy"]:
        ways: list[Literal["link", "copy"]] = []

        def share() -> Literal["link", "copy"]:
            ways.append(inner.share(source, destination))
            return ways[0]

        def note() -> None:
            file = self._parent(source).now[_name(source)]
            assert isinstance(file, _File)
            # One file under two names: what is durable under one name is durable under the other.
            shared = file if ways[0] == "link" else _File(bytearray(file.now), file.durable)
            self._parent(destination).now[_name(destination)] = shared

        return self.change("share", source, share, note)

    def _sync_tree(self, inner: ForeignFiles, path: str) -> None:
        def note() -> None:
            # From here on, files that others wrote directly are known.
            now = _scan(Path(path))
            directory = self._find(path)
            directory.now, directory.durable = now.now, now.durable

        self.change("sync_tree", path, lambda: inner.sync_tree(path), note)

    def change(self, name: str, path: str, action: Callable[[], T], note: Callable[[], None]) -> T:
        """Perform one change and record it, unless the machine has stopped. Also used by the files."""
        with self._lock:
            self._check(name, path)
            result = action()
            self._n_changes += 1
            note()
            return result

    def _look(self, name: str, path: str, action: Callable[[str], T]) -> T:
        with self._lock:
            self._check(name, path)
            return action(path)

    def _check(self, name: str, path: str) -> None:
        if self._last is not None and self._n_changes >= self._last:
            raise Crash(name, path, f"the machine stopped after change {self._last}")

    def _move(self, source: str, destination: str) -> None:
        moved = self._parent(source).now.pop(_name(source))
        self._parent(destination).now[_name(destination)] = moved

    def _parent(self, path: str) -> _Directory:
        return self._find(os.path.dirname(path))

    def _find(self, path: str) -> _Directory:
        node = self._top
        for name in Path(path).relative_to(self._root).parts:
            node = _directory(node.now[name])

        return node


@final
class _CrashDataFile:
    def __init__(self, store: CrashStore, path: str, inner: DataFile, file: _File) -> None:
        self._store = store
        self._path = path
        self._inner = inner
        self._file = file

    @property
    def transfers(self) -> Transfers:
        return self._inner.transfers

    def allocate(self, nbytes: int) -> None:
        # Reserved room is not content: `sync` gives back the rest, and before it nothing survives.
        self._store.change("data.allocate", self._path, lambda: self._inner.allocate(nbytes), lambda: None)

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        def note() -> None:
            data = b"".join(buffers)
            self._file.now.extend(bytes(max(0, offset - len(self._file.now))))
            self._file.now[offset : offset + len(data)] = data

        self._store.change("data.write_at", self._path, lambda: self._inner.write_at(offset, buffers), note)

    def sync(self) -> None:
        def note() -> None:
            self._file.durable = bytes(self._file.now)

        self._store.change("data.sync", self._path, self._inner.sync, note)

    def close(self) -> None:
        self._inner.close()


def _scan(path: Path) -> _Directory:
    found: dict[str, _Node] = {}
    for entry in path.iterdir():
        data = b"" if entry.is_dir() else entry.read_bytes()
        found[entry.name] = _scan(entry) if entry.is_dir() else _File(bytearray(data), data)

    return _Directory(found, dict(found))


def _write(directory: _Directory, path: Path) -> None:
    for name, node in directory.durable.items():
        if isinstance(node, _File):
            (path / name).write_bytes(node.durable)
        else:
            (path / name).mkdir()
            _write(node, path / name)


def _directory(node: _Node) -> _Directory:
    assert isinstance(node, _Directory)
    return node


def _name(path: str) -> str:
    return os.path.basename(path)
