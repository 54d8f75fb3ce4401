"""The result of a verification."""

from __future__ import annotations

__all__ = ("Status", "VerifyReport")

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, final

from penstock.handlers.formats.verification import Finding

Status: TypeAlias = Literal["intact", "damaged", "unreadable", "absent", "unchecked"]
"""`"intact"`: all of it was compared, and is as it was written. `"damaged"`: something is not. Else, in this
order: the medium refused to read something; there is no checkpoint; something could not be compared."""

_WORST_FIRST: Final[tuple[Status, ...]] = ("damaged", "unreadable", "absent", "unchecked")


@final
@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of comparing all that lies under a path with the checksums that were recorded of it."""

    path: str
    checkpoints: tuple[str, ...]  #: paths of all finished checkpoints there, steps among them
    n_leaves: int  #: in all items of all checkpoints
    n_ranges: int  #: whose checksum was compared
    n_documents: int  #: whose digest was compared
    nbytes: int  #: in those ranges and documents
    findings: tuple[Finding, ...] = field(default=(), repr=False)
    """What is not as it was written, or cannot be compared; by file and offset."""
    leftovers: tuple[str, ...] = ()
    """Paths that an interrupted save or deletion left there. They belong to no checkpoint."""

    @property
    def status(self) -> Status:
        """The worst of the findings; see `Status`."""
        kinds = {finding.kind for finding in self.findings}
        for status in _WORST_FIRST:
            if status in kinds:
                return status

        return "intact"

    @property
    def intact(self) -> bool:
        """True if everything was compared, and everything is as it was written."""
        return self.status == "intact"

    @property
    def damages(self) -> tuple[Finding, ...]:
        """The ranges that are not as they were written."""
        return self._of("damaged")

    @property
    def unreadable(self) -> tuple[Finding, ...]:
        """The ranges that the medium refused to read, so that nothing is known about them."""
        return self._of("unreadable")

    @property
    def unchecked(self) -> tuple[Finding, ...]:
        """The ranges that could be read and have no checksum to compare with."""
        return self._of("unchecked")

    @property
    def damaged_leaves(self) -> tuple[str, ...]:
        """Key paths of the damaged leaves, each once."""
        return tuple(dict.fromkeys([name for damage in self.damages for name in damage.key_paths]))

    def _of(self, kind: str) -> tuple[Finding, ...]:
        return tuple([finding for finding in self.findings if finding.kind == kind])
