"""Combines what the documents say about each leaf."""

from __future__ import annotations

__all__ = ("ARRAY_TYPES", "ArrayFormats", "has_value", "leaf_table")

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.formats.common import zarr_metadata as zarr
from penstock.handlers.formats.common.key_paths import show_key_path
from penstock.handlers.formats.common.leaf_table import LeafTable
from penstock.handlers.formats.common.zarr_metadata import ArrayFormat
from penstock.handlers.formats.orbax.chunks.stored_index import read_value
from penstock.handlers.formats.orbax.documents import strings_document as string_leaves
from penstock.handlers.formats.orbax.documents.file_names import METADATA
from penstock.handlers.formats.orbax.documents.sealed_documents import SealedDocuments
from penstock.handlers.formats.orbax.documents.tree_metadata import TreeMetadata
from penstock.handlers.formats.orbax.msgpack.embedded_leaf import packed_spec
from penstock.handlers.formats.orbax.msgpack.msgpack_tree import PackedLeaf
from penstock.handlers.ocdbt.index_entries import Index
from penstock.handlers.ocdbt.value_refs import Indirect
from penstock.kernel.errors import CorruptCheckpointError, MissingFileError
from penstock.kernel.protocols.leaf import EMPTY_MARKERS, KeyPath, LeafSpec

ARRAY_TYPES: Final = frozenset({"jax.Array", "np.ndarray", "scalar"})

_SLICE: Final = 8192
"""Leaves whose metadata is copied out of the index at once. Of a million it would be 400 MB."""


def has_value(typestr: str, skip: bool, /) -> bool:
    """Whether the index may have a value under the leaf's name."""
    return not skip and typestr not in EMPTY_MARKERS and typestr != "string"


@final
@dataclass(frozen=True, slots=True)
class ArrayFormats:
    """Finds the metadata of arrays. Many leaves have few shapes, so equal metadata is decoded once."""

    sealed: SealedDocuments
    directory: str
    index: Index
    far: list[str] = field(default_factory=list[str])  #: keys whose values were not in the index itself
    _whole: dict[str, bytes] = field(default_factory=dict[str, bytes])
    _known: dict[bytes, ArrayFormat] = field(default_factory=dict[bytes, ArrayFormat])

    def find(
        self, tree: TreeMetadata, names: Sequence[str], valued: Sequence[int]
    ) -> list[ArrayFormat | None]:
        """Return the format of each leaf; None of what is not in the index.

        Args:
            tree: Which leaves there are.
            names: Of all leaves.
            valued: Those to look for.
        """
        found: list[ArrayFormat | None] = [None] * len(names)
        for start in range(0, len(valued), _SLICE):
            some = valued[start : start + _SLICE]
            for metadata_key in zarr.METADATA_KEYS:
                some = self._find_some(tree, names, some, metadata_key, found)

        return found

    def _find_some(
        self,
        tree: TreeMetadata,
        names: Sequence[str],
        valued: Sequence[int],
        metadata_key: str,
        found: list[ArrayFormat | None],
    ) -> Sequence[int]:
        """Note the formats of some leaves in `found`; return those that have no such key."""
        keys = [f"{names[at]}/{metadata_key}" if names[at] else metadata_key for at in valued]
        row_of = self.index.rows.get
        rows = [row_of(key.encode()) for key in keys]  # a `map` would hold the interpreter to its end
        there = [number for number, row in enumerate(rows) if row is not None]
        values = self.index.inline_values([row for row in rows if row is not None])
        for number, value in zip(there, values, strict=True):
            at = valued[number]
            data = self._far_value(keys[number]) if value is None else value
            found[at] = self._known.get(data) or self._decode(tree, at, keys[number], data)

        return [at for at, row in zip(valued, rows, strict=True) if row is None]

    def _far_value(self, key: str) -> bytes:
        self.far.append(key)
        value = self.index[key.encode()]
        if isinstance(value, Indirect) and value.file in self.sealed.recorded.documents:
            # It lies in front of the index's own nodes, in a file that was compared as a whole.
            if value.file not in self._whole:
                self._whole[value.file] = self.sealed.read(value.file)

            return self._whole[value.file][value.offset : value.offset + value.length]

        return read_value(self.sealed.store, self.directory, value)

    def _decode(self, tree: TreeMetadata, at: int, key: str, data: bytes) -> ArrayFormat:
        try:
            form = zarr.decode(os.path.join(self.directory, key), data)
        except CorruptCheckpointError as error:
            error.key_path = show_key_path(tree.keys[at], tree.kinds[at])
            raise

        return self._known.setdefault(data, form)


def leaf_table(
    directory: str,
    tree: TreeMetadata,
    arrays: ArrayFormats,
    *,
    strings: tuple[str, dict[str, object]],
    shardings: Mapping[str, str],
    random_keys: Mapping[str, str],
    packed: Mapping[KeyPath, PackedLeaf],
    ocdbt: bool = True,
    foreign: frozenset[str] = frozenset(),
) -> LeafTable:
    """Build the spec of every leaf. Equal values are shared between leaves.

    Args:
        directory: Of the tree.
        tree: Which leaves there are.
        arrays: Finds those that are arrays of their own.
        strings: The document of strings, by its path and what it holds.
        shardings: By stored name.
        random_keys: Implementations, by stored name.
        packed: What the msgpack file has, if values lie there.
        ocdbt: Whether arrays lie in a database, or in a directory each.
        foreign: Types of leaves that may lie in files of their handler's own, which alone describes them.

    Raises:
        CorruptCheckpointError: If a value is not where it should be; names the leaf.
    """
    names = [".".join(keys) for keys in tree.keys]
    kinds = list(zip(tree.typestrs, tree.skips, strict=True))
    with_value = {kind for kind in set(kinds) if has_value(*kind)}
    valued = [at for at, kind in enumerate(kinds) if kind in with_value]
    formats = arrays.find(tree, names, valued)
    known: dict[tuple[object, ...], LeafSpec] = {}
    specs: list[LeafSpec] = []
    details: dict[int, object] = {}
    columns = (map(id, formats), tree.write_shapes, map(shardings.get, names), map(random_keys.get, names))
    for at, shared in enumerate(zip(tree.typestrs, tree.skips, *columns, strict=True)):
        spec = known.get(shared)
        if spec is None:
            name, form, (typestr, skip, _, write_shape, sharding, key_impl) = names[at], formats[at], shared
            if form is None and typestr in ARRAY_TYPES and not skip and typestr not in foreign:
                raise _absent(directory, tree, at, ocdbt=ocdbt)
            if tree.in_msgpack(at):
                found = packed.get(tree.keys[at])
                spec, details[at] = packed_spec(directory, tree, at, found, sharding, known)
            elif typestr == "string" and typestr not in foreign:
                key_path = show_key_path(tree.keys[at], tree.kinds[at])
                spec = LeafSpec(typestr, text=string_leaves.find(*strings, name, key_path))
            elif form is None:
                spec = known[shared] = LeafSpec(typestr)
            else:
                spec = known[shared] = _array_spec(form, typestr, write_shape, sharding, key_impl)

        specs.append(spec)

    return LeafTable(tree.keys, tree.kinds, specs, formats, arrays.index.rows, details)


def _array_spec(
    form: ArrayFormat,
    typestr: str,
    write_shape: tuple[int, ...] | None,
    sharding: str | None,
    random_key_impl: str | None,
) -> LeafSpec:
    return LeafSpec(
        typestr=typestr,
        shape=form.shape,
        dtype=form.dtype,
        itemsize=numpy_dtype(form.dtype).itemsize,
        chunk_shape=form.chunk_shape,
        write_shape=write_shape,
        sharding=sharding,
        random_key_impl=random_key_impl,
    )


def _absent(directory: str, tree: TreeMetadata, at: int, *, ocdbt: bool) -> CorruptCheckpointError:
    """Make the error of a leaf that must be an array, where there is no array."""
    name, key_path = ".".join(tree.keys[at]), show_key_path(tree.keys[at], tree.kinds[at])
    if ocdbt:
        problem = f"the array {name!r} is listed in {METADATA} and is not there"
        return CorruptCheckpointError(directory, problem, key_path=key_path)

    path = os.path.join(directory, name, zarr.METADATA_KEYS[1 if tree.use_zarr3 else 0])
    problem = f"is not there as a file, and {METADATA} lists the array"
    return MissingFileError(path, problem, key_path=key_path)
