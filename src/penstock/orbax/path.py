"""Where Orbax has the module that names the directories of steps."""

from __future__ import annotations

__all__ = ("step",)

from penstock.orbax import step
