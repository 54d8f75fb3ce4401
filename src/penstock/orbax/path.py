"""Where Orbax keeps what names the directories of steps."""

from __future__ import annotations

__all__ = ("step",)

from penstock.orbax.v0.manager import step_name_formats as step
