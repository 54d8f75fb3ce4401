"""The module `path` of Orbax's API, which has the module `step`."""

from __future__ import annotations

__all__ = ("step",)

from penstock.orbax import step
