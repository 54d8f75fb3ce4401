"""Directories and files of a keeper, by name. Nothing here blocks; the memory of files comes from `pages`.

What is built is held by the connection that made it. If that breaks, the build is removed.
"""

from __future__ import annotations

__all__ = ("Directory", "File", "Holder", "Refusal", "Tree")

import errno
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final, Literal, Protocol, TypeAlias

from penstock.handlers.stores.keeper.messages import MOST_NAMES, KeptStep
from penstock.keeper.pages import Pages

_LONGEST_NAME: Final = 255
_LONGEST_PATH: Final = 2**13  # a longest one of a file system, below directories of the tier


class Refusal(Exception):
    """Something cannot be done.

    Attributes:
        errno: The number that says why.
        problem: The words.
    """

    def __init__(self, errno: int, problem: str) -> None:
        super().__init__(problem)
        self.errno, self.problem = errno, problem


WRITER: Final = ".penstock-writer"
TIER_FILE: Final = "_PENSTOCK_TIER.json"
ENCODED: Final = "_PENSTOCK_ENCODED"
OF_PROCESSES: Final = "process"
"""The names that a manager of steps uses, as `writer_hold` and `tier_record` have them: to import those would
double the memory of a keeper."""


class Holder(Protocol):
    """A connection, as far as it holds something."""

    def has_ended(self) -> Literal["released", "broken"] | None:
        """Return how the hold ended, if it has; also if nothing was made of that yet."""
        ...


class File:
    """A document, or a data file in pages."""

    __slots__ = ("data", "n_names", "nbytes", "number", "pages")

    def __init__(self, number: int, data: bytes | None) -> None:
        self.number = number
        self.data = data  #: of a document; None of a data file
        self.nbytes = 0 if data is None else len(data)
        self.pages: Pages | None = None  #: of a data file with a byte at least
        self.n_names = 1


class Directory:
    """A directory."""

    __slots__ = (
        "alone",
        "builder",
        "entries",
        "is_elsewhere",
        "most_bytes",
        "name",
        "number",
        "parent",
        "published",
        "readers",
    )

    def __init__(self, number: int, parent: Directory | None, name: str) -> None:
        self.number = number
        self.parent, self.name = parent, name  #: where it is; without a parent it is removed
        self.entries: dict[str, Directory | File] = {}
        self.alone: Holder | None = None  #: who holds it alone
        self.readers: set[Holder] = set()  #: who hold it together
        self.builder: Holder | None = None  #: with whose end it is removed
        self.published: float | None = None  #: when, by the clock that only goes forward
        self.is_elsewhere = False  #: whether another tier has it whole
        self.most_bytes = 0  #: of data files below it, when something was published there


_Node: TypeAlias = Directory | File


class Tree:
    """All directories and files.

    Args:
        on_dropped: Called with each data file that has lost its last name.
    """

    def __init__(self, on_dropped: Callable[[File], None]) -> None:
        self._on_dropped = on_dropped
        # Another keeper has other numbers: what a client remembers of this one fits nothing there.
        self._numbers = count((int.from_bytes(os.urandom(5), "little") << 20) + 1)
        self._root = Directory(next(self._numbers), None, "")
        self._files: dict[int, File] = {}  # data files, by number
        self._held: dict[Holder, Directory] = {}
        self._builds: dict[Holder, list[Directory]] = {}

    # Looking.

    def find(self, path: str) -> _Node | None:
        """Return what is at a path; None if nothing is."""
        node: _Node = self._root
        for name in _names(path):
            below = node.entries.get(name) if isinstance(node, Directory) else None
            if below is None:
                return None

            node = below

        return node

    def file(self, path: str) -> File:
        """Return the file at a path.

        Raises:
            Refusal: If there is none.
        """
        found = self.find(path)
        if isinstance(found, Directory):
            raise Refusal(errno.EISDIR, "is a directory")
        if found is None:
            raise _absent()

        return found

    def data_file(self, number: int) -> File:
        """Return the data file of a number.

        Raises:
            Refusal: If it was removed.
        """
        found = self._files.get(number)
        if found is None:
            raise Refusal(errno.ENOENT, "the file was removed")

        return found

    def directory(self, path: str) -> Directory:
        """Return the directory at a path.

        Raises:
            Refusal: If there is none.
        """
        found = self.find(path)
        if isinstance(found, File):
            raise Refusal(errno.ENOTDIR, "is a file")
        if found is None:
            raise _absent()

        return found

    def names(self, path: str, after: str) -> tuple[list[str], bool]:
        """Return the next names in a directory, sorted, and whether there are more."""
        found = sorted(self.directory(path).entries)
        start = bisect_right(found, after) if after else 0
        return found[start : start + MOST_NAMES], len(found) > start + MOST_NAMES

    @property
    def document_bytes(self) -> int:
        """The bytes of all documents."""
        return sum([file.nbytes for file in self._all_files(self._root) if file.data is not None])

    @property
    def holds_the_only_copy(self) -> bool:
        """True if there is a file that is not in a directory that another tier has."""
        return any(True for _ in self._all_files(self._root, outside=True))

    def steps(self) -> Iterator[KeptStep]:
        """Yield what was published, and what is being built."""
        now = time.monotonic()
        pending = [("", self._root)]
        while pending:
            path, directory = pending.pop()
            if directory.published is not None or directory.builder is not None:
                files = list(self._all_files(directory))
                yield KeptStep(
                    path=path,
                    state="building" if directory.published is None else "whole",
                    nbytes=sum([file.nbytes for file in files]),
                    n_files=len(files),
                    age_s=0.0 if directory.published is None else now - directory.published,
                    is_elsewhere=directory.is_elsewhere,
                    n_readers=len(directory.readers),
                )
                continue

            for name, below in sorted(directory.entries.items(), reverse=True):
                if isinstance(below, Directory):
                    pending.append((f"{path}/{name}" if path else name, below))

    def data_files(self, path: str) -> list[File]:
        """Return the data files in the directory at a path and below it; of a file, itself."""
        node = self.find(path)
        found = [node] if isinstance(node, File) else self._all_files(node) if node is not None else ()
        return [file for file in found if file.data is None]

    def note_growth(self, path: str) -> int:
        """Return how many bytes more the directory that holds `path` has than whenever this was asked of it.

        Of data files. Asked when something is published at `path`. Where steps go as others come, it is 0.
        """
        parent = self.directory(os.path.dirname(path.strip("/")))
        nbytes = sum([file.nbytes for file in self._all_files(parent) if file.data is None])
        growth = max(0, nbytes - parent.most_bytes)
        parent.most_bytes += growth
        return growth

    def _all_files(self, directory: Directory, *, outside: bool = False) -> Iterator[File]:
        pending = [directory]  # a path may be deeper than calls may be
        while pending:
            for name, below in pending.pop().entries.items():
                if isinstance(below, File):
                    if not (outside and name == TIER_FILE):
                        yield below
                elif not (outside and below.is_elsewhere):
                    pending.append(below)

    def written_by(self, holder: Holder) -> str | None:
        """Return the directory of steps that a connection alone may write into; None if there is none."""
        held = self._held.get(holder)
        if held is None or held.name != WRITER or held.alone is not holder or held.parent is None:
            return None

        names: list[str] = []
        above: Directory | None = held.parent
        while above is not None and above.name:
            names.append(above.name)
            above = above.parent

        return "/".join(reversed(names))

    def owes(self, path: str) -> bool:
        """True if a directory of steps has one that no other tier has, and nobody writes there any more."""
        directory = self.find(path)
        if not isinstance(directory, Directory):
            return False

        writer = directory.entries.get(WRITER)  # a manager that died leaves it, and holds it no more
        if isinstance(writer, Directory) and writer.alone is not None:
            return False

        below = [step for step in directory.entries.values() if isinstance(step, Directory)]
        return any(step.published is not None and not step.is_elsewhere for step in below)

    # Changing.

    def make_directory(self, path: str) -> Directory:
        """Return the directory at a path, made with its parents where they are missing.

        Raises:
            Refusal: If a file is in the way.
        """
        directory, names = self._root, _names(path)
        for n_left, name in zip(range(len(names) - 1, -1, -1), names, strict=True):
            below = directory.entries.get(name)
            if isinstance(below, File):
                raise Refusal(errno.ENOTDIR if n_left else errno.EEXIST, f"{name!r} is a file")

            directory = self._new_directory(directory, name) if below is None else below

        return directory

    def make_held(self, path: str, holder: Holder) -> Directory:
        """Make a directory, which `holder` holds, and builds in.

        Raises:
            Refusal: If something is there.
        """
        parent, name = self._place(path)
        if name in parent.entries:
            raise Refusal(errno.EEXIST, "exists")

        made = self._new_directory(parent, name)
        self._hold(made, holder, is_shared=False)
        self._give_to_builder(made, holder)
        return made

    def hold(self, path: str, holder: Holder, *, is_shared: bool) -> Directory:
        """Hold a directory until `release`.

        Raises:
            Refusal: If it is not there, or held.
        """
        directory = self.directory(path)
        holders = [*directory.readers, *([] if directory.alone is None else [directory.alone])]
        for other in [] if is_shared and directory.alone is None else holders:
            ended = other.has_ended()
            if ended is not None:
                self.release(other, is_broken=ended == "broken")

        if directory.alone is not None or (directory.readers and not is_shared):
            raise Refusal(errno.EBUSY, "is held")
        if directory.parent is None and directory is not self._root:  # it was the build of one who has ended
            raise _absent()

        self._hold(directory, holder, is_shared=is_shared)
        return directory

    def release(self, holder: Holder, *, is_broken: bool) -> None:
        """End the hold of a connection. Idempotent.

        Args:
            holder: The connection.
            is_broken: Whether it broke; then what it was building is removed.
        """
        directory = self._held.pop(holder, None)
        if directory is not None:
            directory.readers.discard(holder)
            if directory.alone is holder:
                directory.alone = None

        for build in self._builds.pop(holder, ()):
            if build.builder is holder:
                build.builder = None
                if is_broken:
                    self._detach(build)

    def put(self, path: str, data: bytes, *, create: bool) -> bool:
        """Write a document; return False if `create` is set and it is there with the same content.

        Raises:
            Refusal: If it is there with another content, or cannot be.
        """
        parent, name = self._place(path, made=False)
        there = parent.entries.get(name)
        if isinstance(there, Directory):
            raise Refusal(errno.EISDIR, "is a directory")
        if there is not None and create:
            if there.data == data:
                return False

            raise Refusal(errno.EEXIST, "exists with another content")

        parent.entries[name] = File(next(self._numbers), data)
        if there is not None:
            self._drop(there)

        return True

    def create(self, path: str) -> File:
        """Create an empty data file.

        Raises:
            Refusal: If something is there, or cannot be.
        """
        parent, name = self._place(path, made=False)
        if name in parent.entries:
            raise Refusal(errno.EEXIST, "exists")

        made = parent.entries[name] = File(next(self._numbers), None)
        self._files[made.number] = made
        return made

    def move(
        self,
        source: str,
        destination: str,
        how: Literal["absent", "replace", "exchange"],
        *,
        publishes: bool = False,
        expected: int | None = None,
    ) -> None:
        """Give an entry another path, in one step; see `messages.Move`.

        Raises:
            Refusal: If it cannot be, and then nothing has changed: ESTALE if the source is another one.
        """
        old_parent, old_name = self._place(source, made=False)
        new_parent, new_name = self._place(destination, made=False)
        node, there = old_parent.entries.get(old_name), new_parent.entries.get(new_name)
        if node is None:
            raise _absent()
        if expected is not None and node.number != expected:
            raise Refusal(errno.ESTALE, "another program has put something else there")
        if _is_in(new_parent, node) or (there is not None and _is_in(old_parent, there)):
            raise Refusal(errno.EINVAL, "one of the two is in the other")
        if there is not None and how == "absent":
            raise Refusal(errno.EEXIST, "exists")
        if there is None and how == "exchange":
            raise _absent()
        if how == "replace" and (isinstance(node, Directory) or isinstance(there, Directory)):
            raise Refusal(errno.EISDIR, "is a directory")

        builder = node.builder if isinstance(node, Directory) else None
        del old_parent.entries[old_name]
        self._put_at(new_parent, new_name, node)
        if there is not None and how == "exchange":
            self._put_at(old_parent, old_name, there)
            if publishes and builder is not None and isinstance(there, Directory):
                self._give_to_builder(there, builder)  # it goes, also if the client dies before it removes it
        elif isinstance(there, File):
            self._drop(there)

        if publishes and isinstance(node, Directory):
            node.builder, node.published, node.is_elsewhere = None, time.monotonic(), False

    def share(self, source: str, destination: str) -> None:
        """Give a file a second name.

        Raises:
            Refusal: If there is no file, or something at the second name.
        """
        file = self.file(source)
        parent, name = self._place(destination, made=False)
        if name in parent.entries:
            raise Refusal(errno.EEXIST, "exists")

        parent.entries[name] = file
        file.n_names += 1

    def remove(self, path: str, expected: int | None = None) -> None:
        """Remove an entry with all that is in it; do nothing if it is absent, or not the expected one."""
        if not path:
            raise Refusal(errno.EBUSY, "is the root of the keeper")

        node = self.find(path)
        if node is None or (expected is not None and node.number != expected):
            return
        if isinstance(node, Directory):
            self._detach(node)
        else:
            parent, name = self._place(path, made=False)
            del parent.entries[name]
            self._drop(node)

    def _hold(self, directory: Directory, holder: Holder, *, is_shared: bool) -> None:
        if holder in self._held:
            raise Refusal(errno.EINVAL, "this connection holds something already")

        self._held[holder] = directory
        if is_shared:
            directory.readers.add(holder)
        else:
            directory.alone = holder

    def _give_to_builder(self, directory: Directory, holder: Holder) -> None:
        directory.builder = holder
        self._builds.setdefault(holder, []).append(directory)

    def _new_directory(self, parent: Directory, name: str) -> Directory:
        made = parent.entries[name] = Directory(next(self._numbers), parent, name)
        return made

    @staticmethod
    def _put_at(parent: Directory, name: str, node: _Node) -> None:
        parent.entries[name] = node
        if isinstance(node, Directory):
            node.parent, node.name = parent, name

    def _place(self, path: str, *, made: bool = True) -> tuple[Directory, str]:
        """Return the directory that a path is in, made first if `made` is set, and the last name."""
        *above, name = _names(path) or [""]
        if not name:
            raise Refusal(errno.EEXIST, "is the root of the keeper")

        parent = "/".join(above)
        return (self.make_directory(parent) if made else self.directory(parent)), name

    def _detach(self, directory: Directory) -> None:
        parent, directory.parent = directory.parent, None
        if parent is not None:
            del parent.entries[directory.name]
            for file in self._all_files(directory):
                self._drop(file)

    def _drop(self, file: File) -> None:
        file.n_names -= 1
        if not file.n_names:
            self._files.pop(file.number, None)
            self._on_dropped(file)


def _names(path: str) -> list[str]:
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise Refusal(errno.ENAMETOOLONG, "is no possible path: it is too long")

    names = path.split("/") if path else []
    for name in names:
        if name in {"", ".", ".."} or "\0" in name or len(os.fsencode(name)) > _LONGEST_NAME:
            raise Refusal(errno.EINVAL, "is no possible path")

    return names


def _is_in(directory: Directory, node: _Node) -> bool:
    """True if a directory is another one, or below it."""
    above: Directory | None = directory
    while above is not None:
        if above is node:
            return True

        above = above.parent

    return False


def _absent() -> Refusal:
    return Refusal(errno.ENOENT, "nothing of that kind is there")
