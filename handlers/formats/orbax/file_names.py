"""The names of what is in a checkpoint directory.

Source:
    ORBAX_FORMAT.md §1 and §3.
"""

from __future__ import annotations

__all__ = (
    "ARRAY_METADATAS",
    "CHECKPOINT_METADATA",
    "COMMIT_MARK",
    "COMMIT_MARK_TEXT",
    "DATA_FOLDER",
    "DELETION",
    "ENCODED",
    "INTEGRITY",
    "LEGACY_MSGPACK",
    "MANIFEST",
    "MARKS",
    "METADATA",
    "OF_A_PROCESS",
    "PARTIAL_SUFFIX",
    "REPORTS",
    "ROOT_METADATA",
    "SHARDING",
    "STRINGS",
    "TEMPORARY_SUFFIX",
    "V1_MARK",
    "unfinished_at",
)

import os
from typing import Final

from penstock.handlers.stores.publishing.paths import TEMPORARY_SUFFIX
from penstock.kernel.errors import IncompleteCheckpointError
from penstock.kernel.protocols.stores import Store, is_at_work

METADATA: Final = "_METADATA"
SHARDING: Final = "_sharding"
STRINGS: Final = "_strings.json"
ARRAY_METADATAS: Final = "array_metadatas"
CHECKPOINT_METADATA: Final = "_CHECKPOINT_METADATA"
INTEGRITY: Final = "_PENSTOCK_INTEGRITY"
MANIFEST: Final = "manifest.ocdbt"
DATA_FOLDER: Final = "d"
OF_A_PROCESS: Final = "ocdbt.process_"
"""Begins the name of the database of one process, from before all of them are merged."""
COMMIT_MARK: Final = "commit_success.txt"
DELETION: Final = "_CHECKPOINT_DELETION"
COMMIT_MARK_TEXT: Final = b"Checkpoint commit was successful"
ROOT_METADATA: Final = "_ROOT_METADATA"
"""In the folder `metadata` of a directory of steps."""
REPORTS: Final = "_PENSTOCK_REPORTS.json"
"""In a directory of steps: what its saves and restores did. No reader of checkpoints takes notice of it."""
TIER: Final = "_PENSTOCK_TIER.json"
"""In each directory of a run with tiers, the root included: which directories these are. As `REPORTS`."""
ENCODED: Final = "_PENSTOCK_ENCODED"
"""The beginning of a name in a tier of several processes, while they bring a step to a level with a codec.

There each has what it has encoded.
"""
BESIDE_STEPS: Final = frozenset({REPORTS, TIER})
"""Files that make no checkpoint of a directory, though they end as documents do."""
V1_MARK: Final = "orbax.checkpoint"
LEGACY_MSGPACK: Final = "checkpoint"

MARKS: Final = frozenset({METADATA, CHECKPOINT_METADATA, MANIFEST, COMMIT_MARK, V1_MARK, LEGACY_MSGPACK})
"""Any of these shows that a directory is a checkpoint, or holds one."""


PARTIAL_SUFFIX: Final = ".partial_save"
"""In the name of the directory in which Orbax's v1 API gathers a partial save until it is finalized."""


def unfinished_at(store: Store, path: str, built: str) -> IncompleteCheckpointError:
    """Return the error for a path where there is only an unfinished save. Blocking."""
    if is_at_work(store, built):
        problem = f"its save goes on, in {built!r}; try again when that has ended"
        return IncompleteCheckpointError(path, problem, goes_on=True)
    if built == path:
        return IncompleteCheckpointError(path, "a save was interrupted here; its name says so")

    return IncompleteCheckpointError(
        path, f"a save was interrupted: there is only {os.path.basename(built)!r}"
    )
