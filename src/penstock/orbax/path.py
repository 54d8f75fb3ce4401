"""The module `path` of Orbax's API: how steps are named, and how they become visible."""

from __future__ import annotations

__all__ = ("atomicity", "atomicity_defaults", "atomicity_types", "step")

from penstock.orbax import options as atomicity
from penstock.orbax import step

atomicity_defaults = atomicity_types = atomicity
