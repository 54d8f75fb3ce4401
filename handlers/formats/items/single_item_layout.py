"""The layout of a checkpoint whose only tree is an item, such as a training step with its metrics."""

from __future__ import annotations

__all__ = ("SingleItemLayout",)

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from penstock.handlers.formats.items.item_parts import Parts
from penstock.handlers.formats.items.items_as_one_tree import JoinedCheckpoint, Opened
from penstock.handlers.formats.items.items_layout_base import ItemsLayoutBase
from penstock.handlers.formats.items.views_from_item import below, written_in
from penstock.kernel.protocols.checkpoints import StoredCheckpoint
from penstock.kernel.protocols.layouts import ItemLayout, Layout
from penstock.kernel.protocols.leaf import ParamInfo
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.views import StagedLeaf, WrittenLeaves
from penstock.kernel.protocols.written import Document


@final
class SingleItemLayout(ItemsLayoutBase):
    """Writes a tree into the directory of an item. Its leaves keep their own key paths.

    So caches for trees that are saved or restored repeatedly work here. In a `CompositeLayout` they do not,
    because all key paths there begin with the name of an item.

    Args:
        base: Writes the tree; also a `FormattedLayout` and an `ItemLayout`.
        parts: The one tree, and what else there is.
    """

    __slots__ = ("_item", "only_folder")

    def __init__(self, base: Layout, parts: Parts) -> None:
        super().__init__(base, parts)
        assert isinstance(base, ItemLayout)
        (part,) = parts.tree_parts
        self._item: ItemLayout = base
        self.only_folder = part.directory

    @staticmethod
    def fits(base: Layout, parts: Parts) -> bool:
        """Whether there is one tree, which is an item as a whole, and `base` can write it."""
        whole = len(parts.tree_parts) == 1 and not parts.tree_parts[0].single
        return whole and len(parts.tree_parts[0].keys) == 1 and isinstance(base, ItemLayout)

    def folder(self, _: StagedLeaf) -> str:
        """The directory of the item."""
        return self.only_folder

    def within(self, leaf: StagedLeaf) -> ParamInfo:
        """The info as it is: the keys of a leaf are those in its item."""
        return leaf.info

    def by_folder(self, named: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """All leaves lie in one directory, under their own names."""
        return {self.only_folder: named}

    def from_folders(self, found: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        return found.get(self.only_folder, {})

    def open_all(self, store: Store, path: str) -> StoredCheckpoint:
        """Open the item of the same name; see `JoinedCheckpoint`."""
        opened = Opened((), self.only_folder, self._base.open(store, path, self.only_folder))
        return JoinedCheckpoint.of(path, [opened])

    def chunk_file(self, leaf: StagedLeaf, chunk: tuple[int, ...]) -> str | None:
        """Return the chunk's own file, if each array has a directory."""
        file = self._formatted.chunk_file(leaf, chunk)
        return None if file is None else f"{self.only_folder}/{file}"

    def check(self, leaves: Sequence[StagedLeaf]) -> None:
        self._base.check(leaves)

    def documents(
        self,
        leaves: Sequence[StagedLeaf],
        batches: Sequence[WrittenLeaves],
        *,
        started_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        digests: Mapping[str, bytes] | None = None,
        beside: Sequence[Document] = (),
    ) -> Iterable[Document]:
        """Make the documents of the tree and of the other items, then those of the checkpoint."""
        committed_ns = time.time_ns()
        made = self._item.item_documents(
            leaves,
            written_in(self.only_folder, batches),
            committed_ns=committed_ns,
            custom_metadata=self._parts.tree_parts[0].custom_metadata,
            digests=digests or {},
        )
        return self._with_checkpoint(
            below(self.only_folder, made),
            started_ns=started_ns,
            committed_ns=committed_ns,
            custom_metadata=custom_metadata,
            beside=beside,
        )
