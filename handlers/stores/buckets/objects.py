"""The requests to a bucket, by any client library."""

from __future__ import annotations

__all__ = ("Created", "ListedObject", "Listing", "ObjectContent", "Objects", "Stat", "same_content")

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, final

from penstock.kernel.protocols.stores import RequestFigures

Created: TypeAlias = Literal["created", "same", "other"]
"""What became of an object that was to be new: this call made it; the same content was there; another was."""


@final
@dataclass(frozen=True, slots=True)
class Stat:
    """An object's properties."""

    size: int  #: in bytes
    tag: str | None  #: changes with the object; what `swap` compares
    modified: datetime  #: the server's time of the last change


class ObjectContent(NamedTuple):
    """An object that was read."""

    data: bytes
    tag: str | None  #: changes with the object; what `swap` compares
    list_tag: str | None = None  #: as a list has it


class ListedObject(NamedTuple):
    """An object as a list has it."""

    key: str
    size: int  #: in bytes
    tag: str | None  #: changes with the object; not that of `swap`


@final
@dataclass(frozen=True, slots=True)
class Listing:
    """The names right below a prefix."""

    folders: Sequence[str]
    files: Sequence[str]
    sizes: Sequence[int] = ()  #: of the files, in bytes; empty if the listing does not say them


class Objects(Protocol):
    """Objects under keys. Every method blocks, is thread-safe, and raises `StorageError`s."""

    uses_conditions: bool
    """Whether the server decides if an object is new or unchanged. If not, it is looked at before it is
    written, and who writes it meanwhile is written over."""

    def path(self, key: str) -> str:
        """Return what errors and callers call an object."""
        ...

    def figures(self) -> RequestFigures:
        """Return how many requests were sent so far, and what became of them."""
        ...

    def head(self, key: str) -> Stat | None:
        """Return an object's properties; None if there is no such object."""
        ...

    def read(self, key: str) -> ObjectContent | None:
        """Return an object's content and its tags; None if there is no such object."""
        ...

    def read_range(self, key: str, start: int, nbytes: int) -> memoryview:
        """Return bytes of an object, from `start` on; fewer than asked for if it ends before."""
        ...

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object, whatever was there before."""
        ...

    def create(self, key: str, data: bytes | memoryview) -> Created:
        """Write an object that must be new. Of several who try at once, one succeeds."""
        ...

    def swap(self, key: str, data: bytes, tag: str, within_s: float | None = None) -> str | None:
        """Replace an object if it still has the tag; return its new one, or None if it has another.

        It does not wait for other requests. `within_s` is for how long it is repeated at most.
        """
        ...

    def put_parts(self, key: str, parts: Iterator[memoryview]) -> None:
        """Write an object of any length, whatever was there before. It is there when all of it is.

        If a part cannot be had or sent, the upload is aborted. None of the parts may be changed later.
        """
        ...

    @property
    def most_copied(self) -> int | None:
        """The length in bytes of the longest object that can be copied; None for no limit."""
        ...

    def copy_if_absent(self, source: str, destination: str) -> Created:
        """Copy an object to where nothing is. Of several who try at once, one succeeds."""
        ...

    def copy(self, source: str, destination: str) -> None:
        """Copy an object; the server does it if it can."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there count as deleted."""
        ...

    def list(self, prefix: str) -> Listing:
        """Name what is right below a prefix, which may be empty for everything."""
        ...

    def walk(self, prefix: str) -> Iterator[str]:
        """Yield the key of every object below a prefix, at any depth."""
        ...

    def entries(self, prefix: str) -> Iterator[Sequence[ListedObject]]:
        """Yield what is below a prefix, at any depth, by one request each time. None of it is empty."""
        ...

    def has_below(self, prefix: str) -> bool:
        """True if any object is below a prefix."""
        ...

    def keeps_conditions(self, key: str, data: bytes) -> bool:
        """True if the server refuses to create what is there, and to replace what has another tag."""
        ...


# Both objects are read in step: twice this much is in memory, whatever their size.
_COMPARED: Final = 16 * 2**20


def same_content(client: Objects, first: str, second: str) -> bool:
    """True if two objects hold the same bytes, which are read. Blocking.

    Raises:
        StorageError: If one cannot be read.
    """
    found, other = client.head(first), client.head(second)
    if found is None or other is None or found.size != other.size:
        return False

    for start in range(0, found.size, _COMPARED):
        nbytes = min(_COMPARED, found.size - start)
        if client.read_range(first, start, nbytes) != client.read_range(second, start, nbytes):
            return False

    return True
