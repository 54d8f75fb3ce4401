"""Orbax's format: whole checkpoints, or trees in directories made by others (`OrbaxLayout`).

A checkpoint is a directory with documents in JSON, the arrays in an OCDBT database
(`penstock.handlers.ocdbt`) or in a directory each, and files that mark it as finished. Trees may also be
items in it, and steps of a run.

A save asks `storage_choice` how each leaf is stored, and `orbax_layout` for all documents and for the index
of chunks (`chunk_index`). A restore asks `discovery` for the tree, the item or the latest step below a path;
`open_checkpoint` reads its documents into a table of leaves (`tree_documents`); the `OrbaxCheckpoint` that it
returns plans reads (`stored_checkpoint`). The documents are in `tree_metadata` and `checkpoint_documents`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "CHECKPOINT_METADATA",
    "COMMIT_MARK",
    "INTEGRITY",
    "TEMPORARY_SUFFIX",
    "digest_in_mark",
    "survey_item",
)

if TYPE_CHECKING:
    from penstock.handlers.formats.orbax.checkpoint_documents import digest_in_mark
    from penstock.handlers.formats.orbax.file_names import (
        CHECKPOINT_METADATA,
        COMMIT_MARK,
        INTEGRITY,
        TEMPORARY_SUFFIX,
    )
    from penstock.handlers.formats.orbax.item_survey import survey_item
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.handlers.formats.orbax.file_names": (
                "CHECKPOINT_METADATA",
                "COMMIT_MARK",
                "INTEGRITY",
                "TEMPORARY_SUFFIX",
            ),
            "penstock.handlers.formats.orbax.item_survey": ("survey_item",),
            "penstock.handlers.formats.orbax.checkpoint_documents": ("digest_in_mark",),
        },
    )
