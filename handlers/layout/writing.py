"""Every document of a new flat checkpoint, in the order in which they must become durable.

Source:
    ORBAX_FORMAT.md §3.1 (flat layout) and §8 (what Orbax must find).
"""

from __future__ import annotations

__all__ = ("check_names", "flat_documents")

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.handlers.layout import (
    array_metadatas,
    checkpoint_metadata,
    integrity,
    metadata,
    sharding,
    strings,
)
from penstock.handlers.layout.index import chunk_entries, metadata_entries
from penstock.handlers.layout.names import (
    ARRAY_METADATAS,
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    DATA_FOLDER,
    INTEGRITY,
    MANIFEST,
    METADATA,
    SHARDING,
    STRINGS,
)
from penstock.handlers.ocdbt.writer import encode_index
from penstock.kernel.errors import DuplicateNameError
from penstock.kernel.messages import Document, Leaf, Written


def flat_documents(
    leaves: Sequence[Leaf],
    written: Sequence[Written],
    *,
    started_ns: int,
    custom_metadata: Mapping[str, Any] | None,
) -> list[Document]:
    """Make the documents of a flat checkpoint.

    Args:
        leaves: All of them, empty markers among them; in any order.
        written: Where every piece of every array lies.
        started_ns: When the save began, in nanoseconds since the epoch.
        custom_metadata: The caller's own; JSON.

    Raises:
        DuplicateNameError: If two leaves have one stored name.
        InvalidLeafError: If a string has a name under which Orbax could not find it.
        SpecError: If `custom_metadata` is not JSON.
        PenstockError: If the pieces of a chunk do not tile it.
    """
    ordered = sorted(leaves, key=lambda leaf: leaf.index)
    check_names(ordered)
    committed_ns = time.time_ns()
    about = checkpoint_metadata.encode(
        started_ns=started_ns, committed_ns=committed_ns, custom_metadata=custom_metadata
    )
    return [
        *_index(ordered, written, committed_ns),
        *_tree(ordered),
        Document(CHECKPOINT_METADATA, about),
        Document(INTEGRITY, integrity.encode(written)),
        Document(COMMIT_MARK, b"Checkpoint commit was successful"),
    ]


def _tree(leaves: Sequence[Leaf]) -> list[Document]:
    """Encode what is recorded of the leaves, beside where they lie."""
    documents = [Document(METADATA, metadata.encode(leaves))]
    arrays = [leaf for leaf in leaves if leaf.spec.typestr == "jax.Array" and leaf.spec.shape is not None]
    shardings = [(leaf.info.name, leaf.spec.sharding) for leaf in arrays if leaf.spec.sharding is not None]
    if arrays and len(shardings) == len(arrays):
        documents.append(Document(SHARDING, sharding.encode(shardings)))
    if arrays:
        documents.append(Document(f"{ARRAY_METADATAS}/process_0", array_metadatas.encode(arrays)))

    texts = [leaf for leaf in leaves if leaf.spec.text is not None]
    if texts:
        documents.append(Document(STRINGS, strings.encode(texts)))

    return documents


def _index(leaves: Sequence[Leaf], written: Sequence[Written], committed_ns: int) -> list[Document]:
    """Encode the OCDBT index; there is none without arrays."""
    arrays = [leaf for leaf in leaves if leaf.spec.shape is not None]
    node_file = f"{DATA_FOLDER}/{uuid.uuid4().hex}"
    spill = bytearray()
    entries = [*metadata_entries(arrays, node_file, spill), *chunk_entries(arrays, written)]
    if not entries:
        return []

    index = encode_index(
        entries,
        node_file=node_file,
        node_offset=len(spill),
        uuid=uuid.uuid4().bytes,
        commit_time_ns=committed_ns,
    )
    return [Document(node_file, bytes(spill) + index.nodes), Document(MANIFEST, index.manifest)]


def check_names(leaves: Sequence[Leaf]) -> None:
    """Refuse two values under one name, and strings that could not be found under theirs.

    Empty markers are stored under no name.

    Raises:
        DuplicateNameError: If two leaves have one stored name.
        InvalidLeafError: If a string has a name under which Orbax could not find it.
    """
    by_name: dict[str, Leaf] = {}
    for leaf in leaves:
        if not leaf.spec.is_empty_marker:
            first = by_name.setdefault(leaf.info.name, leaf)
            if first is not leaf:
                raise DuplicateNameError(leaf.info.name, first.info.key_path, leaf.info.key_path)

    strings.encode(leaf for leaf in leaves if leaf.spec.text is not None)
