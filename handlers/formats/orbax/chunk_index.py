"""The index of a new checkpoint: the keys of its arrays, and where each chunk is."""

from __future__ import annotations

__all__ = ("ChunkIndex",)

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import final

import numpy as np
import numpy.typing as npt

from penstock.handlers.formats.orbax.tree_columns import TreeColumns
from penstock.handlers.formats.zarr import METADATA_KEYS, array_metadata, chunk_keys, prefix_of
from penstock.handlers.ocdbt.database_writer import EncodedIndex, IndexPlan, Places, in_data_files, int64s
from penstock.handlers.ocdbt.wire_format import MAX_INLINE_BYTES
from penstock.kernel.concurrency.brief_steps import STEP, drop, parts_of, rows_in_order
from penstock.kernel.errors import PenstockError
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo, names_of
from penstock.kernel.protocols.written import Written, WrittenLeaves, WrittenTable


@final
class ChunkIndex:
    """The index of a tree's arrays: made once for a tree, encoded for every checkpoint of it.

    A slot is a value that is in a data file: first every chunk of every array, by name, then metadata
    that is too long to be in the index (of arrays with some sixty axes). A chunk that another process has on
    its own disk has no entry (`LeafSpec.writer`).

    Args:
        arrays: The leaves with a shape, in order.
        version: Of zarr.
    """

    __slots__ = (
        "_arrays",
        "_chunk_nbytes",
        "_coded",
        "_counts",
        "_elsewhere",
        "_grids",
        "_order",
        "_places",
        "_plan",
        "_spilled",
        "_starts",
        "_unplanned",
    )

    def __init__(self, arrays: TreeColumns, version: int = 2) -> None:
        names = [prefix_of(name).encode() for name in names_of(arrays.infos)]
        order = rows_in_order(names)
        specs = [arrays.specs[at] for at in order]
        known = {id(spec): spec for spec in specs}  # most arrays share a few
        grids = {number: spec.grid_shape for number, spec in known.items()}
        self._arrays = arrays
        self._order: range | npt.NDArray[np.int64]  #: the numbers of the arrays, by name
        self._order = order if isinstance(order, range) else int64s(order)
        self._places = np.full(max(arrays.indices) + 1, -1, np.int64)  #: in that order, by index
        self._places[int64s(arrays.indices)[self._order]] = np.arange(len(order))
        self._grids = [grids[id(spec)] for spec in specs]
        self._counts = int64s(map(math.prod, self._grids))  #: chunks of each array
        self._starts = np.cumsum(self._counts) - self._counts  #: first slot of each array
        self._chunk_nbytes = int64s([spec.chunk_nbytes for spec in specs])
        self._coded = np.array([spec.codec is not None for spec in specs], np.bool_)
        self._elsewhere = np.array([spec.replicas.writer is None for spec in specs], np.bool_)

        keys: list[bytes] = []
        inline: list[bytes | None] = []
        lengths: list[int] = []
        self._spilled: list[bytes] = []  #: metadata that is too long for the index
        kinds = {number: _Kind.of(spec, version) for number, spec in known.items()}
        for number, group in itertools.groupby(zip(map(id, specs), order, strict=True), itemgetter(0)):
            kind, of_kind = kinds[number], [names[at] for _, at in group]
            for some in parts_of(of_kind, max(STEP // max(len(kind.suffixes), 1), 1)):
                keys += [name + suffix for name in some for suffix in kind.suffixes]
                inline += [*kind.inline] * len(some)
                lengths += [*kind.lengths] * len(some)

        spilling = {number: kind.spilled for number, kind in kinds.items() if kind.spilled is not None}
        for at, spec in zip(order, specs, strict=True) if spilling else ():
            if id(spec) in spilling:
                keys.append(names[at] + METADATA_KEYS[version - 2].encode())
                inline.append(None)
                lengths.append(len(spilling[id(spec)]))
                self._spilled.append(spilling[id(spec)])

        del names  # as many bytes as a third of all keys
        # The encoded length of a chunk differs from save to save, and which are elsewhere is known by then.
        unknown = bool(self._coded.any() or self._elsewhere.any())
        self._unplanned = (keys, inline, lengths) if unknown else None
        self._plan = None if unknown else IndexPlan(keys, inline, lengths)
        if not unknown:
            drop(keys)

    def encode(
        self, batches: Iterable[WrittenLeaves], *, node_file: str, uuid: bytes, commit_time_ns: int
    ) -> EncodedIndex:
        """Encode the index of one checkpoint.

        Args:
            batches: Where the pieces of every chunk are.
            node_file: The data file for the nodes.
            uuid: 16 bytes that identify the database.
            commit_time_ns: Nanoseconds since the epoch.

        Returns:
            The index; its `nodes` are the whole content of `node_file`.

        Raises:
            PenstockError: If the pieces of a chunk do not tile it, or a chunk is missing. That is an error
                in the pipeline, and the checkpoint must not be published.
        """
        arrays, n_chunks = self._arrays, int(self._counts.sum())
        chunk_lengths = np.repeat(self._chunk_nbytes, self._counts)
        located = _Located(np.concatenate([chunk_lengths, int64s(map(len, self._spilled))]))
        self._locate(batches, located)
        elsewhere = np.repeat(self._elsewhere, self._counts)
        missing = np.flatnonzero((located.file_ids[:n_chunks] < 0) & ~elsewhere)
        if missing.size:
            slot = int(missing[0])
            # Of arrays that begin at one slot only the last has chunks.
            place = int(np.searchsorted(self._starts, slot, side="right")) - 1
            index = tuple(map(int, np.unravel_index(slot - int(self._starts[place]), self._grids[place])))
            at = int(self._order[place])
            raise _broken(arrays.infos[at], index, f"0 of {arrays.specs[at].chunk_nbytes} bytes were written")

        spill = b"".join(self._spilled)
        starts = int64s(list(itertools.accumulate(map(len, self._spilled), initial=0))[:-1])
        one_file = np.zeros(len(starts), np.int64)
        located.put(np.arange(n_chunks, n_chunks + len(starts)), starts, one_file, [node_file])
        plan = self._planned(located) if self._plan is None else self._plan
        there = located.file_ids >= 0
        encoded = plan.encode(
            Places(tuple(located.files), located.file_ids[there], located.offsets[there]),
            node_file=node_file,
            node_offset=len(spill),
            uuid=uuid,
            commit_time_ns=commit_time_ns,
        )
        return EncodedIndex(spill + encoded.nodes, encoded.manifest)

    def _locate(self, batches: Iterable[WrittenLeaves], located: _Located) -> None:
        """Note where every chunk is."""
        parts: dict[int, list[Written]] = {}
        n_whole = 0
        for table in [batch.written for batch in batches]:
            slots, rest = self._locate_whole(table, located)
            n_whole += len(table) - len(rest)
            for slot, part in zip(slots[rest].tolist(), table.rows(rest), strict=True):
                parts.setdefault(slot, []).append(part)

        files: dict[str, int] = {}
        rows: list[tuple[int, int, int, int]] = []
        for slot, pieces in parts.items():
            at, index = int(self._order[int(self._places[pieces[0].leaf])]), pieces[0].chunk
            file, offset, length = _joined(self._arrays, at, index, pieces)
            rows.append((slot, offset, length, files.setdefault(file, len(files))))

        if rows:
            columns = np.concatenate([np.array(some, np.int64) for some in parts_of(rows)]).T
            slots, offsets, lengths, numbers = columns
            located.put(slots, offsets, numbers, tuple(files))
            located.lengths[slots] = lengths

        if np.count_nonzero(located.file_ids >= 0) != n_whole + len(parts):
            raise PenstockError("a chunk was written twice, so it is not known which one counts")

    def _locate_whole(
        self, table: WrittenTable, located: _Located
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
        """Note where the chunks are that were written in one piece.

        Returns:
            The slot of each row, and the other rows.
        """
        leaf, chunk, nbytes, coded = map(np.asarray, (table.leaf, table.chunk, table.nbytes, table.coded))
        ats = self._places[np.minimum(leaf, len(self._places) - 1)]
        unknown = np.flatnonzero((ats < 0) | (leaf >= len(self._places)) | (chunk >= self._counts[ats]))
        if unknown.size:
            problem = "was written, but no leaf of the tree has it"
            raise PenstockError(f"chunk {chunk[unknown[0]]} of leaf {leaf[unknown[0]]} {problem}")

        slots = self._starts[ats] + chunk
        lengths = np.where(coded < 0, self._chunk_nbytes[ats], coded)
        is_whole = (np.asarray(table.start) == 0) & (nbytes == lengths) & ((coded < 0) != self._coded[ats])
        rows = np.flatnonzero(is_whole)
        located.lengths[slots[rows]] = lengths[rows]
        located.put(slots[rows], np.asarray(table.offset)[rows], np.asarray(table.file)[rows], table.files)
        return slots, np.flatnonzero(~is_whole)

    def _planned(self, located: _Located) -> IndexPlan:
        """Plan the index for the values that were found in data files, in order; others get no entry."""
        assert self._unplanned is not None
        keys, inline, numbers = self._unplanned
        lengths, in_files = int64s(numbers), in_data_files(inline)
        lengths[in_files] = located.lengths
        if (located.file_ids >= 0).all():
            return IndexPlan(keys, inline, lengths)

        there = np.ones(len(keys), np.bool_)
        there[in_files] = located.file_ids >= 0
        kept = [at for at, is_there in enumerate(there) if is_there]
        return IndexPlan([keys[at] for at in kept], [inline[at] for at in kept], lengths[there])


@final
@dataclass(frozen=True, slots=True)
class _Kind:
    """The ends of the keys of an array, after its name, ascending where that is cheap; and the values."""

    suffixes: Sequence[bytes]
    inline: Sequence[bytes | None]  #: None for what is in a data file
    lengths: Sequence[int]
    spilled: bytes | None = None  #: its metadata, if that is too long to be among them

    @classmethod
    def of(cls, spec: LeafSpec, version: int) -> _Kind:
        document, key = array_metadata(spec, version), METADATA_KEYS[version - 2].encode()
        chunks = [each.encode() for each in chunk_keys(spec.grid_shape, version)]
        absent: list[bytes | None] = [None] * len(chunks)
        lengths = [spec.chunk_nbytes] * len(chunks)
        if len(document) > MAX_INLINE_BYTES:
            return cls(chunks, absent, lengths, document)
        if version == 2:  # the key of its metadata comes before those of its chunks
            return cls([key, *chunks], [document, *absent], [len(document), *lengths])

        return cls([*chunks, key], [*absent, document], [*lengths, len(document)])


@final
class _Located:
    """The place of the value of each slot, in columns; -1 while unknown.

    Args:
        lengths: Of each slot's value, until another one is found.
    """

    __slots__ = ("file_ids", "files", "lengths", "offsets")

    def __init__(self, lengths: npt.NDArray[np.int64]) -> None:
        n_slots = len(lengths)
        self.files: dict[str, int] = {}  #: the number of each
        self.lengths = lengths
        self.file_ids: npt.NDArray[np.int64] = np.full(n_slots, -1, np.int64)
        self.offsets: npt.NDArray[np.int64] = np.zeros(n_slots, np.int64)

    def put(
        self,
        slots: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.int64],
        files: Sequence[str],
    ) -> None:
        """Record that values are stored at these offsets, each in the file of its number in `files`."""
        used: list[int] = np.unique(numbers).tolist()
        ids = np.full(len(files), -1, np.int64)
        ids[used] = [self.files.setdefault(files[number], len(self.files)) for number in used]
        self.file_ids[slots] = ids[numbers]
        self.offsets[slots] = offsets


def _joined(
    arrays: TreeColumns, at: int, index: tuple[int, ...], pieces: Iterable[Written]
) -> tuple[str, int, int]:
    """Return the file, offset and length of a chunk, after checking that its pieces cover it."""
    spec = arrays.specs[at]
    ordered = sorted(pieces, key=lambda piece: piece.start)
    coded = ordered[0].coded
    if (coded is None) != (spec.codec is None) or any(piece.coded != coded for piece in ordered):
        raise _broken(arrays.infos[at], index, f"its codec is {spec.codec}, and not all of it was encoded so")

    whole = spec.chunk_nbytes if coded is None else coded
    end = 0
    for piece in ordered:
        # All pieces agree on where their chunk begins, so they are contiguous if they tile it.
        first = ordered[0]
        together = piece.file == first.file and piece.offset - piece.start == first.offset
        if piece.start != end or not together:
            problem = f"byte {end}: next is a piece at {piece.start}, at {piece.offset} of {piece.file!r}"
            raise _broken(arrays.infos[at], index, problem)
        end += piece.nbytes

    if end != whole:
        raise _broken(arrays.infos[at], index, f"{end} of {whole} bytes were written")

    return ordered[0].file, ordered[0].offset, end


def _broken(info: ParamInfo, index: tuple[int, ...], problem: str) -> PenstockError:
    error = PenstockError(f"{info.key_path}: chunk {index} is not whole: {problem}")
    error.key_path = info.key_path
    return error
