"""The module `version` of Orbax's API."""

from __future__ import annotations

__all__ = ("__version__", "get_details")

from typing import Final

__version__: Final = "0.12.8"
"""The version of Orbax whose API this is, for code that compares it."""


def get_details() -> str:
    """Say the version of Orbax whose API this is."""
    return f"orbax-checkpoint version: {__version__}"
