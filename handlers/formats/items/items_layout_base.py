"""The common base of layouts with items, which leaves trees to another layout."""

from __future__ import annotations

__all__ = ("ItemsLayoutBase",)

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.handlers.formats import integrity
from penstock.handlers.formats.items.item_parts import Parts
from penstock.handlers.formats.orbax.checkpoint_metadata import content_of, encode_checkpoint_metadata
from penstock.handlers.formats.orbax.file_names import CHECKPOINT_METADATA, COMMIT_MARK, INTEGRITY
from penstock.handlers.formats.orbax.sealed_documents import encode_mark
from penstock.kernel.config.save_format import SaveArgs, SaveFormat
from penstock.kernel.protocols.checkpoints import StoredCheckpoint
from penstock.kernel.protocols.layouts import (
    FormattedLayout,
    Layout,
    Opening,
    opening_of,
    process_folder_of,
)
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Document


class ItemsLayoutBase:
    """Delegates array storage, file names and opening to another layout.

    Args:
        base: That layout; also a `FormattedLayout`.
        parts: The items.
    """

    __slots__ = ("_base", "_formatted", "_parts", "save_format")

    def __init__(self, base: Layout, parts: Parts) -> None:
        assert isinstance(base, FormattedLayout)
        self._base: Layout = base
        self._formatted: FormattedLayout = base
        self._parts = parts
        self.save_format: SaveFormat = base.save_format  #: how arrays are written

    def fit(self, spec: LeafSpec, info: ParamInfo, args: SaveArgs | None) -> LeafSpec:
        return self._formatted.fit(spec, info, args)

    def encode(self, codec: str, chunks: Sequence[memoryview], itemsize: int) -> Sequence[bytes]:
        return self._formatted.encode(codec, chunks, itemsize)

    def temporary_name(self, path: str) -> str:
        return self._base.temporary_name(path)

    def data_file(self) -> str:
        return self._base.data_file()

    def process_folder(self, process_index: int) -> str:
        """The folder that the inner layout gives.

        Raises:
            SpecError: If it gives none.
        """
        return process_folder_of(self._base, process_index)

    def recognises(self, store: Store, path: str) -> bool:
        return self._base.recognises(store, path)

    def find(self, store: Store, path: str, item: str | None = None) -> Opening:
        return opening_of(self._base, store, path, item)

    def open(self, store: Store, path: str, item: str | None = None) -> StoredCheckpoint:
        return self._base.open(store, path, item)

    def _with_checkpoint(
        self,
        trees: Iterable[Document],
        *,
        started_ns: int,
        committed_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        beside: Sequence[Document],
    ) -> Iterator[Document]:
        """Append the documents of the other items and of the checkpoint to those of the trees.

        The checkpoint has a record of its own, of all documents but those that a tree's own record has.

        Raises:
            SpecError: If `custom_metadata` is not JSON.
        """
        about = encode_checkpoint_metadata(
            started_ns=started_ns,
            committed_ns=committed_ns,
            custom_metadata=custom_metadata,
            item_handlers=self._parts.handlers,
        )
        return self._with_about(trees, Document(CHECKPOINT_METADATA, about), beside)

    def _with_about(
        self, trees: Iterable[Document], about: Document, beside: Sequence[Document]
    ) -> Iterator[Document]:
        records: list[Document] = []
        for document in trees:
            yield document
            if os.path.basename(document.path) == INTEGRITY:
                records.append(document)

            del document  # while the next one is made

        content = content_of(about.path, about.data)
        record = integrity.encode((), {}, [*self._parts.documents, about, *records, *beside], content)
        of_item = {os.path.dirname(document.path): document.data for document in records}
        yield from self._parts.documents
        for directory in self._parts.directories:
            yield Document(f"{directory}/{COMMIT_MARK}", encode_mark(of_item.get(directory)))

        yield about
        yield Document(INTEGRITY, record)
        yield Document(COMMIT_MARK, encode_mark(record))
