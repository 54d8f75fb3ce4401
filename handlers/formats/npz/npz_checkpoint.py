"""An opened NumPy archive: its leaves, how to read each, and the tree that its names can be."""

from __future__ import annotations

__all__ = ("NpzCheckpoint", "open_npz")

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, final

from penstock.handlers.dtypes import dtype_name
from penstock.handlers.formats.common.checksummed_reads import with_checksums
from penstock.handlers.formats.common.chunk_regions import StoredChunk, chunk_reads
from penstock.handlers.formats.common.key_paths import check_tree, show_key_path
from penstock.handlers.formats.common.stored_files import bytes_on_medium
from penstock.handlers.formats.npz.archive_members import Archive, Member, read_archive
from penstock.handlers.formats.npz.member_bytes import fill_region
from penstock.kernel.errors import NotACheckpointError
from penstock.kernel.protocols.leaf import KeyKind, LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.protocols.reads import Destination, Read, ScatterRead
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Written

_MAPPING: Final = KeyKind.MAPPING


@final
@dataclass(frozen=True, eq=False)
class NpzCheckpoint:
    """A flat dict of arrays, unless it is split. Immutable; may be used from several threads."""

    path: str
    leaves: Sequence[StoredLeaf]
    archive: Archive

    committed_at_ns: int | None = None
    tree_custom_metadata: object = None
    root_custom_metadata: Mapping[str, Any] | None = None

    @property
    def directory(self) -> str:
        """Where the archive lies."""
        return os.path.dirname(self.path)

    @property
    def custom_metadata(self) -> Mapping[str, Any] | None:
        """The JSON object in the archive's comment."""
        return self.archive.metadata

    @property
    def digests(self) -> Mapping[str, bytes]:
        """None: such a file cannot be the base of another checkpoint."""
        return {}

    def stored_bytes(self, store: Store) -> int:
        """Count the bytes of the file; see `StoredSize`."""
        return bytes_on_medium(store, [self.path])

    def parts(self, numbers: Sequence[int], leaves: Sequence[int]) -> Sequence[Sequence[Written]]:
        """Nothing: such a file cannot be the base of another checkpoint."""
        return [()] * len(numbers)

    def reads(self, index: int, stored: StoredLeaf, region: Destination, piece_bytes: int) -> Iterator[Read]:
        """Plan the reads that fill `region`; see `StoredCheckpoint.reads`.

        A plain member is read in pieces; `compare_plain_members` compares it. Any other is read whole.
        """
        member = stored.detail
        if not isinstance(member, Member) or not all(start < stop for start, stop in region.bounds):
            return iter(())
        if not member.is_plain:
            fill = partial(fill_region, self.path, member, region)
            held, at = member.nbytes if member.is_deflated else 0, member.offset
            read = ScatterRead(index, self.path, at, member.stored_nbytes, fill, decoded_nbytes=held)
            return iter([read])

        shape, itemsize = member.shape, member.dtype.itemsize
        start = (0,) * len(shape)
        chunk = StoredChunk(self.path, member.offset + member.head_nbytes, start, shape, itemsize)
        return with_checksums(chunk_reads(index, chunk, region, piece_bytes), {}, piece_bytes)

    def split(self, separator: str) -> NpzCheckpoint:
        """Return the same leaves as a tree of nested dicts, their names split at `separator`.

        Numbers are keys of dicts: names do not tell lists.

        Raises:
            SpecError: If one name is a prefix of another, so that both cannot be in one tree.
        """
        leaves: list[StoredLeaf] = []
        for leaf in self.leaves:
            keys = tuple(leaf.info.name.split(separator))
            kinds = (_MAPPING,) * len(keys)
            info = ParamInfo(keys, kinds, show_key_path(keys, kinds), self.directory)
            leaves.append(replace(leaf, info=info))

        check_tree(self.path, [leaf.info for leaf in self.leaves], [leaf.info for leaf in leaves], separator)
        return replace(self, leaves=tuple(leaves))

    def following(self, wanted: Sequence[tuple[ParamInfo, Any]]) -> NpzCheckpoint:
        """Return the same leaves at the places where the target has their names."""
        places = {info.name: info for info, _ in wanted}
        leaves = [
            replace(leaf, info=replace(places.get(leaf.info.name, leaf.info), directory=self.directory))
            for leaf in self.leaves
        ]
        return replace(self, leaves=tuple(leaves))


def open_npz(store: Store, path: str, item: str | None = None) -> NpzCheckpoint:
    """Read the directory and the headers of the archive at `path`; no array. Blocking.

    Raises:
        NotACheckpointError: If an item is asked for: there are none in this format.
        CorruptCheckpointError: If it is damaged; see `read_archive`.
    """
    if item is not None:
        raise NotACheckpointError(path, f"is an npz file, which has no items, and so no item {item!r}")

    archive = read_archive(store, path)
    return NpzCheckpoint(path, tuple([_leaf(path, member) for member in archive.members]), archive)


def _leaf(path: str, member: Member) -> StoredLeaf:
    info = ParamInfo((member.name,), (_MAPPING,), member.key_path, os.path.dirname(path))
    if member.text is not None:
        return StoredLeaf(info, LeafSpec("string", text=member.text))

    spec = LeafSpec(
        typestr="np.ndarray",
        shape=member.shape,
        dtype=dtype_name(member.dtype),
        itemsize=member.dtype.itemsize,
        chunk_shape=tuple([n or 1 for n in member.shape]),
    )
    return StoredLeaf(info, spec, member)
