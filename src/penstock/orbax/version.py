"""The version of Orbax whose API this is, for code that compares it."""

from __future__ import annotations

__all__ = ("__version__",)

from typing import Final

__version__: Final = "0.12.8"
