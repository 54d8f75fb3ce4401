"""The default pipelines of a save and of a restore, and how options change them."""

from __future__ import annotations

__all__ = (
    "First",
    "configured_pipeline",
    "fitting_pipeline",
    "prioritised",
    "restore_pipeline",
    "save_pipeline",
)

from penstock.checkpointer.pipelines import (
    configured_pipeline,
    fitting_pipeline,
    prioritised,
    restore_pipeline,
    save_pipeline,
)
from penstock.kernel.protocols.leaf import LeafPredicate

First = LeafPredicate
"""The type of `prioritise=`: True for the stored key path of a leaf that comes first."""
