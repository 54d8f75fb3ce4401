"""A recording of what a store did to a disk, by path, and the power losses to be tried with it."""

from __future__ import annotations

__all__ = ("RecordedDisk",)

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import final

from penstock.handlers.stores.directory_lock import first_name
from penstock.testing.volatile_disk import (
    Content,
    Effect,
    Entry,
    Names,
    Node,
    PowerLoss,
    Resize,
    SyncFile,
    SyncNames,
    VolatileDisk,
    Write,
)


@final
class RecordedDisk:
    """The files below a directory, and every effect on them since.

    Methods named after what was done yield its effects one by one. Each one must be recorded before the next
    one is asked for; `record` does so.

    Args:
        root: The directory. What lies there is durable.
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
        made = first_name(path)
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
                yield Names((Entry(above, name, node),))
                yield SyncNames(above)

            above = node

    def named(self, path: str, file: Node) -> Iterator[Effect]:
        """`path` is a name of `file` now, which may have others."""
        yield Names((self._entry(path, file),))

    def created(self, path: str, data: bytes) -> Iterator[Effect]:
        """A file with this content was written, and its content synced."""
        file = self.new_node()
        yield Names((self._entry(path, file),))
        yield Write(file, 0, data)
        yield SyncFile(file)

    def created_in_one_step(self, path: str, data: bytes) -> Iterator[Effect]:
        """A file was written under another name first, so that nobody sees a part of it."""
        beside = f"{path}.penstock-new"
        yield from self.created(beside, data)
        yield from self.named(path, self.there(beside))
        yield from self.removed(beside)

    def replaced(self, path: str, data: bytes) -> Iterator[Effect]:
        """The file at `path` was written anew, in place, and synced. It may not have been there."""
        file = self.find(path)
        if file is None:
            yield from self.created(path, data)
            return

        yield Resize(file, 0)
        yield Write(file, 0, data)
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

    def find(self, path: str) -> Node | None:
        """Return what lies at `path`; None if nothing does."""
        node: Node | None = self._disk.top
        for name in self._parts(path):
            if node is None:
                break

            node = self._disk.names(node).get(name)

        return node

    def there(self, path: str) -> Node:
        """Return what lies at `path`."""
        node = self.find(path)
        assert node is not None, f"{path} is not there"
        return node

    def size(self, file: Node) -> int:
        """Return the length of a file in bytes, as everybody sees it now."""
        return len(self._disk.data(file))

    def new_node(self, *, is_directory: bool = False) -> Node:
        """Return a file or directory that has no name yet."""
        return Node(next(self._numbers), is_directory)

    def _emptied(self, path: str) -> Iterator[Effect]:
        for name in sorted(self._disk.names(self.there(path))):
            yield from self.removed(os.path.join(path, name))

    def _appeared(self, path: Path, directory: Node, seen: dict[tuple[int, int], Node]) -> Iterator[Effect]:
        """What others wrote into a directory. Files of two names are recognised by `seen`, by inode."""
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
                yield Names((Entry(directory, entry.name, node),))
            if node.is_directory:
                yield from self._appeared(Path(entry.path), node, seen)
            elif is_new and (data := Path(entry.path).read_bytes()) != self._disk.data(node):
                yield Resize(node, len(data))
                yield Write(node, 0, data)

    def _synced(self, directory: Node) -> Iterator[Effect]:
        for node in self._disk.names(directory).values():
            if node.is_directory:
                yield from self._synced(node)
            else:
                yield SyncFile(node)

        yield SyncNames(directory)

    def _entry(self, path: str, node: Node | None) -> Entry:
        return Entry(self.there(os.path.dirname(path)), os.path.basename(path), node)

    def _parts(self, path: str) -> Sequence[str]:
        return Path(path).relative_to(self._root).parts
