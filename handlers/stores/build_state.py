"""A save that is being built or was published, as the local store knows it."""

from __future__ import annotations

__all__ = ("Build",)

from dataclasses import dataclass
from typing import final

from penstock.handlers.stores.directory_lock import Identity


@final
@dataclass(slots=True)
class Build:
    """The state of one save's build: the claim in its `BuildToken`."""

    published: Identity | None = None  #: what was published; None if nothing was yet
    replaced: str = ""  #: where what the save replaced lies; empty if it is removed, or nothing was replaced
    replaced_identity: Identity | None = None  #: what lay there when it had been replaced
