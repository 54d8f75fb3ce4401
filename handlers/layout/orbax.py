"""The flat Orbax layout, behind the kernel's `Layout` protocol."""

from __future__ import annotations

__all__ = ("OrbaxLayout",)

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, final

from penstock.handlers.layout.names import DATA_FOLDER, MARKS, TEMPORARY_SUFFIX
from penstock.handlers.layout.opening import open_checkpoint
from penstock.handlers.layout.remembered import RememberedDocuments
from penstock.handlers.layout.stored import OrbaxCheckpoint
from penstock.handlers.layout.writing import EncodedTrees, check_names
from penstock.kernel.errors import PathError
from penstock.kernel.messages import Document, Leaf, WrittenBatch
from penstock.kernel.protocols import Store


@final
class OrbaxLayout:
    """Writes what any Orbax since 0.11 reads, and reads what Orbax writes. Thread-safe.

    The trees that were written last are remembered, as far as their documents say the same each time;
    and so are the documents that were read last.

    Written is the flat layout: OCDBT, zarr v2, no compression, one manifest. Read are also items of
    a step and of the latest step in a directory of steps, zarr v3, codecs, arrays in directories of
    their own, and what early Orbax kept in a msgpack file.
    """

    __slots__ = ("_remembered", "_trees")

    def __init__(self) -> None:
        self._remembered = RememberedDocuments()
        self._trees = EncodedTrees()

    def temporary_name(self, path: str) -> str:
        """The name of the same folder while it is being written.

        Raises:
            PathError: If `path` itself is named as an interrupted save is: nobody could read it.
        """
        if TEMPORARY_SUFFIX in os.path.basename(path):
            raise PathError(path, f"has {TEMPORARY_SUFFIX!r} in its name, which marks an interrupted save")

        return path + TEMPORARY_SUFFIX

    def data_file(self) -> str:
        return f"{DATA_FOLDER}/{uuid.uuid4().hex}"

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Look at names alone; see `check_names` for what it raises."""
        check_names(leaves)

    def documents(
        self,
        leaves: Sequence[Leaf],
        batches: Sequence[WrittenBatch],
        *,
        started_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        digests: Mapping[str, bytes] | None = None,
    ) -> Iterable[Document]:
        """Make every document; see `EncodedTree` for what it raises."""
        tree = self._trees.of(sorted(leaves, key=attrgetter("index")))
        return tree.documents(
            batches, started_ns=started_ns, custom_metadata=custom_metadata, digests=digests or {}
        )

    def recognises(self, store: Store, path: str) -> bool:
        """Look for any file that a checkpoint of any version has, finished or not."""
        names = set(store.list_directory(path))
        return not names or bool(names & MARKS)

    def open(self, store: Store, path: str, item: str | None = None) -> OrbaxCheckpoint:
        """Read the documents of a checkpoint or of an item of it; see `open_checkpoint`."""
        return open_checkpoint(store, path, item, remembered=self._remembered)
