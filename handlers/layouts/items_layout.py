"""A checkpoint of several named items: its layout, and its leaves as the one tree that was saved.

A `CompositeLayout` leaves the storage of arrays and opening to the layout that it is built on, and appends
the documents of the checkpoint as a whole. A save of items sees one tree: `written_in` shows each item its
part of what was written, and a `JoinedCheckpoint` opens the items of a base as that one tree.
"""

from __future__ import annotations

__all__ = ("CompositeLayout", "written_in")

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from penstock.handlers.formats import integrity
from penstock.handlers.formats.integrity import running_of
from penstock.handlers.formats.leaf_table import show_key_path
from penstock.handlers.formats.orbax.checkpoint_documents import (
    Origin,
    content_of,
    encode_checkpoint_metadata,
    encode_mark,
)
from penstock.handlers.formats.orbax.file_names import CHECKPOINT_METADATA, COMMIT_MARK, INTEGRITY
from penstock.handlers.formats.orbax.orbax_layout import EncodedTree, OrbaxLayout, check_names
from penstock.handlers.formats.orbax.tree_columns import TreeColumns
from penstock.handlers.layouts.item_parts import Parts, TreePart
from penstock.kernel.protocols.layouts import (
    FormattedLayout,
    Layout,
    Opening,
    StoredCheckpoint,
)
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, ParamInfo, StoredLeaf
from penstock.kernel.protocols.leaf_handlers import Leaf
from penstock.kernel.protocols.reads import Destination, Read
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import COLUMNS, Document, Written, WrittenLeaves, WrittenTable


@final
class CompositeLayout:
    """Writes one checkpoint of several items, as Orbax's `Composite` is laid out.

    The saved value is one tree; each item holds the leaves below some of its keys. Arrays are stored and
    checkpoints are opened as another layout does it.

    Args:
        base: That layout, with a choice of how `arrays` are stored.
        parts: The items.
    """

    __slots__ = ("_base", "_form", "_parts", "arrays", "only_folder")

    def __init__(self, base: Layout, parts: Parts) -> None:
        assert base.arrays is not None
        self._base, self._parts = base, parts
        self._form = base.arrays.save_format
        self.arrays: FormattedLayout = base.arrays  #: of the base
        only = [part.directory for part in parts.tree_parts if not part.keys]
        self.only_folder: str | None = only[0] if only else None
        """The directory of the one tree, if its leaves keep the keys that they have in its item."""

    @classmethod
    def of_one_tree(cls, base: Layout, parts: Parts) -> CompositeLayout | None:
        """Return a layout in which the leaves of the one item with leaves keep their own key paths.

        So caches for trees that are saved or restored repeatedly work. Where there are several such items,
        they do not, because all key paths begin with the name of an item.

        Returns:
            The layout; None if there is not just one tree, which is an item as a whole, or `base` has no
            documents of a single item.
        """
        if not isinstance(base.arrays, OrbaxLayout) or len(parts.tree_parts) != 1:
            return None

        (part,) = parts.tree_parts
        if part.single or len(part.keys) != 1:
            return None

        return cls(base, replace(parts, tree_parts=[replace(part, keys=())]))

    @property
    def places(self) -> None:
        """None: files just grow."""

    @property
    def folders(self) -> CompositeLayout:
        """The layout itself."""
        return self

    def temporary_name(self, path: str) -> str:
        return self._base.temporary_name(path)

    def data_file(self) -> str:
        return self._base.data_file()

    def recognises(self, store: Store, path: str) -> bool:
        return self._base.recognises(store, path)

    def find(self, store: Store, path: str, item: str | None = None) -> Opening:
        return self._base.find(store, path, item)

    def folder(self, leaf: Leaf) -> str:
        """The directory of the item that holds the leaf."""
        return self._part(leaf).directory

    def within(self, leaf: Leaf) -> ParamInfo:
        """The keys that a leaf has in its item."""
        return _within(self._part(leaf), leaf.info)

    def by_folder(self, named: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """Split values by stored name into items; empty if a dot in an item's name makes names ambiguous."""
        if self.only_folder is not None:
            return {self.only_folder: named}

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
        if self.only_folder is not None:
            return found.get(self.only_folder, {})

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

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Check the names in each item; see `check_names` for the errors."""
        for part, found in self._by_part(leaves):
            check_names(TreeColumns.of(found), self._form, single=part.single)

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
        """Make the documents of every item, then those of the checkpoint.

        Raises:
            SpecError: If `custom_metadata` is not JSON.
        """
        committed_ns = time.time_ns()
        by_folder = self.by_folder(digests or {})

        def of_trees() -> Iterator[Document]:
            for part, found in self._by_part(leaves):
                written, of_part = written_in(part.directory, batches), by_folder.get(part.directory, {})
                if isinstance(self.arrays, OrbaxLayout) and not part.keys:  # whose caches know the tree
                    tree = self.arrays.tree(found, part.custom_metadata)
                else:
                    tree = EncodedTree(TreeColumns.of(found), self._form, part.custom_metadata)

                of_tree = self._origin.below(part.directory)
                made = tree.documents(written, committed_ns, of_part, origin=of_tree)
                yield from _below(part.directory, made)

        about = encode_checkpoint_metadata(
            started_ns=started_ns,
            committed_ns=committed_ns,
            custom_metadata=custom_metadata,
            item_handlers=self._parts.handlers,
        )
        document = self._origin.kept(Document(CHECKPOINT_METADATA, about))
        return self._with_about(of_trees(), document, beside)

    @property
    def _origin(self) -> Origin:
        return self.arrays.origin if isinstance(self.arrays, OrbaxLayout) else Origin()

    def _part(self, leaf: Leaf) -> TreePart:
        keys = leaf.info.keys
        return next(part for part in self._parts.tree_parts if keys[: len(part.keys)] == part.keys)

    def _by_part(self, leaves: Sequence[Leaf]) -> Iterator[tuple[TreePart, Sequence[Leaf]]]:
        if self.only_folder is not None:
            yield self._parts.tree_parts[0], leaves
            return

        found: dict[str, list[Leaf]] = {part.directory: [] for part in self._parts.tree_parts}
        for leaf in leaves if found else ():  # without trees, the one tree is an empty dict
            part = self._part(leaf)
            found[part.directory].append(replace(leaf, info=_within(part, leaf.info)))

        for part in self._parts.tree_parts:
            yield part, found[part.directory]

    def _with_about(
        self, trees: Iterable[Document], about: Document, beside: Sequence[Document]
    ) -> Iterator[Document]:
        """Append the documents of the other items and of the checkpoint to those of the trees.

        The checkpoint has its own record, of all documents but those that a tree's own record has.
        """
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
        yield Document(COMMIT_MARK, encode_mark(record, self._origin.mark))


def _within(part: TreePart, info: ParamInfo) -> ParamInfo:
    """The place of a leaf in its item. Its `key_path` stays whole, for messages."""
    n = len(part.keys)
    if not n:
        return info

    return replace(info, keys=info.keys[n:], kinds=info.kinds[n:], nodes=info.nodes[n:])


def _below(directory: str, documents: Iterable[Document]) -> Iterator[Document]:
    """Yield the documents of an item, named from the checkpoint."""
    for document in documents:
        yield replace(document, path=f"{directory}/{document.path}")
        del document  # while the next one is made


@final
@dataclass(frozen=True, slots=True)
class WrittenInItem:
    """The part of a message that is about an item."""

    written: WrittenTable


def written_in(directory: str, batches: Sequence[WrittenLeaves]) -> list[WrittenLeaves]:
    """Return the files of an item's directory, by names relative to it."""
    return [WrittenInItem(_below_prefix(f"{directory}/", batch.written)) for batch in batches]


def _below_prefix(prefix: str, table: WrittenTable) -> WrittenTable:
    is_here = [file.startswith(prefix) for file in table.files]
    files = [file.removeprefix(prefix) for file in table.files]
    if all(is_here):
        return replace(table, files=files)

    columns = {name: np.asarray(getattr(table, name)) for name in COLUMNS}
    rows = np.flatnonzero(np.array(is_here, np.bool_)[columns["file"]])
    sums = np.frombuffer(table.running, "<u4")
    running = running_of(sums, columns["nbytes"], columns["block_bytes"], rows).tobytes()
    return replace(
        table, files=files, running=running, **{name: column[rows] for name, column in columns.items()}
    )


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
        """Say where the bytes of some leaves are; see `StoredCheckpoint.parts`."""
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
