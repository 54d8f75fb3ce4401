"""The layout of a tree in a directory that its caller makes and publishes: an item, not a checkpoint."""

from __future__ import annotations

__all__ = ("TreeLayout",)

import copy
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

from penstock.handlers.formats.orbax.encoded_tree import EncodedTree, EncodedTrees, check_names
from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout
from penstock.handlers.formats.orbax.storage_choice import CODED_CHUNK, split_among_replicas
from penstock.handlers.formats.orbax.stored_checkpoint import OrbaxCheckpoint
from penstock.handlers.formats.orbax.tree_columns import TreeColumns
from penstock.kernel.config.save_format import SaveArgs, SaveFormat
from penstock.kernel.protocols.layouts import Opening
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.views import StagedLeaf, WrittenLeaves
from penstock.kernel.protocols.written import Document

CUSTOM: Final = "custom_metadata"
"""The one member of the custom metadata of a save; its value, any JSON, is kept with the tree."""


@final
class TreeLayout:
    """Writes a tree into a directory that exists, without a commit mark. Thread-safe.

    Args:
        form: How arrays are written.
        coded_chunk: Bytes of a chunk with a codec, about.
        single: Whether the tree is one array, under a name that is otherwise reserved by Orbax.
    """

    __slots__ = ("_foreign", "_form", "_layout", "_single", "_trees")

    def __init__(
        self, form: SaveFormat | None = None, coded_chunk: int = CODED_CHUNK, *, single: bool = False
    ) -> None:
        self._form = SaveFormat() if form is None else form
        self._layout = OrbaxLayout(self._form, coded_chunk)
        self._trees = EncodedTrees(form=self._form)
        self._single = single
        self._foreign = frozenset[str]()

    def with_foreign(self, typestrs: frozenset[str]) -> TreeLayout:
        """Return this layout for trees in which a handler may keep leaves of these types in its own files."""
        other = copy.copy(self)
        other._foreign = typestrs
        return other

    def temporary_name(self, path: str) -> str:
        """The path itself: the tree is built in place."""
        return path

    def data_file(self) -> str:
        return self._layout.data_file()

    def process_folder(self, process_index: int) -> str:
        """See `OrbaxLayout.process_folder`."""
        return self._layout.process_folder(process_index)

    @property
    def single(self) -> bool:
        """Whether the tree is one array."""
        return self._single

    @property
    def save_format(self) -> SaveFormat:
        """How arrays are written."""
        return self._form

    def chunk_file(self, leaf: StagedLeaf, chunk: tuple[int, ...]) -> str | None:
        return self._layout.chunk_file(leaf, chunk)

    def fit(self, spec: LeafSpec, info: ParamInfo, args: SaveArgs | None) -> LeafSpec:
        if not self._form.replica_parallel:  # then the inner layout gives each replica its part
            spec = split_among_replicas(spec)

        return self._layout.fit(spec, info, args)

    def encode(self, codec: str, chunks: Sequence[memoryview], itemsize: int) -> Sequence[bytes]:
        return self._layout.encode(codec, chunks, itemsize)

    def check(self, leaves: Sequence[StagedLeaf]) -> None:
        """Check only the names; see `check_names` for the errors."""
        check_names(TreeColumns.of(leaves), self._form, single=self._single)

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
        """Make the documents of the tree; see `EncodedTree` for what it raises."""
        columns = TreeColumns.of(leaves)
        if custom_metadata is None:
            tree = self._trees.of(columns)
        else:
            tree = EncodedTree(columns, self._form, custom_metadata[CUSTOM])

        return tree.item_documents(batches, time.time_ns(), digests or {}, beside)

    def recognises(self, store: Store, path: str) -> bool:
        """True: the caller made the directory and allows it."""
        return True

    def find(self, store: Store, path: str, item: str | None = None) -> Opening:
        return self._layout.find(store, path, item, foreign=self._foreign)

    def open(self, store: Store, path: str, item: str | None = None) -> OrbaxCheckpoint:
        return self._layout.open(store, path, item, foreign=self._foreign)
