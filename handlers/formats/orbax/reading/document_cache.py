"""Documents that were decoded before: the checkpoints of one training differ in their arrays alone."""

from __future__ import annotations

__all__ = ("RememberedDocuments",)

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Lock
from typing import Final, TypeAlias, TypeVar, cast, final

from penstock.handlers.formats.orbax.reading.leaf_table import LeafTable
from penstock.handlers.ocdbt.index_entries import Index
from penstock.handlers.ocdbt.key_cache import RememberedKeys

T = TypeVar("T")
Parts: TypeAlias = tuple[object, ...]

_MOST: Final = 2  # of each kind


@final
@dataclass(frozen=True, slots=True, eq=False)
class RememberedDocuments:
    """Decodes documents, the last few only once. Thread-safe.

    A document is known again by a cryptographic digest of its bytes, so what was decoded can never be
    that of another. Nobody may change what is returned.
    """

    keys: RememberedKeys = field(default_factory=RememberedKeys, init=False, repr=False)
    _known: dict[str, list[tuple[bytes, object]]] = field(
        default_factory=dict[str, "list[tuple[bytes, object]]"], init=False, repr=False
    )
    _tables: list[tuple[Parts, Index, LeafTable]] = field(
        default_factory=list["tuple[Parts, Index, LeafTable]"], init=False, repr=False
    )
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)

    def decode(self, kind: str, decoder: Callable[[str, bytes], T], path: str, data: bytes) -> T:
        """Return `decoder(path, data)`, now or from before.

        Args:
            kind: What document it is; one kind has one decoder.
            decoder: Depends on `data` alone; `path` is for its errors, which are not remembered.
            path: Where `data` was found.
            data: The content of the file.
        """
        digest = blake2b(data).digest()
        with self._lock:
            known = list(self._known.get(kind, ()))

        for found, decoded in known:
            if found == digest:
                return cast("T", decoded)

        made = decoder(path, data)
        with self._lock:
            self._known[kind] = [(digest, made), *self._known.get(kind, ())][:_MOST]

        return made

    def table(self, parts: Parts, index: Index) -> LeafTable | None:
        """Return what these very documents and an index that says the same were put together to."""
        with self._lock:
            tables = list(self._tables)

        for known, of, table in tables:
            if all(a is b for a, b in zip(known, parts, strict=True)) and index.says_the_same(of):
                return table

        return None

    def keep_table(self, parts: Parts, index: Index, table: LeafTable) -> None:
        """Remember a table that depends on nothing else."""
        with self._lock:
            self._tables.append((parts, index, table))
            del self._tables[:-_MOST]
