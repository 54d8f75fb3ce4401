"""The index of a new checkpoint: the keys of its arrays, and where each chunk lies."""

from __future__ import annotations

__all__ = ("ChunkIndex",)

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.formats.common.chunk_keys import array_metadata, chunk_grid, chunk_key, prefix_of
from penstock.handlers.formats.common.zarr_metadata import METADATA_KEYS
from penstock.handlers.ocdbt.btree_encoding import Places
from penstock.handlers.ocdbt.database_writer import EncodedIndex, IndexPlan
from penstock.handlers.ocdbt.value_refs import MAX_INLINE_BYTES
from penstock.kernel.errors import PenstockError
from penstock.kernel.protocols.views import PackedLeaves, StagedLeaf, WrittenLeaves
from penstock.kernel.protocols.written import Written

_Chunk: TypeAlias = tuple[int, tuple[int, ...]]
"""Index of a leaf, and of a chunk in its grid."""


@final
class ChunkIndex:
    """The index of a tree's arrays: made once for a tree, encoded for every checkpoint of it.

    A slot is a value that lies in a data file: first every chunk of every array, in order, then
    metadata that is too long to lie in the index (of arrays with some sixty axes).

    Args:
        arrays: The leaves with a shape, in order.
        version: Of zarr.
    """

    __slots__ = (
        "_arrays",
        "_chunks",
        "_inline",
        "_keys",
        "_lengths",
        "_plan",
        "_single",
        "_spilled",
        "_starts",
    )

    def __init__(self, arrays: Sequence[StagedLeaf], version: int = 2) -> None:
        self._arrays = arrays
        self._single: dict[int, int] = {}  #: slot of the only chunk of a leaf
        self._chunks: dict[_Chunk, int] = {}  #: slot of every chunk of the others
        self._starts: list[int] = []  #: first slot of each array
        keys: list[bytes] = []
        lengths: list[int] = []
        zeros: dict[int, str] = {}  # the key of the only chunk, for each number of axes
        for leaf in arrays:
            self._starts.append(len(keys))
            prefix = prefix_of(leaf.info.name)
            spec = leaf.spec
            if spec.is_single_chunk:
                self._single[leaf.index] = len(keys)
                n_axes = len(spec.chunk_shape)
                if n_axes not in zeros:
                    zeros[n_axes] = chunk_key((0,) * n_axes, version)

                keys.append(f"{prefix}{zeros[n_axes]}".encode())
                lengths.append(spec.chunk_nbytes)
                continue

            for index in chunk_grid(leaf):
                self._chunks[leaf.index, index] = len(keys)
                keys.append(f"{prefix}{chunk_key(index, version)}".encode())
                lengths.append(spec.chunk_nbytes)

        documents = [array_metadata(leaf.spec, version) for leaf in arrays]
        names = [f"{prefix_of(leaf.info.name)}{METADATA_KEYS[version - 2]}".encode() for leaf in arrays]
        long = [at for at, document in enumerate(documents) if len(document) > MAX_INLINE_BYTES]
        self._spilled = [documents[at] for at in long]
        short = [at for at, document in enumerate(documents) if len(document) <= MAX_INLINE_BYTES]
        self._keys = [*keys, *(names[at] for at in long), *(names[at] for at in short)]
        self._inline = [*itertools.repeat(None, len(keys) + len(long)), *(documents[at] for at in short)]
        self._lengths = [*lengths, *map(len, self._spilled), *(len(documents[at]) for at in short)]
        # The encoded length of a chunk differs from save to save.
        coded = any(leaf.spec.codec is not None for leaf in arrays)
        self._plan = None if coded else IndexPlan(self._keys, self._inline, self._lengths)

    def encode(
        self, batches: Iterable[WrittenLeaves], *, node_file: str, uuid: bytes, commit_time_ns: int
    ) -> EncodedIndex:
        """Encode the index of one checkpoint.

        Args:
            batches: Where the pieces and packs of every chunk lie.
            node_file: The data file for the nodes.
            uuid: 16 bytes that identify the database.
            commit_time_ns: Nanoseconds since the epoch.

        Returns:
            The index; its `nodes` are the whole content of `node_file`.

        Raises:
            PenstockError: If the pieces of a chunk do not tile it, or a chunk is missing. That is an error
                in the pipeline, and the checkpoint must not be published.
        """
        n_chunks = len(self._single) + len(self._chunks)
        located = _Located(self._lengths[: n_chunks + len(self._spilled)])
        unknown = self._locate(batches, located)
        missing = np.flatnonzero(located.file_ids[:n_chunks] < 0)
        if missing.size:
            leaf, index = self._chunk_at(int(missing[0]))
            raise _broken(leaf, index, f"0 of {leaf.spec.chunk_nbytes} bytes were written")
        if unknown:
            number, index = unknown[0]
            raise PenstockError(f"chunk {index} of leaf {number} was written, but no leaf of the tree has it")

        spill = b"".join(self._spilled)
        starts = itertools.accumulate(map(len, self._spilled), initial=0)
        located.put_all(list(enumerate(starts, n_chunks))[: len(self._spilled)], node_file)
        plan = self._plan
        if plan is None:
            lengths = [*located.lengths, *self._lengths[len(located.lengths) :]]
            plan = IndexPlan(self._keys, self._inline, lengths)

        encoded = plan.encode(
            located.places(),
            node_file=node_file,
            node_offset=len(spill),
            uuid=uuid,
            commit_time_ns=commit_time_ns,
        )
        return EncodedIndex(spill + encoded.nodes, encoded.manifest)

    def _locate(self, batches: Iterable[WrittenLeaves], located: _Located) -> list[_Chunk]:
        """Note where every chunk lies; return chunks that belong to no array."""
        parts: dict[_Chunk, list[Written]] = {}
        unknown: list[_Chunk] = []
        for batch in batches:
            for pack in batch.packs:
                self._locate_pack(pack, located, unknown)

            for part in batch.written:
                parts.setdefault((part.leaf, part.chunk), []).append(part)

        for (number, index), pieces in parts.items():
            slot = self._slot(number, index)
            if slot is None:
                unknown.append((number, index))
                continue

            leaf, _ = self._chunk_at(slot)
            file, offset, length = _joined(leaf, index, pieces)
            located.put_all([(slot, offset)], file)
            located.lengths[slot] = length

        return unknown

    def _locate_pack(self, pack: PackedLeaves, located: _Located, unknown: list[_Chunk]) -> None:
        slots = [self._single.get(leaf.index) for leaf in pack.leaves]
        offset = pack.offset
        places: list[tuple[int, int]] = []
        for leaf, slot in zip(pack.leaves, slots, strict=True):
            if slot is None:
                unknown.append((leaf.index, (0,) * len(leaf.spec.chunk_shape)))
            else:
                places.append((slot, offset))

            offset += leaf.spec.nbytes

        located.put_all(places, pack.file)

    def _slot(self, number: int, index: tuple[int, ...]) -> int | None:
        if number in self._single:
            return None if any(index) else self._single[number]

        return self._chunks.get((number, index))

    def _chunk_at(self, slot: int) -> tuple[StagedLeaf, tuple[int, ...]]:
        at = int(np.searchsorted(self._starts, slot, side="right")) - 1
        leaf = self._arrays[at]
        if leaf.index in self._single:
            return leaf, (0,) * len(leaf.spec.chunk_shape)

        return leaf, next(itertools.islice(chunk_grid(leaf), slot - self._starts[at], None))


@final
class _Located:
    """Where the value of each slot lies, in columns; -1 while unknown.

    Args:
        lengths: Of each slot's value, until another one is found.
    """

    __slots__ = ("_files", "file_ids", "lengths", "offsets")

    def __init__(self, lengths: list[int]) -> None:
        n_slots = len(lengths)
        self._files: dict[str, int] = {}
        self.lengths = lengths
        self.file_ids: npt.NDArray[np.int64] = np.full(n_slots, -1, np.int64)
        self.offsets: npt.NDArray[np.int64] = np.zeros(n_slots, np.int64)

    def put_all(self, places: Sequence[tuple[int, int]], file: str) -> None:
        if places:
            slots, offsets = zip(*places, strict=True)
            self.file_ids[list(slots)] = self._files.setdefault(file, len(self._files))
            self.offsets[list(slots)] = offsets

    def places(self) -> Places:
        return Places(tuple(self._files), self.file_ids, self.offsets)


def _joined(leaf: StagedLeaf, index: tuple[int, ...], pieces: Iterable[Written]) -> tuple[str, int, int]:
    """Return the file, offset and length of a chunk, after checking that its pieces cover it."""
    ordered = sorted(pieces, key=lambda piece: piece.start)
    coded = ordered[0].coded
    if (coded is None) != (leaf.spec.codec is None) or any(piece.coded != coded for piece in ordered):
        raise _broken(leaf, index, f"its codec is {leaf.spec.codec}, and not all of it was encoded so")

    whole = leaf.spec.chunk_nbytes if coded is None else coded
    end = 0
    for piece in ordered:
        # All pieces agree on where their chunk begins, so they are contiguous if they tile it.
        first = ordered[0]
        together = piece.file == first.file and piece.offset - piece.start == first.offset
        if piece.start != end or not together:
            problem = f"byte {end}: next is a piece at {piece.start}, at {piece.offset} of {piece.file!r}"
            raise _broken(leaf, index, problem)
        end += piece.nbytes

    if end != whole:
        raise _broken(leaf, index, f"{end} of {whole} bytes were written")

    return ordered[0].file, ordered[0].offset, end


def _broken(leaf: StagedLeaf, index: tuple[int, ...], problem: str) -> PenstockError:
    error = PenstockError(f"{leaf.info.key_path}: chunk {index} is not whole: {problem}")
    error.key_path = leaf.info.key_path
    return error
