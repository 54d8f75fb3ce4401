"""What becomes of a leaf and of its parts when a stage changes its dtype or its shape. Pure."""

from __future__ import annotations

__all__ = ("LeafChange", "SpecChange", "place_of", "resolved_spec")

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.kernel.errors import ChangedLeafError, PipelineError
from penstock.kernel.protocols.leaf import LeafSpec

SpecChange: TypeAlias = Callable[[LeafSpec], LeafSpec]
"""What a stage makes of a leaf's spec. Pure: called for planning, before there is a byte of the leaf."""


@dataclass(frozen=True, slots=True)
class LeafChange:
    """What stages declare that they do to a leaf."""

    stages: tuple[str, ...]  #: those that change it, in order
    before: LeafSpec


def resolved_spec(spec: LeafSpec, change: SpecChange) -> LeafSpec:
    """Return what `change` makes of a leaf; the same object if that is nothing.

    A leaf without array bytes stays as it is: there is nothing of it that a stage sees.
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
    """Say where a part of a leaf lies once the leaf has become another.

    Args:
        before: The leaf as it was.
        after: As it is now.
        chunk: Grid index of the part's chunk.
        start: Bytes from the start of the chunk.
        nbytes: Length of the part.
        key_path: Of the leaf.

    Returns:
        The same of the changed leaf: chunk, start and length.

    Raises:
        ChangedLeafError: If the leaf gets a codec and the part is no whole chunk; or if the shape or the
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
