"""What only some layouts and checkpoints can do: small protocols, looked for where it matters."""

from __future__ import annotations

__all__ = ("ArrangedLayout", "Arrangement", "NamedTensors", "Place")

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from penstock.kernel.messages import Document, LeafSpec, ParamInfo
from penstock.kernel.protocols import StoredCheckpoint


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a whole leaf begin."""

    file: str  #: relative to the checkpoint directory
    offset: int


@dataclass(frozen=True, slots=True)
class Arrangement:
    """All places of a checkpoint whose format wants them decided before anything is written."""

    heads: tuple[Document, ...]  #: what each data file begins with
    places: tuple[Place | None, ...]  #: of each leaf, whole and in C order; None if it has no array bytes
    documents: tuple[Document, ...] = ()  #: what lies beside the data files


@runtime_checkable
class ArrangedLayout(Protocol):
    """What a `Layout` adds whose files begin with where everything lies in them."""

    def arrange(
        self,
        path: str,
        infos: Sequence[ParamInfo],
        specs: Sequence[LeafSpec],
        custom_metadata: Mapping[str, Any] | None,
    ) -> Arrangement:
        """Decide where each leaf of the checkpoint `path` goes. Pure.

        Raises:
            SpecError: If the format cannot hold them.
        """
        ...

    def file_of(self, path: str) -> str | None:
        """The file of the arrangement that alone becomes `path`; None if `path` becomes a directory."""
        ...


@runtime_checkable
class NamedTensors(Protocol):
    """What a `StoredCheckpoint` adds that has names and no structure: its reader says which tree they are."""

    def split(self, separator: str) -> StoredCheckpoint:
        """Return the same leaves as a tree, their names split at `separator`.

        Raises:
            SpecError: If one name is another's beginning.
        """
        ...

    def following(self, wanted: Sequence[tuple[ParamInfo, Any]]) -> StoredCheckpoint:
        """Return the same leaves at the places that a target has for their names.

        Args:
            wanted: The leaves of the target and its empty containers.
        """
        ...
