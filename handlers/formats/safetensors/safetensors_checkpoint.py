"""An opened safetensors checkpoint: its leaves, how to read each, and the trees they can be."""

from __future__ import annotations

__all__ = (
    "SafetensorsCheckpoint",
    "StoredTensor",
    "checkpoint_of",
    "empty_marker",
    "open_checkpoint",
    "split_name",
)

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, cast, final

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.formats.integrity import Checksums, bytes_on_medium
from penstock.handlers.formats.leaf_table import LeafTable, StoredLeaves, check_tree, show_key_path
from penstock.handlers.formats.region_reads import (
    NONE,
    StoredChunk,
    chunk_reads,
    cut_at_pieces,
    merge_direct,
    recorded_crc32c,
    with_checksums,
)
from penstock.handlers.formats.safetensors import file_digests
from penstock.handlers.formats.safetensors import penstock_metadata as notes
from penstock.handlers.formats.safetensors.file_set import FileSet, read_files
from penstock.handlers.formats.safetensors.header import FileHeader, Tensor
from penstock.handlers.formats.safetensors.penstock_metadata import Note, Steps, keys_and_kinds
from penstock.kernel.errors import CorruptCheckpointError, NotACheckpointError
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.protocols.reads import Destination, Read, WholeChunks
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Written


def split_name(name: str, separator: str, recorded: Steps | None) -> tuple[KeyPath, tuple[KeyKind, ...]]:
    """Return the key path that a name stands for, which is `recorded` if that is known."""
    if recorded is not None:
        return keys_and_kinds(recorded)

    keys = tuple(name.split(separator))
    return keys, (KeyKind.MAPPING,) * len(keys)


def empty_marker(value: Any) -> str | None:
    """Return the stored marker for None or an empty container; None for anything else."""
    if value is None:
        return "None"
    for type_, marker in ((tuple, "Tuple"), (list, "List"), (dict, "Dict")):
        if isinstance(value, type_) and not value:
            return "None" if hasattr(cast("object", value), "_fields") else marker

    return None


_FLAT: Final = (KeyKind.MAPPING,)


@final
class StoredTensor(NamedTuple):
    """The value of `StoredLeaf.detail` in this layout."""

    file: str  #: absolute
    offset: int


@final
@dataclass(frozen=True, eq=False)
class SafetensorsCheckpoint:
    """A file, or a folder of them, opened: a flat dict unless it is split or follows a target.

    Immutable; may be used from several threads.
    """

    path: str
    directory: str  #: what holds the file or files
    leaves: Sequence[StoredLeaf]
    custom_metadata: Mapping[str, Any] | None
    note: Note | None  #: what penstock recorded, if it wrote the file
    files: FileSet = field(default_factory=lambda: FileSet(()))
    checksums: Mapping[str, Checksums] = field(default_factory=dict[str, Checksums])
    """Those that were recorded, by absolute file name."""
    committed_at_ns: int | None = None
    digests: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    tree_custom_metadata: object = None
    root_custom_metadata: Mapping[str, Any] | None = None
    started_at_ns: int | None = None

    def codec(self, number: int) -> str | None:
        """None: the format has no codecs."""
        return None

    def stored_nbytes(self, number: int) -> int:
        """The bytes of the tensor; see `StorageDetails`."""
        return self.leaves[number].spec.nbytes

    def stored_bytes(self, store: Store) -> int:
        """Count the bytes of all files; see `StoredSize`."""
        found = {leaf.detail.file for leaf in self.leaves if isinstance(leaf.detail, StoredTensor)}
        return bytes_on_medium(store, sorted(found))

    def parts(self, numbers: Sequence[int], leaves: Sequence[int]) -> Sequence[Sequence[Written]]:
        """Nothing: such a file cannot be the base of another checkpoint."""
        return [()] * len(numbers)

    def without_checksums(self) -> SafetensorsCheckpoint:
        """Return the checkpoint as if it had no checksums; see `ChecksummedCheckpoint`."""
        return replace(self, checksums={})

    def reads(self, index: int, stored: StoredLeaf, region: Destination, piece_bytes: int) -> Iterator[Read]:
        """Plan the reads that fill `region`; see `StoredCheckpoint.reads`. A tensor is one plain chunk."""
        tensor = stored.detail
        if not isinstance(tensor, StoredTensor) or not all(start < stop for start, stop in region.bounds):
            return iter(())

        shape = stored.spec.shape or ()
        chunk = StoredChunk(tensor.file, tensor.offset, (0,) * len(shape), shape, stored.spec.itemsize)
        recorded = self.checksums.get(tensor.file, NONE)
        if region.nbytes == stored.spec.nbytes or not len(recorded):
            reads: Iterator[Read] = chunk_reads(index, chunk, region, piece_bytes)
        else:
            pieces = cut_at_pieces(chunk, region.bounds, recorded)
            reads = merge_direct(
                read for piece in pieces for read in chunk_reads(index, piece, region, piece_bytes)
            )

        return with_checksums(reads, self.checksums, piece_bytes)

    def whole_chunks(self, numbers: Sequence[int]) -> WholeChunks:
        """Say where tensors are; see `PackedCheckpoint`. A file may have hundreds of thousands, all tiny."""
        ids, offsets, crc32cs = list[int](), list[int](), list[int]()
        known: dict[str, int] = {}
        table = (
            self.leaves.table if isinstance(self.leaves, StoredLeaves) else None
        )  # no object for each leaf
        for number in numbers:
            tensor = self.leaves[number].detail if table is None else table.details.get(number)
            spec = self.leaves[number].spec if table is None else table.specs[number]
            id_, offset, crc32c = -1, 0, -1
            if isinstance(tensor, StoredTensor):
                recorded, nbytes = self.checksums.get(tensor.file, NONE), spec.nbytes
                is_compared = bool(nbytes and len(recorded))
                found = recorded_crc32c(recorded, tensor.offset, nbytes) if is_compared else -1
                if found is not None:  # else all that was recorded together has to be read, one by one
                    id_ = known.setdefault(tensor.file, len(known))
                    offset, crc32c = tensor.offset, found

            ids.append(id_)
            offsets.append(offset)
            crc32cs.append(crc32c)

        return WholeChunks(list(known), ids, offsets, crc32cs)

    def split(self, separator: str) -> SafetensorsCheckpoint:
        """Return the same leaves as a tree of nested dicts, their names split at `separator`.

        Of a file that penstock wrote, names joined by `.` become the tree that was written, with its
        lists. Of any other, numbers between dots are keys of dicts: names do not tell lists.

        Raises:
            SpecError: If one name is a prefix of another, so that both cannot be in one tree.
        """
        note = self.note if self.note is not None and separator == "." else Note()
        leaves: list[StoredLeaf] = []
        for leaf in self.leaves:
            name = leaf.info.name
            keys, kinds = split_name(name, separator, note.paths.get(name))
            info = ParamInfo(keys, kinds, show_key_path(keys, kinds), leaf.info.directory)
            leaves.append(replace(leaf, info=info))

        check_tree(self.path, [leaf.info for leaf in self.leaves], [leaf.info for leaf in leaves], separator)
        return replace(self, leaves=tuple(leaves))

    def following(self, wanted: Sequence[tuple[ParamInfo, Any]]) -> SafetensorsCheckpoint:
        """Return the same leaves at the places where the target has their names.

        A target's keys joined by `.` make its names. Files that record no None and no empty containers
        are taken to have those of the target.
        """
        places = {info.name: info for info, _ in wanted}
        leaves = [_moved(leaf, places.pop(leaf.info.name, None)) for leaf in self.leaves]
        if self.note is None:
            for info, value in wanted:
                marker = empty_marker(value)
                if marker is not None and info.name in places:
                    leaves.append(StoredLeaf(info, LeafSpec(marker)))

        return replace(self, leaves=tuple(leaves))


def open_checkpoint(store: Store, path: str, item: str | None = None) -> SafetensorsCheckpoint:
    """Read the headers at `path`, a file or a folder; no data.

    Raises:
        NotACheckpointError: If an item is asked for: there are none in this format.
        LinkOutsideError: If a link in a folder leads out of it, and the store does not allow that.
        CorruptCheckpointError: If something there is not what it should be; see `read_files`.
    """
    if item is not None:
        raise NotACheckpointError(path, f"is safetensors, which has no items, and so no item {item!r}")

    if store.kind(path) == "directory":
        store.check_links(path, path)

    return checkpoint_of(store, path, read_files(store, path))


def checkpoint_of(store: Store, path: str, files: FileSet) -> SafetensorsCheckpoint:
    """Return the checkpoint at `path`, whose headers were read. Blocking.

    Raises:
        CorruptCheckpointError: If what penstock noted in a header is not what it should be.
        UnsupportedFormatError: If a later penstock noted it.
    """
    headers = files.headers
    note = _note(headers)
    about = note or Note()
    directory = path if store.kind(path) == "directory" else os.path.dirname(path)
    leaves = StoredLeaves(directory, _table(headers, about))
    recorded = {header.path: header.checksums for header in headers if header.checksums is not None}
    return SafetensorsCheckpoint(
        path, directory, leaves, _custom_metadata(headers, about), note, files, recorded
    )


def _table(headers: Sequence[FileHeader], note: Note) -> LeafTable:
    """Build the spec of every leaf. Equal values are shared between leaves."""
    names: list[str] = []
    specs: list[LeafSpec] = []
    places: list[StoredTensor] = []
    known: dict[tuple[object, ...], LeafSpec] = {}
    for header in headers:
        for tensor in header.tensors:
            name = tensor.name
            typestr, impl = note.kinds.get(name, note.kind), note.random_keys.get(name)
            shared = (typestr, impl, tensor.dtype, tensor.shape)
            spec = known.get(shared)
            if spec is None:
                spec = known[shared] = _spec(header.path, tensor, typestr, impl)

            names.append(name)
            specs.append(spec)
            places.append(StoredTensor(header.path, tensor.offset))

    named = set(names)
    for name, spec in [
        *[(name, LeafSpec("string", text=text)) for name, text in note.strings.items()],
        *[(name, LeafSpec(marker)) for name, marker in note.empty.items()],
    ]:
        if name in named:
            problem = f"its note has {name!r}, which is there already"
            raise CorruptCheckpointError(headers[0].path, problem, key_path=f"[{name!r}]")

        named.add(name)
        names.append(name)
        specs.append(spec)

    return LeafTable(
        keys=[(name,) for name in names],
        kinds=[_FLAT] * len(names),
        specs=specs,
        formats=[None] * len(names),
        details=dict(enumerate(places)),
    )


def _note(headers: Sequence[FileHeader]) -> Note | None:
    for header in headers:
        if notes.MEMBER in header.metadata:
            return notes.decode(header.path, header.metadata[notes.MEMBER])

    return None


def _spec(path: str, tensor: Tensor, typestr: str, impl: str | None) -> LeafSpec:
    if impl is not None and (tensor.dtype != "uint32" or not tensor.shape):
        problem = f"its note says of {tensor.name!r} that it holds PRNG keys, but it is {tensor.dtype}"
        raise CorruptCheckpointError(path, problem, key_path=f"[{tensor.name!r}]")

    return LeafSpec(
        typestr=typestr,
        shape=tensor.shape,
        dtype=tensor.dtype,
        itemsize=numpy_dtype(tensor.dtype).itemsize,
        chunk_shape=tuple([n or 1 for n in tensor.shape]),
        extended_dtype=impl,
    )


def _moved(leaf: StoredLeaf, place: ParamInfo | None) -> StoredLeaf:
    return leaf if place is None else replace(leaf, info=replace(place, directory=leaf.info.directory))


def _custom_metadata(headers: Sequence[FileHeader], note: Note) -> Mapping[str, Any] | None:
    """Join the metadata of all files. Where they disagree, the value is a map from file to text."""
    found: dict[str, dict[str, str]] = {}
    for header in headers:
        for name, text in header.metadata.items():
            found.setdefault(name, {})[os.path.basename(header.path)] = text

    own = {notes.MEMBER, file_digests.MEMBER, *note.added}
    joined: dict[str, Any] = {
        name: next(iter(texts.values())) if len(set(texts.values())) == 1 else texts
        for name, texts in found.items()
        if name not in own
    }
    return {**joined, **note.metadata} or None
