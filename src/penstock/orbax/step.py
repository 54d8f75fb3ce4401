"""How the directories of steps are named, and found, under Orbax's names."""

from __future__ import annotations

__all__ = (
    "Metadata",
    "NameFormat",
    "as_name_format",
    "composite_name_format",
    "standard_name_format",
    "step_from_checkpoint_name",
)

from penstock.orbax.v0.manager.step_name_formats import (
    Metadata,
    NameFormat,
    as_name_format,
    composite_name_format,
    standard_name_format,
)
from penstock.orbax.v0.manager.step_paths import step_from_checkpoint_name
