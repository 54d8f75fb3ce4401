"""Writing and reading the files of one tree, in a directory that is a part of a checkpoint."""

from __future__ import annotations

__all__ = ("StoredTree", "TreeLayout", "read_tree", "save_format_of")

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from penstock.handlers.layout.names import CHECKPOINT_METADATA, COMMIT_MARK, METADATA
from penstock.handlers.layout.orbax import OrbaxLayout
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.errors import NotACheckpointError
from penstock.kernel.messages import Document, KeyPath, Leaf, LeafSpec, ParamInfo, WrittenBatch
from penstock.kernel.protocols import Store, StoredCheckpoint
from penstock.kernel.save_format import SaveArgs, SaveFormat
from penstock.orbax.v1.array_options import ArrayOptions


@final
class TreeLayout:
    """`OrbaxLayout` without the documents of a whole checkpoint, which belong above the items.

    Args:
        form: How arrays are written.
    """

    __slots__ = ("_layout",)

    def __init__(self, form: SaveFormat) -> None:
        self._layout = OrbaxLayout(form)

    @property
    def save_format(self) -> SaveFormat:
        return self._layout.save_format

    def temporary_name(self, path: str) -> str:
        return path  # which somebody else made, and publishes or discards

    def data_file(self) -> str:
        return self._layout.data_file()

    def chunk_file(self, leaf: Leaf, chunk: tuple[int, ...]) -> str | None:
        return self._layout.chunk_file(leaf, chunk)

    def fit(self, spec: LeafSpec, info: ParamInfo, args: SaveArgs | None) -> LeafSpec:
        return self._layout.fit(spec, info, args)

    def encode(self, codec: str, chunks: Sequence[memoryview]) -> Sequence[bytes]:
        return self._layout.encode(codec, chunks)

    def check(self, leaves: Sequence[Leaf]) -> None:
        self._layout.check(leaves)

    def documents(
        self,
        leaves: Sequence[Leaf],
        batches: Sequence[WrittenBatch],
        *,
        started_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        digests: Mapping[str, bytes] | None = None,
    ) -> Iterable[Document]:
        made = self._layout.documents(
            leaves, batches, started_ns=started_ns, custom_metadata=custom_metadata, digests=digests
        )
        return [one for one in made if one.path not in {CHECKPOINT_METADATA, COMMIT_MARK}]

    def recognises(self, store: Store, path: str) -> bool:
        return self._layout.recognises(store, path)

    def open(self, store: Store, path: str, item: str | None = None) -> StoredCheckpoint:
        return self._layout.open(store, path, item)


@final
@dataclass(frozen=True, slots=True)
class StoredTree:
    """What is recorded of each leaf of a tree, in order."""

    keys: Sequence[KeyPath]
    kinds: Sequence[tuple[Any, ...]]
    specs: Sequence[LeafSpec]


def read_tree(directory: str) -> StoredTree:
    """Read the documents of the tree in a directory. Blocking.

    Raises:
        NotACheckpointError: If there is none. It is a FileNotFoundError.
        CorruptCheckpointError: If it is damaged.
    """
    if not os.path.exists(os.path.join(directory, METADATA)):
        raise NotACheckpointError(directory, f"holds no tree: it has no {METADATA}")

    leaves = OrbaxLayout().open(LocalStore(), directory).leaves
    return StoredTree(leaves.keys, leaves.kinds, leaves.specs)


def save_format_of(saving: ArrayOptions.Saving) -> SaveFormat:
    """Return penstock's words for the options of a whole tree."""
    return SaveFormat(
        ocdbt=saving.use_ocdbt,
        zarr=3 if saving.use_zarr3 else 2,
        codec="auto" if saving.use_compression else "none",
        ocdbt_target_data_file_size=saving.ocdbt_target_data_file_size if saving.use_ocdbt else None,
    )
