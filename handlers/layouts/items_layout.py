"""A checkpoint of several named items: its layout, and its leaves as the one tree that was saved.

A `CompositeLayout` writes any items; a `SingleItemLayout` one tree beside documents, under its own key paths.
Both leave the storage of arrays and opening to the layout that they are built on, and append the documents of
the checkpoint as a whole. A save of items sees one tree: `written_in` shows each item its part of what was
written, and a `JoinedCheckpoint` opens the items of a base as that one tree.
"""

from __future__ import annotations

__all__ = ("CompositeLayout", "SingleItemLayout", "written_in")

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.formats import integrity
from penstock.handlers.formats.integrity import running_of
from penstock.handlers.formats.leaf_table import show_key_path
from penstock.handlers.formats.orbax.checkpoint_metadata import content_of, encode_checkpoint_metadata
from penstock.handlers.formats.orbax.encoded_tree import EncodedTree, check_names
from penstock.handlers.formats.orbax.file_names import CHECKPOINT_METADATA, COMMIT_MARK, INTEGRITY
from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout
from penstock.handlers.formats.orbax.sealed_documents import encode_mark
from penstock.handlers.formats.orbax.tree_columns import TreeColumns
from penstock.handlers.formats.zarr import chunk_key, prefix_of
from penstock.handlers.layouts.auto_layout import AutoLayout
from penstock.handlers.layouts.item_parts import Parts, TreePart
from penstock.kernel.config.save_format import SaveArgs, SaveFormat
from penstock.kernel.protocols.checkpoints import StoredCheckpoint
from penstock.kernel.protocols.layouts import (
    FormattedLayout,
    Layout,
    Opening,
    process_folder_of,
)
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.protocols.reads import Destination, Read
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.views import ColumnsOfParts, PackedLeaves, StagedLeaf, WrittenLeaves
from penstock.kernel.protocols.written import Document, Written


class _ItemsLayoutBase:
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
        return self._base.find(store, path, item)

    def open(self, store: Store, path: str, item: str | None = None) -> StoredCheckpoint:
        return self._base.find(store, path, item).open()

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


@final
class SingleItemLayout(_ItemsLayoutBase):
    """Writes a tree into the directory of an item. Its leaves keep their own key paths.

    So caches for trees that are saved or restored repeatedly work here. In a `CompositeLayout` they do not,
    because all key paths there begin with the name of an item.

    Args:
        base: An `OrbaxLayout`, or an `AutoLayout` that writes with one.
        parts: The one tree, and what else there is.
    """

    __slots__ = ("_item", "only_folder")

    def __init__(self, base: Layout, parts: Parts) -> None:
        super().__init__(base, parts)
        written = base.written if isinstance(base, AutoLayout) else base
        assert isinstance(written, OrbaxLayout)
        (part,) = parts.tree_parts
        self._item = written
        self.only_folder = part.directory

    @staticmethod
    def fits(base: Layout, parts: Parts) -> bool:
        """Return whether there is one tree, which is an item as a whole, and `base` can write it."""
        written = base.written if isinstance(base, AutoLayout) else base
        whole = len(parts.tree_parts) == 1 and not parts.tree_parts[0].single
        return whole and len(parts.tree_parts[0].keys) == 1 and isinstance(written, OrbaxLayout)

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
        opened = Opened((), self.only_folder, self._base.find(store, path, self.only_folder).open())
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
            _below(self.only_folder, made),
            started_ns=started_ns,
            committed_ns=committed_ns,
            custom_metadata=custom_metadata,
            beside=beside,
        )


@final
class CompositeLayout(_ItemsLayoutBase):
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
            opened.append(
                Opened(part.keys, part.directory, self._base.find(store, where, inner or item).open())
            )

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
                yield from _below(part.directory, made)

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
            found[part.directory].append(_LeafInItem(leaf.index, info, leaf.spec))

        for part in self._parts.tree_parts:
            yield part, found[part.directory]


def _within(part: TreePart, info: ParamInfo) -> ParamInfo:
    """The place of a leaf in its item. Its `key_path` stays whole, for messages."""
    n = len(part.keys)
    return replace(info, keys=info.keys[n:], kinds=info.kinds[n:], nodes=info.nodes[n:])


@final
@dataclass(frozen=True, slots=True)
class _LeafInItem:
    """A leaf in its item, without its value, which is no longer needed."""

    index: int
    info: ParamInfo
    spec: LeafSpec
    value: object = None

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes


@final
@dataclass(frozen=True, slots=True)
class _PackInItem:
    leaves: Sequence[StagedLeaf]
    indices: Sequence[int]
    chunk_sizes: Sequence[int]
    file: str
    offset: int
    nbytes: int
    crc32cs: Sequence[int]
    inner: PackedLeaves

    def parts(self) -> Iterator[Written]:
        for part in self.inner.parts():
            yield replace(part, file=self.file)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _ColumnsInItem:
    files: Sequence[str]
    leaf: Any
    chunk: Any
    start: Any
    file: Any
    offset: Any
    nbytes: Any
    crc32c: Any
    coded: Any
    block_bytes: Any
    running: Any
    inner: ColumnsOfParts
    rows: npt.NDArray[np.int64]  #: of these, there

    @classmethod
    def of(cls, inner: ColumnsOfParts, prefix: str) -> _ColumnsInItem:
        here = np.array([file.startswith(prefix) for file in inner.files], np.bool_)
        rows = np.flatnonzero(here[inner.file])
        return cls(
            [file.removeprefix(prefix) for file in inner.files],
            inner.leaf[rows],
            inner.chunk[rows],
            inner.start[rows],
            inner.file[rows],
            inner.offset[rows],
            inner.nbytes[rows],
            inner.crc32c[rows],
            inner.coded[rows],
            inner.block_bytes[rows],
            running_of(inner.running, inner.nbytes, inner.block_bytes, rows),
            inner,
            rows,
        )

    def parts(self, rows: Iterable[int] | None = None) -> Iterator[Written]:
        at = range(len(self.rows)) if rows is None else list(rows)
        for row, part in zip(at, self.inner.parts([self.rows[row] for row in at]), strict=True):
            yield replace(part, file=self.files[self.file[row]])


@final
@dataclass(frozen=True, slots=True)
class _WrittenInItem:
    written: Sequence[Written]
    packs: Sequence[_PackInItem]
    columns: Sequence[_ColumnsInItem]

    def parts(self) -> Iterator[Written]:
        yield from self.written
        for pack in self.packs:
            yield from pack.parts()
        for columns in self.columns:
            yield from columns.parts()


def _below(directory: str, documents: Iterable[Document]) -> Iterator[Document]:
    """Yield the documents of an item, named from the checkpoint."""
    for document in documents:
        yield replace(document, path=f"{directory}/{document.path}")
        del document  # while the next one is made


def written_in(directory: str, batches: Sequence[WrittenLeaves]) -> list[WrittenLeaves]:
    """Return what was written into an item's directory, with file names relative to it."""
    prefix = f"{directory}/"
    n = len(prefix)
    found: list[WrittenLeaves] = []
    for batch in batches:
        written = [replace(w, file=w.file[n:]) for w in batch.written if w.file.startswith(prefix)]
        packs = [
            _PackInItem(
                pack.leaves,
                pack.indices,
                pack.chunk_sizes,
                pack.file[n:],
                pack.offset,
                pack.nbytes,
                pack.crc32cs,
                pack,
            )
            for pack in batch.packs
            if pack.file.startswith(prefix)
        ]
        columns = [_ColumnsInItem.of(each, prefix) for each in batch.columns]
        if written or packs or columns:
            found.append(_WrittenInItem(written, packs, columns))

    return found


@final
@dataclass(frozen=True, slots=True)
class Opened:
    """An opened item, and where its leaves stand in the one tree."""

    keys: KeyPath  #: what the keys of its leaves begin with
    folder: str  #: relative to the checkpoint
    checkpoint: StoredCheckpoint


@final
@dataclass(frozen=True, slots=True, eq=False)
class JoinedCheckpoint:
    """The leaves of several items. Data files are named from the checkpoint.

    Make it with `of`.
    """

    path: str
    items: Sequence[Opened]  #: those with leaves
    leaves: Sequence[StoredLeaf]
    """Every leaf, with its keys in the one tree; its detail is the leaf as its item has it."""
    digests: Mapping[str, bytes]

    @classmethod
    def of(cls, path: str, items: Sequence[Opened]) -> JoinedCheckpoint:
        """Join items of the checkpoint at `path`."""
        digests: dict[str, bytes] = {}
        for item in items:
            prefix = ".".join(item.keys)
            for name, digest in item.checkpoint.digests.items():
                digests[".".join([part for part in (prefix, name) if part])] = digest

        return cls(
            path, items, [_placed(item, leaf) for item in items for leaf in item.checkpoint.leaves], digests
        )

    @property
    def directory(self) -> str:
        """The directory that data files are named from."""
        return self.path

    @property
    def custom_metadata(self) -> Mapping[str, Any] | None:
        return self.items[0].checkpoint.custom_metadata if self.items else None

    @property
    def tree_custom_metadata(self) -> object:
        return None

    @property
    def root_custom_metadata(self) -> Mapping[str, Any] | None:
        return None

    @property
    def committed_at_ns(self) -> int | None:
        return self.items[0].checkpoint.committed_at_ns if self.items else None

    def parts(self, numbers: Sequence[int], leaves: Sequence[int]) -> Sequence[Sequence[Written]]:
        """Say where the bytes of some leaves lie; see `StoredCheckpoint.parts`."""
        found: list[Sequence[Written]] = [()] * len(numbers)
        first = 0
        for item in self.items:
            behind = first + len(item.checkpoint.leaves)
            of_item = [at for at, number in enumerate(numbers) if first <= number < behind]
            rows, indices = [numbers[at] - first for at in of_item], [leaves[at] for at in of_item]
            for at, parts in zip(of_item, item.checkpoint.parts(rows, indices), strict=True):
                found[at] = [replace(part, file=f"{item.folder}/{part.file}") for part in parts]

            first = behind

        return found

    def reads(self, index: int, stored: StoredLeaf, region: Destination, piece_bytes: int) -> Iterator[Read]:
        """Plan the reads that fill `region`; see `StoredCheckpoint.reads`."""
        item, leaf = _origin(stored)
        return item.checkpoint.reads(index, leaf, region, piece_bytes)


def _placed(item: Opened, leaf: StoredLeaf) -> StoredLeaf:
    info = leaf.info
    keys = (*item.keys, *info.keys)
    kinds = (*[KeyKind.MAPPING] * len(item.keys), *info.kinds)
    placed = ParamInfo(keys, kinds, show_key_path(keys, kinds), info.directory)
    return StoredLeaf(placed, leaf.spec, (item, leaf))


def _origin(stored: StoredLeaf) -> tuple[Opened, StoredLeaf]:
    match stored.detail:
        case (Opened() as item, StoredLeaf() as leaf):
            return item, leaf
        case _:
            raise AssertionError("a leaf of another checkpoint")
