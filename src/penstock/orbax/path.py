"""Where Orbax keeps what names the directories of steps."""

from __future__ import annotations

__all__ = ("step",)

from penstock.orbax import step
