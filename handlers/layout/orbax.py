"""The flat Orbax layout, behind the kernel's `Layout` protocol."""

from __future__ import annotations

__all__ = ("OrbaxLayout",)

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from penstock.handlers.layout.items import OPENERS
from penstock.handlers.layout.locate import locate
from penstock.handlers.layout.names import DATA_FOLDER, MARKS, TEMPORARY_SUFFIX
from penstock.handlers.layout.stored import OrbaxCheckpoint
from penstock.handlers.layout.writing import check_names, flat_documents
from penstock.kernel.errors import PathError
from penstock.kernel.messages import Document, Leaf, Written
from penstock.kernel.protocols import Store


@final
class OrbaxLayout:
    """Writes what any Orbax since 0.11 reads, and reads what Orbax writes. Holds no state.

    Written is the flat layout: OCDBT, zarr v2, no compression, one manifest. Read are also items of
    a step and of the latest step in a directory of steps, zarr v3, codecs, arrays in directories of
    their own, and what early Orbax kept in a msgpack file.
    """

    __slots__ = ()

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
        written: Sequence[Written],
        *,
        started_ns: int,
        custom_metadata: Mapping[str, Any] | None,
    ) -> Iterable[Document]:
        """Make every document; see `flat_documents` for what it raises."""
        return flat_documents(leaves, written, started_ns=started_ns, custom_metadata=custom_metadata)

    def recognises(self, store: Store, path: str) -> bool:
        """Look for any file that a checkpoint of any version has, finished or not."""
        names = set(store.list_directory(path))
        return not names or bool(names & MARKS)

    def open(self, store: Store, path: str, item: str | None = None) -> OrbaxCheckpoint:
        """Find a checkpoint or an item of one, and read its documents.

        See `locate` for what `path` and `item` may be. The result's path is that of the checkpoint
        found: a step, if `path` is a directory of steps.

        Raises:
            NotACheckpointError: If nothing of this layout lies there, or no such item.
            IncompleteCheckpointError: If a save was interrupted there.
            UnsupportedFormatError: If it is of a kind that penstock recognises and does not read.
            TruncatedDataError: If a data file is shorter than the index says.
            CorruptCheckpointError: If a document is damaged or missing; the message names it.
        """
        place = locate(store, path, item)
        return OPENERS[place.form](store, place)
