"""The plan of a save that the processes of a job make together."""

from __future__ import annotations

__all__ = ("ArrangedPart", "Ballot", "BaseLinks", "JointPlan")

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from penstock.kernel.protocols.layouts import ArrangedDigests, Arrangement


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BaseLinks:
    """Files of the base that this process links into the new checkpoint."""

    directory: str  #: that their names are relative to
    files: Sequence[str]
    identity: object  #: the `Store.identity` of the base when they were found


@final
@dataclass(frozen=True, slots=True, eq=False)
class ArrangedPart:
    """The part that this process wrote of files that all processes write together."""

    arrangement: Arrangement
    digests: ArrangedDigests


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ballot:
    """This process' vote on leaves whose codec all processes choose together."""

    places: Sequence[int]  #: of those leaves, in flatten order
    votes: bytes  #: one for each
    codecs: Sequence[str]  #: what a leaf may be encoded with, in the order of the votes


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class JointPlan:
    """The division of a save among processes, as this one sees it, and what must be the same in all."""

    shares: Sequence[int]  #: array bytes of every leaf that this process writes, in flatten order
    digest: bytes  #: of all leaves and options, and of the bytes of leaves that each process holds whole
    held_whole: Mapping[str, bytes]  #: digests of the leaves that each process holds whole, by stored name
    options: Mapping[str, object]  #: what else must be the same
    links: BaseLinks | None = None
    ballot: Ballot | None = None
    handled: frozenset[int] = frozenset()  #: leaves that handlers of this process write
