"""The layout of one checkpoint with several items, each in a directory of its own."""

from __future__ import annotations

__all__ = ("CompositeLayout",)

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from penstock.handlers.formats.items.item_parts import TreePart
from penstock.handlers.formats.items.items_as_one_tree import JoinedCheckpoint, Opened
from penstock.handlers.formats.items.items_layout_base import ItemsLayoutBase
from penstock.handlers.formats.items.views_from_item import LeafInItem, below, written_in
from penstock.handlers.formats.orbax.encoded_tree import EncodedTree, check_names
from penstock.handlers.formats.orbax.tree_columns import TreeColumns
from penstock.handlers.formats.zarr import chunk_key, prefix_of
from penstock.kernel.protocols.checkpoints import StoredCheckpoint
from penstock.kernel.protocols.leaf import ParamInfo
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.views import StagedLeaf, WrittenLeaves
from penstock.kernel.protocols.written import Document


@final
class CompositeLayout(ItemsLayoutBase):
    """Writes one checkpoint of several items, as Orbax's `Composite` is laid out.

    The saved value is one tree; each item holds the leaves below some of its keys.

    Args:
        base: Says how arrays are stored.
        parts: The items.
    """

    __slots__ = ()

    @property
    def only_folder(self) -> None:
        """None, because each item has a directory of its own."""
        return

    def folder(self, leaf: StagedLeaf) -> str:
        """The directory of the item that holds the leaf."""
        return self._part(leaf).directory

    def within(self, leaf: StagedLeaf) -> ParamInfo:
        """The keys that a leaf has in its item."""
        return _within(self._part(leaf), leaf.info)

    def by_folder(self, named: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """Split values by stored name into items; empty if a dot in an item's name makes names ambiguous."""
        found: dict[str, dict[str, Any]] = {part.directory: {} for part in self._parts.tree_parts}
        if any("." in key for part in self._parts.tree_parts for key in part.keys):
            return found

        prefixes = [(f"{'.'.join(part.keys)}.", part) for part in self._parts.tree_parts]
        bare = {".".join(part.keys): part for part in self._parts.tree_parts}
        for name, value in named.items():
            if name in bare:
                found[bare[name].directory][""] = value
                continue
            for prefix, part in prefixes:
                if name.startswith(prefix):
                    found[part.directory][name[len(prefix) :]] = value
                    break

        return found

    def from_folders(self, found: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        together: dict[str, Any] = {}
        if any("." in key for part in self._parts.tree_parts for key in part.keys):
            return together

        for part in self._parts.tree_parts:
            prefix = ".".join(part.keys)
            for name, value in found.get(part.directory, {}).items():
                together[f"{prefix}.{name}" if name else prefix] = value

        return together

    def open_all(self, store: Store, path: str) -> StoredCheckpoint:
        """Open every item with leaves; see `JoinedCheckpoint`."""
        opened: list[Opened] = []
        for part in self._parts.tree_parts:
            item, _, inner = part.directory.partition("/")
            where = os.path.join(path, item) if inner else path
            opened.append(Opened(part.keys, part.directory, self._base.open(store, where, inner or item)))

        return JoinedCheckpoint.of(path, opened)

    def chunk_file(self, leaf: StagedLeaf, chunk: tuple[int, ...]) -> str | None:
        """Return the chunk's own file, if each array has a directory."""
        if self.save_format.ocdbt:
            return None

        part = self._part(leaf)
        name = prefix_of(_within(part, leaf.info).name)
        return f"{part.directory}/{name}{chunk_key(chunk, self.save_format.zarr)}"

    def check(self, leaves: Sequence[StagedLeaf]) -> None:
        """Check the names in each item; see `check_names` for the errors."""
        for part, found in self._by_part(leaves):
            check_names(TreeColumns.of(found), self.save_format, single=part.single)

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
        """Make the documents of every item, then those of the checkpoint."""
        committed_ns = time.time_ns()
        by_folder = self.by_folder(digests or {})

        def of_trees() -> Iterator[Document]:
            for part, found in self._by_part(leaves):
                tree = EncodedTree(TreeColumns.of(found), self.save_format, part.custom_metadata)
                of_part = by_folder.get(part.directory, {})
                made = tree.item_documents(written_in(part.directory, batches), committed_ns, of_part)
                yield from below(part.directory, made)

        return self._with_checkpoint(
            of_trees(),
            started_ns=started_ns,
            committed_ns=committed_ns,
            custom_metadata=custom_metadata,
            beside=beside,
        )

    def _part(self, leaf: StagedLeaf) -> TreePart:
        keys = leaf.info.keys
        return next(part for part in self._parts.tree_parts if keys[: len(part.keys)] == part.keys)

    def _by_part(self, leaves: Sequence[StagedLeaf]) -> Iterator[tuple[TreePart, list[StagedLeaf]]]:
        found: dict[str, list[StagedLeaf]] = {part.directory: [] for part in self._parts.tree_parts}
        for leaf in leaves if found else ():  # without trees, the one tree is an empty dict
            part = self._part(leaf)
            info = _within(part, leaf.info)
            found[part.directory].append(LeafInItem(leaf.index, info, leaf.spec))

        for part in self._parts.tree_parts:
            yield part, found[part.directory]


def _within(part: TreePart, info: ParamInfo) -> ParamInfo:
    """The place of a leaf in its item. Its `key_path` stays whole, for messages."""
    n = len(part.keys)
    return replace(info, keys=info.keys[n:], kinds=info.kinds[n:], nodes=info.nodes[n:])
