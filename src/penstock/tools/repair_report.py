"""The result of a repair: what became of each leaf of a damaged checkpoint."""

from __future__ import annotations

__all__ = ("Outcome", "RepairReport", "RepairedLeaf")

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final

Outcome: TypeAlias = Literal["kept", "unchecked", "taken", "rebuilt", "gone"]
"""`"kept"`: intact in the damaged checkpoint. `"unchecked"`: kept, but no checksum says that it is intact.
`"taken"`: damaged, and found intact in another checkpoint. `"rebuilt"`: a document that was made again from
what it is about, with nothing lost. `"gone"`: in none of them."""


@final
@dataclass(frozen=True, slots=True)
class RepairedLeaf:
    """The fate of a leaf, or of an item or document that is lost as a whole."""

    outcome: Outcome
    key_path: str  #: within its item; empty if it is a whole item, or a document
    item: str = ""  #: empty if the checkpoint is one tree
    problem: str = ""  #: what is damaged
    taken_from: str = ""  #: the path of the other checkpoint

    @property
    def name(self) -> str:
        """The item and the key path, for people."""
        return " ".join([part for part in (self.item, self.key_path) if part]) or "(all of it)"


@final
@dataclass(frozen=True, slots=True)
class RepairReport:
    """The report of a repair: what it wrote, and what is gone."""

    source: str
    path: str  #: the new checkpoint
    nbytes: int  #: array bytes written
    leaves: tuple[RepairedLeaf, ...] = field(repr=False)  #: in stored order; what is lost as a whole, too
    format: Literal["orbax", "safetensors"] = "orbax"  #: of both

    @property
    def gone(self) -> tuple[RepairedLeaf, ...]:
        """The leaves that are in no checkpoint that was looked at."""
        return self._of("gone")

    @property
    def taken(self) -> tuple[RepairedLeaf, ...]:
        """Leaves that were damaged, and were copied from another checkpoint."""
        return self._of("taken")

    @property
    def rebuilt(self) -> tuple[RepairedLeaf, ...]:
        """Documents that were damaged, and were made again."""
        return self._of("rebuilt")

    @property
    def unchecked(self) -> tuple[RepairedLeaf, ...]:
        """Leaves that were kept although no checksum says that they are intact."""
        return self._of("unchecked")

    @property
    def complete(self) -> bool:
        """True if nothing is gone, and every leaf is known to be as it was written."""
        return not self.gone and not self.unchecked

    def _of(self, outcome: Outcome) -> tuple[RepairedLeaf, ...]:
        return tuple([leaf for leaf in self.leaves if leaf.outcome == outcome])
