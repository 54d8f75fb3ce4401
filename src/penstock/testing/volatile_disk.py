"""A model of a disk: its changes, which of them are durable, and the states that a power loss may leave."""

from __future__ import annotations

__all__ = (
    "Content",
    "DirectoryEntry",
    "DiskWrite",
    "Effect",
    "FileLeft",
    "Inode",
    "Names",
    "PowerLoss",
    "Resize",
    "SyncFile",
    "SyncNames",
    "VolatileDisk",
)

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias, final

Fate: TypeAlias = Literal["lost", "kept", "torn", "zeros", "holes"]
"""What becomes of bytes that were written and not synced.

lost: none of them is there. kept: all are. torn: of the last write, only the first half. zeros: the file
has its length, and zeros in their place. holes: every other write is lost, the length is right.
"""
FATES: Final[tuple[Fate, ...]] = ("lost", "kept", "torn", "zeros", "holes")


@final
@dataclass(frozen=True, slots=True)
class Inode:
    """A file or a directory, whatever its names are."""

    number: int
    is_directory: bool = False


@final
@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """A name in a directory, and what it leads to; None if it is removed."""

    directory: Inode
    name: str
    node: Inode | None


@final
@dataclass(frozen=True, slots=True)
class Names:
    """Names changed in one step: one of them, or two by a rename or an exchange."""

    entries: tuple[DirectoryEntry, ...]


@final
@dataclass(frozen=True, slots=True)
class DiskWrite:
    """Bytes written to a file."""

    file: Inode
    offset: int
    data: bytes


@final
@dataclass(frozen=True, slots=True)
class Resize:
    """The length of a file set; what it grows by is zeros."""

    file: Inode
    nbytes: int


@final
@dataclass(frozen=True, slots=True)
class SyncFile:
    """The bytes and the length of a file made durable."""

    file: Inode


@final
@dataclass(frozen=True, slots=True)
class SyncNames:
    """The names in a directory made durable. A change in two directories is durable once either is synced."""

    directory: Inode


Effect: TypeAlias = Names | DiskWrite | Resize | SyncFile | SyncNames
"""One change of the medium, or one request to make changes durable."""


@final
class FileLeft(NamedTuple):
    """A file that is found after a power loss."""

    number: int  #: as in `Inode`; the same under each of its names
    data: bytes


Content: TypeAlias = "tuple[tuple[str, Content | FileLeft], ...]"
"""What is in a directory: its names in order, each with a file or with what is in a directory."""


@final
class _Bytes:
    """The bytes of a file: the durable ones, and the changes since. Not changed once it is made."""

    __slots__ = ("_made", "durable", "pending")

    def __init__(self, durable: bytes = b"", pending: tuple[DiskWrite | Resize, ...] = ()) -> None:
        self.durable = durable
        self.pending = pending
        self._made: dict[Fate, bytes] = {"lost": durable}

    def after(self, change: DiskWrite | Resize) -> _Bytes:
        return _Bytes(self.durable, (*self.pending, change))

    def left(self, fate: Fate) -> bytes:
        """The rest of the file. The same object each time, so that it is hashed once."""
        if not self.pending:
            return self.durable

        if fate not in self._made:
            self._made[fate] = self._leave(fate)

        return self._made[fate]

    def _leave(self, fate: Fate) -> bytes:
        found = bytearray(self.durable)
        n_writes = sum(isinstance(change, DiskWrite) for change in self.pending)
        nth = 0
        for change in self.pending:
            if isinstance(change, Resize):
                _resize(found, change.nbytes)
                continue

            nth += 1
            data = change.data
            if fate == "zeros" or (fate == "holes" and nth % 2 == 0):
                _resize(found, max(len(found), change.offset + len(data)))
                continue
            if fate == "torn" and nth == n_writes:
                data = data[: len(data) // 2]

            _resize(found, max(len(found), change.offset))
            found[change.offset : change.offset + len(data)] = data

        return bytes(found)


def _resize(data: bytearray, nbytes: int) -> None:
    del data[nbytes:]
    data.extend(bytes(nbytes - len(data)))


@final
@dataclass(frozen=True, slots=True)
class PowerLoss:
    """One of the contents that a power loss may leave.

    Attributes:
        n_effects: Effects that were issued before it.
        content: What is found afterwards.
    """

    n_effects: int
    content: Content

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write it into the directory `folder`, which is made or empty. Files of two names are links."""
        Path(folder).mkdir(exist_ok=True)
        _write(self.content, Path(folder), {})


def _write(content: Content, folder: Path, written: dict[int, Path]) -> None:
    for name, found in content:
        path = folder / name
        if not isinstance(found, FileLeft):
            path.mkdir()
            _write(found, path, written)
        elif found.number in written:
            os.link(written[found.number], path)
        else:
            path.write_bytes(found.data)
            written[found.number] = path


@final
@dataclass(slots=True)
class VolatileDisk:
    """The durable state of a disk, and the changes since, in order.

    Attributes:
        top: The directory in which all of it is.
    """

    top: Inode = field(default=Inode(0, is_directory=True))
    _files: dict[Inode, _Bytes] = field(default_factory=dict[Inode, _Bytes])
    _now: dict[Inode, dict[str, Inode]] = field(default_factory=dict[Inode, dict[str, Inode]])
    _durable: dict[Inode, dict[str, Inode]] = field(default_factory=dict[Inode, dict[str, Inode]])
    _pending: list[Names] = field(default_factory=list[Names])

    def __post_init__(self) -> None:
        self._know(self.top)

    def copy(self) -> VolatileDisk:
        """Return another one in the same state."""
        now = {directory: dict(names) for directory, names in self._now.items()}
        durable = {directory: dict(names) for directory, names in self._durable.items()}
        return VolatileDisk(self.top, dict(self._files), now, durable, list(self._pending))

    def names(self, directory: Inode) -> Mapping[str, Inode]:
        """The names in a directory as everybody sees them now."""
        return self._now[directory]

    def data(self, file: Inode) -> bytes:
        """The bytes of a file as everybody sees them now."""
        return self._files[file].left("kept")

    def apply(self, effect: Effect) -> None:
        """Change the state."""
        match effect:
            case Names(entries):
                self._pending.append(effect)
                for entry in entries:
                    self._enter(self._now, entry)
            case DiskWrite(file) | Resize(file):
                self._know(file)
                self._files[file] = self._files[file].after(effect)
            case SyncFile(file):
                self._know(file)
                self._files[file] = _Bytes(self.data(file))
            case SyncNames(directory):
                self._sync_names(directory)

    def contents(self, limit: int) -> Iterator[Content]:
        """Yield what a power loss now may leave, the least first; some of them may be equal.

        Each change of names since its directory was synced may be lost, as long as two changes of one name
        keep their order; so may the bytes written since their file was synced.

        Args:
            limit: How many choices of lost changes are tried. If there are more, it is those that lose the
                last ones, a single one, or all but one, spread evenly.
        """
        choices = _choices(self._pending, limit)
        is_volatile = any(found.pending for found in self._files.values())
        for at, choice in enumerate(choices):
            names = {directory: dict(found) for directory, found in self._durable.items()}
            for change in choice:
                for entry in self._pending[change].entries:
                    self._enter(names, entry)

            fates = FATES if is_volatile and at < 2 else FATES[: 1 + is_volatile]
            for fate in fates:
                yield self._content(self.top, names, fate)

    def _content(self, directory: Inode, names: dict[Inode, dict[str, Inode]], fate: Fate) -> Content:
        return tuple(
            [
                (
                    name,
                    self._content(node, names, fate)
                    if node.is_directory
                    else FileLeft(node.number, self._files[node].left(fate)),
                )
                for name, node in sorted(names[directory].items())
            ]
        )

    def _sync_names(self, directory: Inode) -> None:
        waiting: list[Names] = []
        for change in self._pending:
            if any(entry.directory == directory for entry in change.entries):
                for entry in change.entries:
                    self._enter(self._durable, entry)
            else:
                waiting.append(change)

        self._pending = waiting
        self._forget_what_is_gone()

    def _forget_what_is_gone(self) -> None:
        """Drop directories and files that no power loss can bring back, and what was pending in them."""
        inside: dict[Inode, set[Inode]] = {}
        for names in (self._now, self._durable):
            for directory, found in names.items():
                inside.setdefault(directory, set()).update(found.values())

        for entry in itertools.chain.from_iterable(change.entries for change in self._pending):
            if entry.node is not None:
                inside.setdefault(entry.directory, set()).add(entry.node)

        there = {self.top}
        ahead = [self.top]
        while ahead:
            new = inside.get(ahead.pop(), set[Inode]()) - there
            there |= new
            ahead += new

        self._files = {node: found for node, found in self._files.items() if node in there}
        self._now = {node: found for node, found in self._now.items() if node in there}
        self._durable = {node: found for node, found in self._durable.items() if node in there}
        self._pending = [
            change for change in self._pending if any(entry.directory in there for entry in change.entries)
        ]

    def _enter(self, names: dict[Inode, dict[str, Inode]], entry: DirectoryEntry) -> None:
        found = names.setdefault(entry.directory, {})
        if entry.node is None:
            found.pop(entry.name, None)
        else:
            self._know(entry.node)
            found[entry.name] = entry.node

    def _know(self, node: Inode) -> None:
        if not node.is_directory:
            self._files.setdefault(node, _Bytes())
        elif node not in self._now:
            self._now[node] = {}
            self._durable[node] = {}


def _choices(pending: Sequence[Names], limit: int) -> list[tuple[int, ...]]:
    """Choose which of the pending changes survive: first none, then all, then others."""
    everything = tuple(range(len(pending)))
    if 2 ** len(pending) <= limit:
        found = [
            tuple(itertools.compress(everything, picked))
            for picked in itertools.product((False, True), repeat=len(pending))
        ]
    else:
        found = [everything[:at] for at in everything]
        found += [everything[:at] + everything[at + 1 :] for at in everything]
        found += [(at,) for at in everything]
        step = max(1, -(-len(found) // limit))
        found = found[::step]

    possible = [choice for choice in found if _keeps_order(pending, choice)]
    return list(dict.fromkeys([(), everything, *possible]))


def _keeps_order(pending: Sequence[Names], kept: Sequence[int]) -> bool:
    """True if no change of a name is kept of which an earlier one is lost."""
    lost: set[tuple[Inode, str]] = set()
    for at, change in enumerate(pending):
        touched = {(entry.directory, entry.name) for entry in change.entries}
        if at not in kept:
            lost |= touched
        elif touched & lost:
            return False

    return True
