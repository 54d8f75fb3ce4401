"""The index entries of a new checkpoint: where each chunk of each array came to lie."""

from __future__ import annotations

__all__ = ("chunk_entries", "metadata_entries", "prefix_of")

import itertools
from collections.abc import Iterable, Iterator, Sequence

from penstock.handlers.ocdbt.values import MAX_INLINE_BYTES, Indirect, Inline, Value
from penstock.handlers.zarr import encode_v2
from penstock.kernel.errors import PenstockError
from penstock.kernel.messages import Leaf, Written


def metadata_entries(
    arrays: Iterable[Leaf], node_file: str, spill: bytearray
) -> Iterator[tuple[bytes, Value]]:
    """Yield the `.zarray` of every array.

    Args:
        arrays: The leaves with a shape.
        node_file: Where `spill` will lie, at its beginning.
        spill: Takes the metadata that is too long for the index (of arrays with some sixty axes).
    """
    for leaf in arrays:
        spec = leaf.spec
        data = encode_v2(spec.shape or (), spec.dtype, spec.chunk_shape)
        key = f"{prefix_of(leaf.info.name)}.zarray".encode()
        if len(data) <= MAX_INLINE_BYTES:
            yield key, Inline(data)
        else:
            yield key, Indirect(node_file, len(spill), len(data))
            spill += data


def chunk_entries(arrays: Sequence[Leaf], written: Iterable[Written]) -> Iterator[tuple[bytes, Value]]:
    """Yield every chunk of every array, its pieces put together.

    Raises:
        PenstockError: If the pieces of a chunk do not tile it, or a chunk is missing: the pipeline
            broke its promise, and the checkpoint must not be published.
    """
    chunks: dict[tuple[int, tuple[int, ...]], list[Written]] = {}
    for piece in written:
        chunks.setdefault((piece.leaf, piece.chunk), []).append(piece)

    for leaf in arrays:
        prefix = prefix_of(leaf.info.name)
        for index in _grid(leaf):
            pieces = chunks.pop((leaf.index, index), ())
            if len(pieces) == 1 and pieces[0].start == 0 and pieces[0].nbytes == leaf.spec.chunk_nbytes:
                value = Indirect(pieces[0].file, pieces[0].offset, pieces[0].nbytes)
            else:
                value = _joined(leaf, index, pieces)

            yield f"{prefix}{'.'.join(map(str, index)) or '0'}".encode(), value

    if chunks:
        number, index = next(iter(chunks))
        raise PenstockError(f"chunk {index} of leaf {number} was written, but no leaf of the tree has it")


def prefix_of(name: str) -> str:
    """Return what the keys of the array `name` begin with. A bare leaf has no name and no slash."""
    return f"{name}/" if name else ""


def _grid(leaf: Leaf) -> Iterable[tuple[int, ...]]:
    shape, chunk_shape = leaf.spec.shape or (), leaf.spec.chunk_shape
    if shape == chunk_shape and leaf.spec.nbytes:
        return ((0,) * len(shape),)

    counts = [-(-n // chunk) for n, chunk in zip(shape, chunk_shape, strict=True)]
    return itertools.product(*map(range, counts))


def _joined(leaf: Leaf, index: tuple[int, ...], pieces: Iterable[Written]) -> Indirect:
    ordered = sorted(pieces, key=lambda piece: piece.start)
    end = 0
    for piece in ordered:
        # All pieces agree on where their chunk begins, so they are contiguous if they tile it.
        first = ordered[0]
        together = piece.file == first.file and piece.offset - piece.start == first.offset
        if piece.start != end or not together:
            problem = f"byte {end}: next is a piece at {piece.start}, at {piece.offset} of {piece.file!r}"
            raise _broken(leaf, index, problem)
        end += piece.nbytes

    if end != leaf.spec.chunk_nbytes:
        raise _broken(leaf, index, f"{end} of {leaf.spec.chunk_nbytes} bytes were written")

    return Indirect(ordered[0].file, ordered[0].offset, end)


def _broken(leaf: Leaf, index: tuple[int, ...], problem: str) -> PenstockError:
    error = PenstockError(f"{leaf.info.key_path}: chunk {index} is not whole: {problem}")
    error.key_path = leaf.info.key_path
    return error
