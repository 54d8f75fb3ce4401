"""The index of a new checkpoint: the keys of its arrays, and where each chunk lies."""

from __future__ import annotations

__all__ = ("ChunkIndex",)

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import cast, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.formats.common.chunk_keys import array_metadata, chunk_keys, prefix_of
from penstock.handlers.formats.common.zarr_metadata import METADATA_KEYS
from penstock.handlers.ocdbt.btree_encoding import Places
from penstock.handlers.ocdbt.database_writer import EncodedIndex, IndexPlan
from penstock.handlers.ocdbt.value_refs import MAX_INLINE_BYTES
from penstock.kernel.errors import PenstockError
from penstock.kernel.protocols.views import PackedLeaves, StagedLeaf, WrittenLeaves
from penstock.kernel.protocols.written import Written


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
        "_chunk_nbytes",
        "_counts",
        "_grids",
        "_inline",
        "_keys",
        "_lengths",
        "_places",
        "_plan",
        "_spilled",
        "_starts",
    )

    def __init__(self, arrays: Sequence[StagedLeaf], version: int = 2) -> None:
        self._arrays = arrays
        self._places = {leaf.index: at for at, leaf in enumerate(arrays)}  #: in `arrays`, by index
        grids = {id(spec): spec.grid_shape for spec in {id(leaf.spec): leaf.spec for leaf in arrays}.values()}
        self._grids = [grids[id(leaf.spec)] for leaf in arrays]
        self._counts = _column(list(map(math.prod, self._grids)))  #: chunks of each array
        self._starts = np.cumsum(self._counts) - self._counts  #: first slot of each array
        self._chunk_nbytes = _column([leaf.spec.chunk_nbytes for leaf in arrays])
        names = [prefix_of(leaf.info.name).encode() for leaf in arrays]
        keys: list[bytes] = []
        suffixes = {grid: [key.encode() for key in chunk_keys(grid, version)] for grid in set(self._grids)}
        for name, grid in zip(names, self._grids, strict=True):
            keys += [name + suffix for suffix in suffixes[grid]]

        lengths: list[int] = np.repeat(self._chunk_nbytes, self._counts).tolist()
        key = METADATA_KEYS[version - 2].encode()
        documents = [array_metadata(leaf.spec, version) for leaf in arrays]
        long = [at for at, document in enumerate(documents) if len(document) > MAX_INLINE_BYTES]
        self._spilled = [documents[at] for at in long]
        short = [at for at, document in enumerate(documents) if len(document) <= MAX_INLINE_BYTES]
        self._keys = [*keys, *(names[at] + key for at in long), *(names[at] + key for at in short)]
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
        n_chunks = int(self._counts.sum())
        located = _Located(self._lengths[: n_chunks + len(self._spilled)])
        self._locate(batches, located)
        missing = np.flatnonzero(located.file_ids[:n_chunks] < 0)
        if missing.size:
            leaf, index = self._chunk_at(int(missing[0]))
            raise _broken(leaf, index, f"0 of {leaf.spec.chunk_nbytes} bytes were written")

        spill = b"".join(self._spilled)
        starts = _column(list(itertools.accumulate(map(len, self._spilled), initial=0))[:-1])
        located.put(np.arange(n_chunks, n_chunks + len(starts)), starts, node_file)
        plan = self._plan
        if plan is None:
            lengths = [*located.lengths.tolist(), *self._lengths[len(located.lengths) :]]
            plan = IndexPlan(self._keys, self._inline, lengths)

        encoded = plan.encode(
            located.places(),
            node_file=node_file,
            node_offset=len(spill),
            uuid=uuid,
            commit_time_ns=commit_time_ns,
        )
        return EncodedIndex(spill + encoded.nodes, encoded.manifest)

    def _locate(self, batches: Iterable[WrittenLeaves], located: _Located) -> None:
        """Note where every chunk lies."""
        parts: dict[int, list[Written]] = {}
        for batch in batches:
            for pack in batch.packs:
                self._locate_pack(pack, located)

            for part in batch.written:
                parts.setdefault(self._slot(part), []).append(part)

        # Chunks in pieces are few and large, or many in few files: one assignment for each file.
        rows: dict[str, list[tuple[int, int, int]]] = {}
        for slot, pieces in parts.items():
            leaf, index = self._arrays[self._places[pieces[0].leaf]], pieces[0].chunk
            file, offset, length = _joined(leaf, index, pieces)
            rows.setdefault(file, []).append((slot, offset, length))

        for file, found in rows.items():
            slots, offsets, lengths = np.array(found, np.int64).T
            located.put(slots, offsets, file)
            located.lengths[slots] = lengths

    def _locate_pack(self, pack: PackedLeaves, located: _Located) -> None:
        try:
            ats = _column([self._places[leaf.index] for leaf in pack.leaves])
        except KeyError as error:
            raise _unknown(cast("int", error.args[0])) from None

        counts = self._counts[ats]
        sizes = np.repeat(self._chunk_nbytes[ats], counts)
        before = np.repeat(self._starts[ats] - (np.cumsum(counts) - counts), counts)
        located.put(before + np.arange(len(sizes)), pack.offset + np.cumsum(sizes) - sizes, pack.file)

    def _slot(self, part: Written) -> int:
        """The slot of a part's chunk."""
        at = self._places.get(part.leaf)
        if at is None:
            raise _unknown(part.leaf, part.chunk)

        grid, flat = self._grids[at], 0
        if len(grid) != len(part.chunk):
            raise _unknown(part.leaf, part.chunk)
        for i, n in zip(part.chunk, grid, strict=True):
            if not 0 <= i < n:
                raise _unknown(part.leaf, part.chunk)

            flat = flat * n + i

        return int(self._starts[at]) + flat

    def _chunk_at(self, slot: int) -> tuple[StagedLeaf, tuple[int, ...]]:
        # Of arrays that begin at one slot only the last has chunks.
        at = int(np.searchsorted(self._starts, slot, side="right")) - 1
        leaf = self._arrays[at]
        index = np.unravel_index(slot - int(self._starts[at]), self._grids[at])
        return leaf, tuple(map(int, index))


@final
class _Located:
    """Where the value of each slot lies, in columns; -1 while unknown.

    Args:
        lengths: Of each slot's value, until another one is found.
    """

    __slots__ = ("_files", "file_ids", "lengths", "offsets")

    def __init__(self, lengths: Sequence[int]) -> None:
        n_slots = len(lengths)
        self._files: dict[str, int] = {}
        self.lengths = _column(lengths)
        self.file_ids: npt.NDArray[np.int64] = np.full(n_slots, -1, np.int64)
        self.offsets: npt.NDArray[np.int64] = np.zeros(n_slots, np.int64)

    def put(self, slots: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], file: str) -> None:
        """Note that these values lie at these offsets of a file."""
        if len(slots):
            self.file_ids[slots] = self._files.setdefault(file, len(self._files))
            self.offsets[slots] = offsets

    def places(self) -> Places:
        """All of it, as the encoder takes it."""
        return Places(tuple(self._files), self.file_ids, self.offsets)


def _column(numbers: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(numbers, np.int64)


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


def _unknown(number: int, index: tuple[int, ...] | None = None) -> PenstockError:
    what = "a pack" if index is None else f"chunk {index}"
    return PenstockError(f"{what} of leaf {number} was written, but no leaf of the tree has it")
