"""Lists the parts of an item that have a checksum, those that have none, and the places of its leaves.

`survey_item` is what `penstock verify` and repairs go by. `check_arrays` compares chosen arrays of a tree.
`holds_recorded_bytes` looks for the bytes of a lost leaf in another checkpoint.
"""

from __future__ import annotations

__all__ = ("ItemSurvey", "check_arrays", "holds_recorded_bytes", "survey_item")

import math
import os
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, TypeAlias, final

from crc32c import crc32c

from penstock.handlers.formats import integrity
from penstock.handlers.formats.integrity import Checksum, Checksums, problem_of_holes
from penstock.handlers.formats.leaf_table import StoredArray
from penstock.handlers.formats.orbax.checkpoint_documents import SealedDocuments
from penstock.handlers.formats.orbax.discovery import disk_mark
from penstock.handlers.formats.orbax.embedded_arrays import PackedArray
from penstock.handlers.formats.orbax.file_names import (
    ARRAY_METADATAS,
    INTEGRITY,
    LEGACY_MSGPACK,
    MANIFEST,
    METADATA,
    SHARDING,
    STRINGS,
)
from penstock.handlers.formats.orbax.open_checkpoint import open_checkpoint
from penstock.handlers.formats.orbax.stored_checkpoint import OrbaxCheckpoint, chunk_boxes
from penstock.handlers.formats.region_reads import NONE
from penstock.handlers.formats.verification import (
    BLOCK_BYTES,
    Finding,
    RecordedRange,
    check_ranges,
    finding_of,
)
from penstock.handlers.formats.zarr import grid_indices
from penstock.handlers.ocdbt.database_reader import read_index
from penstock.handlers.ocdbt.wire_format import Indirect, Inline
from penstock.kernel.errors import ChecksumError, CorruptCheckpointError, PenstockError
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.stores import ReadableFile, Store

_Extent: TypeAlias = "tuple[int, int, str]"
"""Where bytes of a leaf begin and end in a file, and the leaf's key path."""

_DOCUMENTS: Final = frozenset({METADATA, SHARDING, STRINGS, INTEGRITY, LEGACY_MSGPACK, MANIFEST})
_DATABASE: Final = re.compile(
    r"(?:ocdbt\.process_[^/]+/)?(?:manifest\.(?:ocdbt|[0-9a-f]{16})|d/[0-9a-f]{32})"
)
"""Files of an index: its nodes have checksums of their own, which are compared when it is read."""


def _nothing(_: str) -> bool:
    return False


@final
@dataclass(frozen=True, slots=True)
class ItemSurvey:
    """The checksummed ranges of an item, and what is wrong without a byte of an array being read."""

    n_leaves: int = 0
    ranges: tuple[RecordedRange, ...] = ()  #: by file and offset
    findings: tuple[Finding, ...] = ()
    accounts_for: Callable[[str], bool] = field(default=_nothing)
    """Whether a file, named from the item's directory, is part of what was compared or found."""
    holds_data: Callable[[str], bool] = field(default=_nothing)
    """Whether a file holds chunks of leaves, or has checksums of its own."""


def survey_item(store: Store, path: str, item: str = "") -> ItemSurvey:
    """Find the checksummed ranges of an item of the checkpoint at `path`, or of its only tree. Blocking.

    Nothing is raised for what is damaged: it is among the findings.
    """
    try:
        checkpoint = open_checkpoint(store, path, item or None, whole=False)
    except PenstockError as error:
        return _unopened(store, os.path.join(path, item) if item else path, error)

    try:
        return _opened(checkpoint)
    except PenstockError as error:
        return ItemSurvey(len(checkpoint.leaves), findings=(finding_of(error, checkpoint.directory),))


def _unopened(store: Store, directory: str, error: PenstockError) -> ItemSurvey:
    """Survey a checkpoint whose documents are lost: checksums of data files are known without leaf names."""
    findings = [finding_of(error, directory)]
    file = os.path.join(directory, INTEGRITY)
    recorded: Mapping[str, Checksums] = {}
    try:
        if store.kind(file) == "file":
            recorded = integrity.decode(file, store.read_file(file)).files

        recorded, holes = _without_holes(store, directory, recorded)
        findings += holes
        ranges = tuple(_ranges(directory, recorded, {}))
    except PenstockError as second:
        findings.append(finding_of(second, directory))
        ranges = ()

    return ItemSurvey(0, ranges, tuple(dict.fromkeys(findings)), _everything, _everything)


def _everything(_: str) -> bool:
    return True


def _opened(checkpoint: OrbaxCheckpoint) -> ItemSurvey:
    extents: dict[str, list[_Extent]] = defaultdict(list)
    findings: list[Finding] = []
    # Of what several processes saved to disks of their own, the others have the rest.
    is_whole = checkpoint.all_chunks_written and disk_mark(checkpoint.store, checkpoint.directory) is None
    for leaf in checkpoint.leaves:
        if leaf.spec.shape is None and leaf.spec.text is None and not leaf.spec.is_empty_marker:
            problem = f"a {leaf.spec.typestr} lies in files of its own handler, which have no checksum here"
            findings.append(Finding("unchecked", checkpoint.directory, problem, (leaf.info.key_path,)))
        for found in _extents(checkpoint, leaf, is_whole=is_whole):
            if isinstance(found, Finding):
                findings.append(found)
            else:
                file, extent = found
                extents[file].append(extent)

    for inside in extents.values():
        inside.sort()

    recorded, holes = _without_holes(checkpoint.store, checkpoint.directory, checkpoint.checksums)
    ranges = tuple(_ranges(checkpoint.directory, recorded, extents))
    findings += [*holes, *_unchecked(checkpoint, extents)]

    def holds_data(name: str) -> bool:
        return name in extents or name in checkpoint.checksums

    def accounts_for(name: str) -> bool:
        return (
            holds_data(name)
            or name in _DOCUMENTS
            or name.startswith(f"{ARRAY_METADATAS}/")
            or name.encode() in checkpoint.index
            or (checkpoint.uses_ocdbt and _DATABASE.fullmatch(name) is not None)
        )

    return ItemSurvey(len(checkpoint.leaves), ranges, tuple(findings), accounts_for, holds_data)


def _without_holes(
    store: Store, directory: str, recorded: Mapping[str, Checksums]
) -> tuple[Mapping[str, Checksums], list[Finding]]:
    """Leave out files of which far more bytes would be read than they take on the medium."""
    kept: dict[str, Checksums] = {}
    findings: list[Finding] = []
    for file, pieces in recorded.items():
        path = os.path.join(directory, file)
        problem = problem_of_holes(store, path, sum(pieces.nbytes.tolist()))
        if problem:
            findings.append(Finding("unchecked", path, problem))
        else:
            kept[file] = pieces

    return kept, findings


def _ranges(
    directory: str, recorded: Mapping[str, Checksums], extents: Mapping[str, Sequence[_Extent]]
) -> Iterator[RecordedRange]:
    """Yield each recorded range with the leaves that are in it.

    Raises:
        CorruptCheckpointError: If chunks overlap.
    """
    for file in sorted(recorded):
        path, inside = os.path.join(directory, file), extents.get(file, ())
        steps = 2 * (len(recorded[file]) + len(inside))  # as many as if all are apart
        for checksum in recorded[file]:
            there = _extents_in(inside, checksum, steps)
            steps -= len(there)
            if steps < 0:
                raise CorruptCheckpointError(path, "has chunks that lie in one another")

            yield RecordedRange(path, checksum, tuple(dict.fromkeys([name for _, _, name in there])))


def _extents(
    checkpoint: OrbaxCheckpoint, leaf: StoredLeaf, *, is_whole: bool
) -> Iterator[tuple[str, _Extent] | Finding]:
    """Yield where each chunk of a leaf is. One in the index itself was checked when that was read."""
    array, key_path = leaf.detail, leaf.info.key_path
    if not isinstance(array, StoredArray) or not leaf.spec.nbytes:
        return

    for found in chunk_boxes(checkpoint.index, array, tuple([(0, n) for n in array.format.grid_shape])):
        key, value = array.prefix + array.format.chunk_key(found.start), found.value
        if isinstance(value, Indirect):
            expected = leaf.spec.chunk_nbytes
            if array.format.plain and value.length != expected:
                problem = f"chunk {key!r} has {value.length} bytes, not {expected}"
                path = os.path.join(checkpoint.directory, value.file)
                yield Finding("damaged", path, problem, (key_path,), value.offset, max(value.length, 0))
            yield value.file, (value.offset, value.offset + value.length, key_path)
        elif not isinstance(value, Inline) and is_whole:
            others = math.prod(found.shape) - 1
            problem = f"chunk {key!r} is missing" + (f", and {others} behind it" if others else "")
            yield Finding("damaged", checkpoint.directory, problem, (key_path,))


def _extents_in(extents: Sequence[_Extent], checksum: Checksum, most: int) -> list[_Extent]:
    """Return the extents in a range, but no more than `most` and one; they ascend by offset."""
    end = checksum.offset + checksum.nbytes
    at = bisect_left(extents, (checksum.offset,))
    if at and extents[at - 1][1] > checksum.offset:
        at -= 1

    found: list[_Extent] = []
    while at < len(extents) and extents[at][0] < end and len(found) <= most:
        found.append(extents[at])
        at += 1

    return found


def _unchecked(checkpoint: OrbaxCheckpoint, extents: Mapping[str, Sequence[_Extent]]) -> Iterator[Finding]:
    """Yield what has bytes of arrays without a recorded checksum."""
    if not checkpoint.has_checksums and any(map(_has_array_bytes, checkpoint.leaves)):
        problem = f"records no checksums: there is no {INTEGRITY}, which penstock writes and Orbax does not"
        yield Finding("unchecked", checkpoint.directory, problem)
        return

    for file in sorted(extents):
        runs = _runs(checkpoint.checksums.get(file, NONE))
        names = [name for start, stop, name in extents[file] if not _covered(runs, start, stop)]
        if names:
            path = os.path.join(checkpoint.directory, file)
            yield Finding("unchecked", path, "no checksum was recorded", tuple(dict.fromkeys(names)))


def _has_array_bytes(leaf: StoredLeaf) -> bool:
    return leaf.spec.nbytes > 0 and isinstance(leaf.detail, StoredArray | PackedArray)


def _runs(recorded: Checksums) -> list[tuple[int, int]]:
    """Return where pieces without a gap between them begin and end, by ascending offset."""
    runs: list[tuple[int, int]] = []
    for offset, nbytes, _ in recorded:
        if runs and runs[-1][1] == offset:
            runs[-1] = (runs[-1][0], offset + nbytes)
        else:
            runs.append((offset, offset + nbytes))

    return runs


def _covered(runs: Sequence[tuple[int, int]], start: int, stop: int) -> bool:
    """Return whether all bytes between two offsets have a checksum."""
    at = bisect_right(runs, (start, math.inf)) - 1
    return start >= stop or (at >= 0 and runs[at][1] >= stop)


def check_arrays(store: Store, directory: str, names: AbstractSet[str]) -> None:
    """Compare arrays of a tree, and the documents that describe them, with their checksums. Blocking.

    Args:
        store: Where.
        directory: Of the tree; one that is not there is left to who reads it.
        names: The stored names of the arrays.

    Raises:
        ChecksumError: If something is not as it was written.
    """
    if store.kind(directory) != "directory":
        return

    inside = store.list_directory(directory)
    sealed = SealedDocuments.open(store, directory, inside)
    for document in sealed.recorded.documents:
        if document.rpartition("/")[0] in names:
            sealed.read(document)

    found = set(_in_directories(sealed, names))
    if MANIFEST in inside and sealed.recorded.files:
        found |= set(_in_database(store, sealed, names))  # which compares the nodes of the index

    for file, ranges in groupby(sorted(found), key=lambda one: one[0]):
        path = os.path.join(directory, file)
        wanted = [RecordedRange(path, checksum, (name,)) for _, checksum, name in ranges]
        for finding in check_ranges(store, wanted):
            raise ChecksumError(path, finding.problem, key_path=finding.key_paths[0])


def _in_directories(sealed: SealedDocuments, names: AbstractSet[str]) -> Iterator[tuple[str, Checksum, str]]:
    for file, checksums in sealed.recorded.files.items():
        steps = file.split("/")
        for name in names & {"/".join(steps[:depth]) for depth in range(1, len(steps))}:
            for checksum in checksums:
                yield file, checksum, name


def _in_database(
    store: Store, sealed: SealedDocuments, names: AbstractSet[str]
) -> Iterator[tuple[str, Checksum, str]]:
    index = read_index(store, sealed.directory)
    for name in names:
        for row in index.rows_below(f"{name}/".encode()):
            value = index.value(row)
            if not isinstance(value, Indirect):
                continue

            recorded = sealed.recorded.files.get(value.file, NONE)
            for at in range(max(recorded.from_offset(value.offset + 1) - 1, 0), len(recorded)):
                checksum = recorded[at]
                if checksum.offset >= value.offset + value.length:
                    break
                if checksum.offset + checksum.nbytes > value.offset:
                    yield value.file, checksum, name


def holds_recorded_bytes(
    damaged: OrbaxCheckpoint, leaf: StoredLeaf, other: OrbaxCheckpoint, other_leaf: StoredLeaf
) -> bool:
    """Return whether each chunk of `other_leaf` has the checksums recorded of the same chunk of `leaf`.

    Reads `other_leaf` whole, block by block. False if a chunk of `leaf` has no complete record, is in
    the index itself, or is stored in another form. Blocking.
    """
    array, same = leaf.detail, other_leaf.detail
    if not isinstance(array, StoredArray) or not isinstance(same, StoredArray):
        return False
    if array.format != same.format or _described(leaf) != _described(other_leaf):
        return False

    files = _Files(other)
    try:
        for index in grid_indices(tuple([(0, n) for n in array.format.grid_shape])):
            chunk = damaged.index.get((array.prefix + array.format.chunk_key(index)).encode())
            there = other.index.get((same.prefix + same.format.chunk_key(index)).encode())
            if not isinstance(chunk, Indirect) or not isinstance(there, Indirect):
                return False

            ranges = list(_within(damaged.checksums.get(chunk.file, NONE), chunk))
            if not ranges or chunk.length != there.length:
                return False
            if not all(files.agrees(there, found) for found in ranges):
                return False
    except PenstockError:
        return False  # the other one is damaged, too
    finally:
        files.close()

    return True


def _described(leaf: StoredLeaf) -> object:
    """Return the part of a leaf's spec that its bytes depend on. Its sharding may have changed."""
    return replace(leaf.spec, sharding=None, write_shape=None)


def _within(recorded: Checksums, chunk: Indirect) -> Iterator[Checksum]:
    """Yield the checksums that tile a chunk, their offsets from its start; nothing if they leave a gap."""
    end, stop = chunk.offset, chunk.offset + chunk.length
    found: list[Checksum] = []
    for at in range(recorded.from_offset(chunk.offset), len(recorded)):
        if recorded[at].offset != end or end >= stop:
            break

        found.append(recorded[at])
        end += recorded[at].nbytes

    if end == stop:
        for checksum in found:
            yield Checksum(checksum.offset - chunk.offset, checksum.nbytes, checksum.crc32c)


@final
class _Files:
    """The file of a checkpoint that was used last; only one is kept open."""

    def __init__(self, checkpoint: OrbaxCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._name = ""
        self._file: ReadableFile | None = None

    def agrees(self, chunk: Indirect, recorded: Checksum) -> bool:
        """Return whether a part of a chunk has the recorded checksum."""
        file = self._opened(chunk.file)
        block = memoryview(bytearray(min(BLOCK_BYTES, recorded.nbytes)))
        start, sum_ = chunk.offset + recorded.offset, 0
        for at in range(0, recorded.nbytes, len(block) or 1):
            part = block[: min(len(block), recorded.nbytes - at)]
            file.read_at(start + at, [part])
            sum_ = crc32c(part, sum_)

        return sum_ == recorded.crc32c

    def close(self) -> None:
        """Close the file, if one is open."""
        file, self._file, self._name = self._file, None, ""
        if file is not None:
            file.close()

    def _opened(self, name: str) -> ReadableFile:
        if self._file is None or name != self._name:
            self.close()
            path = os.path.join(self._checkpoint.directory, name)
            self._file = self._checkpoint.store.open_data_file(path)
            self._name = name

        return self._file
