"""What a save has to know if the processes of a job save together."""

from __future__ import annotations

__all__ = ("BaseLinks", "JointPlan")

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BaseLinks:
    """Files of the base that this process links into the new checkpoint."""

    directory: str  #: that their names are relative to
    files: Sequence[str]
    identity: object  #: the `Store.identity` of the base when they were found


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class JointPlan:
    """Who writes what, as this process sees it, and what must be the same in all."""

    shares: Sequence[int]  #: array bytes of every leaf that this process writes, in flatten order
    digest: bytes  #: of all leaves and options, and of the bytes of leaves that each process holds whole
    describe: Callable[[], Sequence[str]] = field(repr=False)
    """Returns the same in words: for each leaf its key path, a tab, and what it is."""
    links: BaseLinks | None = None
