"""The files of one tree, and the format to write them in."""

from __future__ import annotations

__all__ = ("StoredTree", "read_tree", "save_format_of")

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from penstock.handlers.formats.orbax.file_names import METADATA
from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout
from penstock.kernel.config.save_format import SaveFormat
from penstock.kernel.errors import NotACheckpointError
from penstock.kernel.protocols.leaf import KeyPath, LeafSpec
from penstock.kernel.storage.snapshots import snapshot_of
from penstock.orbax.common.handler_paths import store_at
from penstock.orbax.v1.context.array_options import ArrayOptions


@final
@dataclass(frozen=True, slots=True)
class StoredTree:
    """The recorded description of each leaf of a tree, in order."""

    keys: Sequence[KeyPath]
    kinds: Sequence[tuple[Any, ...]]
    specs: Sequence[LeafSpec]
    documents: Sequence[Mapping[str, Any] | None]  #: of arrays in zarr, their metadata


def read_tree(directory: str) -> StoredTree:
    """Read the documents of the tree in a directory. Blocking.

    Raises:
        NotACheckpointError: If there is none. It is a FileNotFoundError.
        CorruptCheckpointError: If it is damaged.
    """
    store = snapshot_of(store_at(directory), directory)
    if store.kind(os.path.join(directory, METADATA)) is None:
        raise NotACheckpointError(directory, f"holds no tree: it has no {METADATA}")

    checkpoint = OrbaxLayout().open(store, directory)
    leaves = checkpoint.leaves
    documents = [checkpoint.zarr_metadata(number) for number in range(len(leaves))]
    return StoredTree(leaves.keys, leaves.kinds, leaves.specs, documents)


def save_format_of(saving: ArrayOptions.Saving, *, jointly: bool = False) -> SaveFormat:
    """Return the save format that the options of a tree describe.

    Args:
        saving: The options.
        jointly: Whether several processes save it together.
    """
    parallel = saving.use_replica_parallel
    least, most = saving.min_slice_bytes_for_replica_parallel, saving.max_replicas_for_replica_parallel
    form = SaveFormat(
        ocdbt=saving.use_ocdbt,
        zarr=3 if saving.use_zarr3 else 2,
        codec="auto" if saving.use_compression else "none",
        ocdbt_target_data_file_size=saving.ocdbt_target_data_file_size if saving.use_ocdbt else None,
    )
    if not jointly:
        return form

    return replace(
        form,
        replica_parallel=parallel is not False,
        replica_parallel_min_bytes=form.replica_parallel_min_bytes if least is None else least,
        replica_parallel_max_replicas=most,
    )
