"""Follows a change of dtype, shape or codec by a stage into the leaf's spec and pieces. Pure."""

from __future__ import annotations

__all__ = ("CodecChoice", "LeafChange", "SpecChange", "place_of", "resolved_spec")

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from penstock.kernel.errors import ChangedLeafError, PipelineError
from penstock.kernel.protocols.capability import Capability
from penstock.kernel.protocols.leaf import LeafSpec

SpecChange: TypeAlias = Callable[[LeafSpec], LeafSpec]
"""Maps a leaf's spec to the spec after a stage. Pure: called while planning, before any byte is read."""


@runtime_checkable
class CodecChoice(Capability, Protocol):
    """A stage that decides which leaves with the codec `auto` get one."""

    @property
    def auto_codecs(self) -> Sequence[str]:
        """The codecs among which it chooses, each with all of its options."""
        ...

    def choose(
        self,
        data: memoryview,
        itemsize: int,
        encode: Callable[[str, Sequence[memoryview], int], Sequence[bytes]],
        /,
    ) -> str | None:
        """Return the codec that a leaf with such bytes gets; None for none. Blocking.

        Args:
            data: A part of the leaf: any number of its elements.
            itemsize: Bytes of one element.
            encode: As `FormattedLayout.encode`.
        """
        ...


@dataclass(frozen=True, slots=True)
class LeafChange:
    """The changes that stages declare for a leaf."""

    stages: tuple[str, ...]  #: those that change it, in order
    before: LeafSpec


def resolved_spec(spec: LeafSpec, change: SpecChange) -> LeafSpec:
    """Return the leaf after `change`; the same object if nothing changes.

    A leaf without array bytes is never changed: stages do not see it.
    """
    if spec.shape is None:
        return spec

    changed = change(spec)
    if spec.codec is not None and changed.codec != spec.codec:
        problem = f"a leaf that is encoded with {spec.codec} cannot become one with {changed.codec}"
        raise PipelineError(f"{problem}; change it before it is encoded, or save without a codec")

    return spec if changed == spec else changed


def place_of(
    before: LeafSpec, after: LeafSpec, chunk: tuple[int, ...], start: int, nbytes: int, key_path: str
) -> tuple[tuple[int, ...], int, int]:
    """Return where a part of a leaf is after the leaf has changed.

    Args:
        before: The leaf before the change.
        after: The leaf after the change.
        chunk: Grid index of the part's chunk.
        start: Bytes from the start of the chunk.
        nbytes: Length of the part.
        key_path: Of the leaf.

    Returns:
        Chunk, start and length in the changed leaf.

    Raises:
        ChangedLeafError: If the leaf gets a codec and the part is not a whole chunk, or if its shape or
            chunks change and the part is not the whole leaf.
    """
    if before is after:
        return chunk, start, nbytes
    if before.codec != after.codec and (start or nbytes != before.chunk_nbytes):
        raise ChangedLeafError(key_path, "whole chunks, to be encoded", f"{nbytes} bytes from {start}")
    if (before.shape, before.chunk_shape) == (after.shape, after.chunk_shape):
        size, new_size = before.itemsize, after.itemsize
        return chunk, start // size * new_size, nbytes // size * new_size
    if nbytes != before.nbytes or after.chunk_nbytes != after.nbytes:
        planned = f"{list(before.shape or ())}, in several pieces"
        raise ChangedLeafError(key_path, planned, f"{list(after.shape or ())}, which only a whole leaf can")

    return (0,) * len(after.chunk_shape), 0, after.nbytes
