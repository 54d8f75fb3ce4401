"""What a handler sees of a message: the leaf itself, and not who else works on it."""

from __future__ import annotations

__all__ = ("FilledLeaf", "FilledPack", "StagedLeaf")

from collections.abc import Sequence
from typing import Any, Protocol

from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.protocols.reads import Target


class StagedLeaf(Protocol):
    """A leaf that is being saved."""

    @property
    def index(self) -> int:
        """Its place in flatten order."""
        ...

    @property
    def info(self) -> ParamInfo: ...
    @property
    def value(self) -> object: ...
    @property
    def spec(self) -> LeafSpec: ...


class FilledLeaf(Protocol):
    """A leaf that is being restored; the regions of its target are filled when a value is to be built."""

    @property
    def index(self) -> int:
        """Its place in the result's flatten order; of a part, a negative number of its own."""
        ...

    @property
    def info(self) -> ParamInfo: ...
    @property
    def stored(self) -> StoredLeaf: ...
    @property
    def target(self) -> Target: ...


class FilledPack(Protocol):
    """Small leaves whose bytes lie in one buffer; columns of one length."""

    @property
    def specs(self) -> Sequence[LeafSpec]: ...
    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each leaf."""
        ...

    @property
    def details(self) -> Sequence[Any]:
        """What the handler's `pack_details` returned for each leaf."""
        ...

    @property
    def data(self) -> memoryview:
        """The bytes of all leaves; gone once the values are built."""
        ...

    @property
    def starts(self) -> Sequence[int]:
        """Where the bytes of each leaf begin in `data`."""
        ...
