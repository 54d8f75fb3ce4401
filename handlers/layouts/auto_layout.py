"""The default layout of a Checkpointer: writes Orbax's format and opens any format that penstock reads."""

from __future__ import annotations

__all__ = ("AutoLayout",)

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout
from penstock.handlers.formats.safetensors.tensor_paths import is_safetensors
from penstock.handlers.layouts.discovery import tensors_at
from penstock.kernel.errors import UnsupportedFormatError
from penstock.kernel.memory.bounded_cache import BoundedCache, Caching
from penstock.kernel.protocols.checkpoints import FoundItems, ListedItems, StoredCheckpoint
from penstock.kernel.protocols.layouts import (
    ArrangedLayout,
    FormattedLayout,
    ItemsLayout,
    Layout,
    Opening,
)
from penstock.kernel.protocols.leaf_handlers import Leaf
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Document, WrittenLeaves


@final
@dataclass(frozen=True, slots=True)
class AutoLayout:
    """Writes with one layout, and opens a checkpoint of any format that penstock reads.

    Args:
        written: Writes all checkpoints, and opens those that no other format recognises.
    """

    written: Layout = field(default_factory=OrbaxLayout)

    @property
    def caches(self) -> Sequence[BoundedCache[Any, Any]]:
        """See `Caching`."""
        return self.written.caches if isinstance(self.written, Caching) else ()

    def temporary_name(self, path: str) -> str:
        return self.written.temporary_name(path)

    def data_file(self) -> str:
        return self.written.data_file()

    @property
    def arrays(self) -> FormattedLayout | None:
        """That of `written`."""
        return self.written.arrays

    @property
    def places(self) -> ArrangedLayout | None:
        """That of `written`."""
        return self.written.places

    @property
    def folders(self) -> ItemsLayout | None:
        """That of `written`."""
        return self.written.folders

    def check(self, leaves: Sequence[Leaf]) -> None:
        self.written.check(leaves)

    def documents(
        self,
        leaves: Sequence[Leaf],
        batches: Sequence[WrittenLeaves],
        *,
        started_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        digests: Mapping[str, bytes] | None = None,
        beside: Sequence[Document] = (),
    ) -> Iterable[Document]:
        return self.written.documents(
            leaves,
            batches,
            started_ns=started_ns,
            custom_metadata=custom_metadata,
            digests=digests,
            beside=beside,
        )

    def recognises(self, store: Store, path: str) -> bool:
        """Return whether `path` may be overwritten: only a checkpoint of the written format may."""
        return self.written.recognises(store, path)

    def items(self, store: Store, path: str) -> FoundItems:
        """Name the items of a checkpoint; safetensors have none.

        Raises:
            UnsupportedFormatError: If there are none.
        """
        if isinstance(self.written, ListedItems) and not is_safetensors(store, path):
            return self.written.items(store, path)

        raise UnsupportedFormatError(path, "has no items; restore it as a whole")

    def find(self, store: Store, path: str, item: str | None = None) -> Opening:
        """Find what `open` opens, and tell what its documents take."""
        return tensors_at(store, path, item) or self.written.find(store, path, item)

    def open(self, store: Store, path: str, item: str | None = None) -> StoredCheckpoint:
        """Find the checkpoint at `path`, or an item of it, and read its documents.

        Raises:
            PenstockError: Whatever the layout that recognises it raises.
        """
        return self.find(store, path, item).open()
