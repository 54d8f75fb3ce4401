"""The layout of a checkpoint whose one tree is an item: a step of a training, with its metrics beside it."""

from __future__ import annotations

__all__ = ("OneTreeLayout",)

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from penstock.handlers.items.joined import JoinedCheckpoint, Opened
from penstock.handlers.items.layout import written_in
from penstock.handlers.items.parts import Parts
from penstock.handlers.layout import checkpoint_metadata
from penstock.handlers.layout.names import CHECKPOINT_METADATA, COMMIT_MARK
from penstock.kernel.capabilities import FormattedLayout, ItemLayout
from penstock.kernel.messages import Document, Leaf, LeafSpec, ParamInfo, WrittenBatch
from penstock.kernel.protocols import Layout, Store, StoredCheckpoint
from penstock.kernel.save_format import SaveArgs, SaveFormat


@final
class OneTreeLayout:
    """Writes a tree into the directory of an item. Its leaves keep their own key paths.

    So what is remembered of a tree that is saved again and again (or restored) is of use here, too, as
    it is not to an `ItemsLayout`, in whose tree all key paths begin with the name of an item.

    Args:
        base: Writes the tree; also a `FormattedLayout` and an `ItemLayout`.
        parts: The one tree, and what else there is.
    """

    __slots__ = ("_base", "_formatted", "_item", "_parts", "only_folder")

    def __init__(self, base: Layout, parts: Parts) -> None:
        assert isinstance(base, FormattedLayout)
        assert isinstance(base, ItemLayout)
        (part,) = parts.tree_parts
        self._base: Layout = base
        self._formatted: FormattedLayout = base
        self._item: ItemLayout = base
        self._parts = parts
        self.only_folder = part.directory

    @staticmethod
    def fits(base: Layout, parts: Parts) -> bool:
        """Whether there is one tree, which is an item as a whole, and `base` can write it."""
        whole = len(parts.tree_parts) == 1 and not parts.tree_parts[0].single
        return whole and len(parts.tree_parts[0].keys) == 1 and isinstance(base, ItemLayout)

    @property
    def save_format(self) -> SaveFormat:
        """How arrays are written."""
        return self._formatted.save_format

    def folder(self, _: Leaf) -> str:
        """The directory of the item."""
        return self.only_folder

    def within(self, leaf: Leaf) -> ParamInfo:
        """What it is anyway: its keys are those of the item."""
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

    def temporary_name(self, path: str) -> str:
        return self._base.temporary_name(path)

    def data_file(self) -> str:
        return self._base.data_file()

    def fit(self, spec: LeafSpec, info: ParamInfo, args: SaveArgs | None) -> LeafSpec:
        return self._formatted.fit(spec, info, args)

    def encode(self, codec: str, chunks: Sequence[memoryview]) -> Sequence[bytes]:
        return self._formatted.encode(codec, chunks)

    def chunk_file(self, leaf: Leaf, chunk: tuple[int, ...]) -> str | None:
        """Say where a chunk lies if arrays have a directory each."""
        file = self._formatted.chunk_file(leaf, chunk)
        return None if file is None else f"{self.only_folder}/{file}"

    def check(self, leaves: Sequence[Leaf]) -> None:
        self._base.check(leaves)

    def documents(
        self,
        leaves: Sequence[Leaf],
        batches: Sequence[WrittenBatch],
        *,
        started_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        digests: Mapping[str, bytes] | None = None,
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
        about = checkpoint_metadata.encode(
            started_ns=started_ns,
            committed_ns=committed_ns,
            custom_metadata=custom_metadata,
            item_handlers=self._parts.handlers,
        )
        mark = b"Checkpoint commit was successful"
        return [
            *[replace(one, path=f"{self.only_folder}/{one.path}") for one in made],
            *self._parts.documents,
            *[Document(f"{directory}/{COMMIT_MARK}", mark) for directory in self._parts.directories],
            Document(CHECKPOINT_METADATA, about),
            Document(COMMIT_MARK, mark),
        ]

    def recognises(self, store: Store, path: str) -> bool:
        return self._base.recognises(store, path)

    def open(self, store: Store, path: str, item: str | None = None) -> StoredCheckpoint:
        return self._base.open(store, path, item)
