"""A cache of decoded documents. The checkpoints of one run differ only in their arrays."""

from __future__ import annotations

__all__ = ("RememberedDocuments",)

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, TypeAlias, TypeVar, final

from penstock.handlers.formats.common.leaf_table import LeafTable
from penstock.handlers.ocdbt.index_entries import Index
from penstock.handlers.ocdbt.key_cache import RememberedKeys
from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity

T = TypeVar("T")
Parts: TypeAlias = tuple[object, ...]

_KINDS: Final = 4  # of documents: a tree has one of each
_TREES: Final = 2
_BYTES_OF_A_LEAF: Final = 200


@final
@dataclass(frozen=True, slots=True, eq=False)
class RememberedDocuments:
    """Decodes documents and remembers the last few. Thread-safe.

    A document is recognised by a cryptographic digest of its bytes, so the result can never be that of
    another document. Callers must not change the result.
    """

    keys: RememberedKeys = field(default_factory=RememberedKeys, init=False, repr=False)
    _documents: BoundedCache[tuple[str, bytes], Any] = field(
        default_factory=lambda: BoundedCache(_KINDS * _TREES), init=False, repr=False
    )
    _tables: BoundedCache[Hashable, LeafTable] = field(
        default_factory=lambda: BoundedCache(_TREES), init=False, repr=False
    )

    @property
    def caches(self) -> Sequence[BoundedCache[Any, Any]]:
        """See `Caching`."""
        return (self._documents, self._tables, *self.keys.caches)

    def decode(self, kind: str, decoder: Callable[[str, bytes], T], path: str, data: bytes) -> T:
        """Return `decoder(path, data)`, made now or before.

        Args:
            kind: What document it is; one kind has one decoder.
            decoder: Depends on `data` alone; `path` is for its errors, which are not remembered.
            path: Where `data` was found.
            data: The content of the file.
        """

        def make() -> T:
            return decoder(path, data)

        found: T = self._documents.get_or_make((kind, blake2b(data).digest()), make, lambda _: len(data))
        return found

    def table(self, parts: Parts, index: Index) -> LeafTable | None:
        """Return the table made from these very documents and an equivalent index."""
        return self._tables.get((ByIdentity(*parts), index.what_it_says()))

    def keep_table(self, parts: Parts, index: Index, table: LeafTable) -> None:
        """Remember a table that depends only on these."""
        nbytes = _BYTES_OF_A_LEAF * len(table.keys)
        self._tables.put((ByIdentity(*parts), index.what_it_says()), table, nbytes)
