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
    First,
    configured_pipeline,
    fitting_pipeline,
    prioritised,
    restore_pipeline,
    save_pipeline,
)
