"""What the local store knows of a save that is being built, or was published."""

from __future__ import annotations

__all__ = ("Build",)

from dataclasses import dataclass
from typing import final


@final
@dataclass(slots=True)
class Build:
    """What became of one save's build: the claim in its `BuildToken`."""

    is_published: bool = False
    replaced: str = ""  #: where what the save replaced lies; empty if it is removed, or nothing was replaced
