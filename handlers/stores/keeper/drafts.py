"""Builds in a keeper that this process has written, and can still read when the keeper is lost.

A client has descriptors of the pages that it writes, and those stay valid when the keeper has ended. What it
has written of one checkpoint in this way, together with the documents, is its draft.
"""

from __future__ import annotations

__all__ = ("Draft", "DraftFile", "Drafts")

import errno
import os
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final, Protocol, TypeVar, final
from weakref import WeakValueDictionary

from penstock.handlers.stores.keeper.messages import Found
from penstock.kernel.errors import KeeperLostError, StorageError

A = TypeVar("A")

_MOST_FILES: Final = 16_384
"""A process may have 65,530 mappings, and each data file takes one."""


class DraftFile(Protocol):
    """A data file that this process writes, or has written."""

    @property
    def nbytes(self) -> int:
        """Its length so far."""
        ...

    def content(self) -> memoryview:
        """Return its bytes, which are mapped."""
        ...


@final
class Draft:
    """One checkpoint that this process builds, or has built. Its memory goes with it. Thread-safe.

    As long as the keeper answers it only takes notes. Once the keeper is lost it answers instead, and what is
    still to be written comes into memory of this process. It cannot publish.
    """

    __slots__ = ("__weakref__", "_end_hold", "_entries", "_is_partial", "_lock", "_place", "lost", "number")

    def __init__(self) -> None:
        self.lost: str | None = None  #: why it answers instead of the keeper
        self.number = 0  #: of the directory
        self._place: str | None = None
        self._end_hold: Callable[[], object] = lambda: None
        self._is_partial = False
        self._entries: dict[str, bytes | DraftFile | None] = {}  # by path below the place; None: a directory
        self._lock = Lock()

    def begin(self, place: str, number: int, end_hold: Callable[[], object] = lambda: None) -> None:
        """Note that the directory to build in was made.

        Args:
            place: Its path in the keeper.
            number: Of the directory.
            end_hold: Called when the keeper is lost, which may only be silent, and has the build then.
        """
        self._place, self.number, self._end_hold = place, number, end_hold

    def move(self, place: str) -> None:
        """Note that all of it has another path now."""
        self._place = place

    def has(self, path: str) -> bool:
        """True if a path in the keeper is in it."""
        place = self._place
        return place is not None and (path == place or path.startswith(f"{place}/"))

    def take_over(self, lost: KeeperLostError) -> None:
        """Answer from now on, if all of it is here."""
        if self._place is not None and not self._is_partial and self.lost is None:
            self.lost = lost.problem
            self._end_hold()

    # What is in it; each path is one in the keeper, and `has` is true of it.

    def add(self, path: str, content: bytes | DraftFile | None) -> None:
        """Note a directory, with those that it is in, or a file, which replaces one of its name."""
        name = self._name(path)
        with self._lock:
            if len(self._entries) >= _MOST_FILES:
                self._is_partial = True
                return
            if content is not None:
                self._entries[name] = content
                return

            while name:
                self._entries.setdefault(name, None)
                name = os.path.dirname(name)

    def leave_out(self) -> None:
        """Note that something in it is not in reach: it never answers."""
        self._is_partial = True

    def remove(self, path: str) -> None:
        """Note that something was removed with all that is in it."""
        name = self._name(path)
        with self._lock:
            for each in [each for each in self._entries if each == name or each.startswith(f"{name}/")]:
                del self._entries[each]

    def look(self, path: str) -> Found | None:
        """Return what is at a path."""
        name = self._name(path)
        with self._lock:
            if name and name not in self._entries:
                return None

            found = self._entries.get(name)

        if found is None:
            return Found(is_directory=True, nbytes=0, number=self.number)

        return Found(
            is_directory=False, nbytes=len(found) if isinstance(found, bytes) else found.nbytes, number=0
        )

    def names(self, path: str) -> Sequence[str]:
        """Return the names in a directory, sorted."""
        self.require(path, is_directory=True)
        name = self._name(path)
        with self._lock:
            return sorted(
                [os.path.basename(each) for each in self._entries if each and os.path.dirname(each) == name]
            )

    def content(self, path: str) -> bytes | memoryview:
        """Return the bytes of a file."""
        self.require(path, is_directory=False)
        with self._lock:
            found = self._entries[self._name(path)]

        assert found is not None
        return found if isinstance(found, bytes) else found.content()

    def require(self, path: str, *, is_directory: bool) -> None:
        """Refuse what is not there, or of the other kind.

        Raises:
            StorageError: As of a file system.
        """
        found = self.look(path)
        if found is None:
            raise StorageError("stat", path, "nothing is there", errno.ENOENT)
        if found.is_directory != is_directory:
            number = errno.EISDIR if found.is_directory else errno.ENOTDIR
            raise StorageError("open", path, os.strerror(number).lower(), number)

    def _name(self, path: str) -> str:
        return path[len(self._place or "") :].strip("/")


@final
class Drafts:
    """The drafts of one store, by the path at which each is. One is there as long as its build's token is."""

    __slots__ = ("_by_place",)

    def __init__(self) -> None:
        self._by_place: WeakValueDictionary[str, Draft] = WeakValueDictionary()

    def put(self, place: str, draft: Draft) -> None:
        """Note where a draft will be, or is now."""
        self._by_place[place] = draft

    def at(self, place: str) -> Draft | None:
        """Return the draft at a path, begun or not."""
        return self._by_place.get(place)

    def forget(self, place: str, draft: Draft | None = None) -> bool:
        """Forget what is at a path, or this draft, if it is there; return whether it was."""
        found = self._by_place.get(place)
        if found is None or (draft is not None and found is not draft):
            return False

        del self._by_place[place]
        return True

    def of(self, paths: Sequence[str]) -> Draft | None:
        """Return the draft that all of some paths are in; None if there is none."""
        place = paths[0]
        while place:
            draft = self._by_place.get(place)
            if draft is not None:
                return draft if all(map(draft.has, paths)) else None

            place = os.path.dirname(place)

        return None

    def take_over(self, lost: KeeperLostError) -> None:
        """Have all drafts answer from now on. From any thread."""
        for known in self._by_place.valuerefs():
            draft = known()
            if draft is not None:
                draft.take_over(lost)

    def answered(self, paths: Sequence[str], ask: Callable[[], A], own: Callable[[Draft], A]) -> A:
        """Ask the keeper; where it is lost, have the draft answer that some paths are in.

        Raises:
            KeeperLostError: If there is none.
        """
        draft = self.of(paths)
        if draft is None:
            return ask()
        if draft.lost is None:
            try:
                return ask()
            except KeeperLostError:
                if draft.lost is None:  # not all of it is here
                    raise

        return own(draft)

    def note(self, path: str, content: bytes | DraftFile | None) -> None:
        """Note in the draft that a path is in, if there is one, what is there now."""
        draft = self.of([path])
        if draft is not None:
            draft.add(path, content)
