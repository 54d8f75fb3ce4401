"""Reads the documents of a tree and combines what they say about each leaf.

`open_tree` is the door; `read_structure` reads the structure alone, from `_METADATA`, from the msgpack file
of early Orbax, or from the names of directories. `RememberedDocuments` keeps what was decoded last.

No array byte is read and no jax is imported.

Source:
    ORBAX_FORMAT.md §1.
"""

from __future__ import annotations

__all__ = (
    "ARRAY_TYPES",
    "MOST_LOOKED_FOR",
    "RememberedDocuments",
    "Source",
    "array_directories",
    "bytes_to_decode",
    "check_files",
    "directory_index",
    "open_tree",
)

import itertools
import math
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Final, TypeAlias, TypeVar, final

from penstock.handlers.formats import zarr
from penstock.handlers.formats.leaf_table import LeafTable, StoredLeaves, show_key_path
from penstock.handlers.formats.orbax.checkpoint_documents import SealedDocuments
from penstock.handlers.formats.orbax.discovery import ItemKind, ItemPlace, json_file, proto_file
from penstock.handlers.formats.orbax.file_names import (
    ARRAY_METADATAS,
    LEGACY_MSGPACK,
    MANIFEST,
    METADATA,
    OF_A_PROCESS,
    SHARDING,
    STRINGS,
)
from penstock.handlers.formats.orbax.msgpack_files import PackedLeaf, packed_spec, read_tree
from penstock.handlers.formats.orbax.stored_checkpoint import OrbaxCheckpoint
from penstock.handlers.formats.orbax.tree_metadata import (
    StoredType,
    TreeDocument,
    TreeEntries,
    decode_random_keys,
    decode_shardings,
    decode_strings,
    decode_tree_metadata,
    find_string,
    stored_text,
    tuple_paths,
)
from penstock.handlers.formats.untrusted import EnteredDirectories, check_inside
from penstock.handlers.formats.zarr import METADATA_KEYS, ArrayFormat, prefix_of
from penstock.handlers.ocdbt.database_reader import index_bytes, read_index
from penstock.handlers.ocdbt.index import Index, RememberedKeys
from penstock.handlers.ocdbt.wire_format import Indirect, Inline, Value
from penstock.kernel.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MissingFileError,
    PenstockError,
    TruncatedDataError,
    UnsupportedFormatError,
)
from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity
from penstock.kernel.protocols.layouts import SMALL_DOCUMENT
from penstock.kernel.protocols.leaf import EMPTY_MARKERS, KeyKind, KeyPath, LeafSpec
from penstock.kernel.protocols.stores import Store

T = TypeVar("T")

NONE: Final[dict[str, Any]] = {}
"""What an absent document says. A single object, because results are cached by identity. Never changed."""


@final
@dataclass(frozen=True, slots=True)
class Source:
    """The store and the directory that documents are read from, and the caches."""

    store: Store
    remembered: RememberedDocuments  #: documents decoded before; those decoded now are added
    whole: bool = True  #: whether every data file must be there in its whole length
    foreign: frozenset[str] = frozenset()  #: types of leaves that may be in their handler's own files


# Host bytes for each byte stored: the document itself, and what is made of it, as measured.
_METADATA_BYTES: Final = 2
_STRINGS_BYTES: Final = 8
_SHARDING_BYTES: Final = 4
_INDEX_BYTES: Final = 5
_JSON_BYTES: Final = 8  # a list of short numbers
_TEXT_BYTES: Final = 3


def bytes_to_decode(store: Store, place: ItemPlace) -> int:
    """Add up what the long documents at `place` take, about. Blocking; reads the manifest at most.

    A msgpack file counts as nothing: it holds arrays, too, and how much is structure is known only once it
    is read.

    Raises:
        StorageError: If the length of a file cannot be found out.
        CorruptCheckpointError: If the manifest is damaged.
    """
    factors = {METADATA: _METADATA_BYTES, STRINGS: _STRINGS_BYTES, SHARDING: _SHARDING_BYTES}
    if place.kind is ItemKind.JSON:
        factors[json_file(store, place.directory, place.names) or ""] = _JSON_BYTES
    elif place.kind is ItemKind.PROTO:
        factors[proto_file(place.names) or ""] = _TEXT_BYTES

    needed = 0
    for name, factor in factors.items():
        nbytes = store.size(os.path.join(place.directory, name)) if name in place.names else 0
        needed += nbytes * factor if nbytes > SMALL_DOCUMENT else 0

    if MANIFEST in place.names:
        nbytes = index_bytes(store, place.directory)
        needed += nbytes * _INDEX_BYTES if nbytes > SMALL_DOCUMENT else 0

    return needed


def open_tree(source: Source, place: ItemPlace) -> OrbaxCheckpoint:
    """Read the documents of the tree at `place`.

    Raises:
        IncompleteCheckpointError: If a save was interrupted there.
        UnsupportedFormatError: If it is of a kind that penstock recognises and does not read.
        TruncatedDataError: If a data file is shorter than the index says.
        CorruptCheckpointError: If a document is damaged or missing; the message names it.
    """
    if METADATA not in place.names:
        place.sealed.check_absent(METADATA)  # the names of arrays would tell another tree

    structure = read_structure(source.store, place, source.remembered)
    tree = structure.tree
    uses_ocdbt = MANIFEST in place.names if tree.use_ocdbt is None else tree.use_ocdbt
    index = _index(source, place, tree, uses_ocdbt=uses_ocdbt)
    table = _leaf_table(source, place, structure, index, uses_ocdbt=uses_ocdbt)
    return OrbaxCheckpoint(
        store=source.store,
        path=place.path,
        directory=place.directory,
        leaves=StoredLeaves(place.directory, table),
        custom_metadata=place.checkpoint.custom_metadata,
        committed_at_ns=place.checkpoint.committed_at_ns,
        uses_ocdbt=uses_ocdbt,
        all_chunks_written=tree.all_chunks_written,
        checksums=place.sealed.recorded.files,
        digests=place.sealed.recorded.digests,
        index=index,
        tree_custom_metadata=deepcopy(tree.custom_metadata),  # the caller may change it
        root_custom_metadata=place.root_metadata,
        started_at_ns=place.checkpoint.started_at_ns,
        uses_zarr3=tree.use_zarr3,
    )


def _index(source: Source, place: ItemPlace, tree: TreeDocument, *, uses_ocdbt: bool) -> Index:
    """Find where the arrays of a tree are.

    Raises:
        IncompleteCheckpointError: If each process wrote its part but the merge at the end of the save is
            missing. A process knows only its own chunks, and most know no array's shape: no part is read.
        CorruptCheckpointError: If there is no index of arrays, or it is damaged.
    """
    store, directory = source.store, place.directory
    parts = sorted(name for name in place.names if name.startswith(OF_A_PROCESS))
    is_merged = not parts or MANIFEST in place.names or tree.use_ocdbt is False
    if not is_merged and any(map(has_value, tree.types)):
        problem = f"has no {MANIFEST}: its parts were never merged ({', '.join(parts)})"
        raise IncompleteCheckpointError(directory, problem)

    if not uses_ocdbt:
        entries = zip(tree.keys, tree.types, strict=True)
        names = [".".join(keys) for keys, type_ in entries if has_value(type_)]
        return Index.of(directory_index(store, directory, names, place.sealed.check))
    if MANIFEST not in place.names:
        expected = ARRAY_TYPES - source.foreign
        if not any(type_.typestr in expected and not type_.skip for type_ in tree.types):
            return Index.of({})
        raise CorruptCheckpointError(os.path.join(directory, MANIFEST), "is missing, and there are arrays")

    index = read_index(store, directory, source.remembered.keys)
    check_files(store, directory, index.needed(), whole=source.whole)
    return index


def _leaf_table(
    source: Source, place: ItemPlace, structure: Structure, index: Index, *, uses_ocdbt: bool
) -> LeafTable:
    """Return the table of the leaves: one made before from the same documents, or a new one."""
    texts = _document(source, place, STRINGS, decode_strings)
    shardings = _document(source, place, SHARDING, decode_shardings)
    random_keys = _document(source, place, ARRAY_METADATAS, decode_random_keys)
    key = ByIdentity(structure.tree, texts, shardings, random_keys), index.content_key()
    table = source.remembered.tables.get(key)
    if table is not None:
        return table

    table, all_inline = leaf_table(
        place,
        structure,
        index,
        texts=texts,
        shardings=shardings,
        random_keys=random_keys,
        uses_ocdbt=uses_ocdbt,
        foreign=source.foreign,
    )
    # Values that are elsewhere may have changed by the next time, and another handler may be asked.
    if all_inline and not structure.packed and not source.foreign:
        source.remembered.tables.put(key, table, _BYTES_OF_A_LEAF * len(table.keys))

    return table


def _document(
    source: Source,
    place: ItemPlace,
    name: str,
    decoder: Callable[[str, bytes], dict[str, T]],
) -> dict[str, T]:
    """Return the content of a document next to `_METADATA`; `NONE` if it is absent."""
    file = name if name in place.names else None
    if file is not None and name == ARRAY_METADATAS:  # a folder; every process records the same in its file
        files = source.store.list_directory(os.path.join(place.directory, name))
        file = f"{name}/{min(files)}" if files else None
    if file is None:
        place.sealed.check_absent(name)
        return NONE

    path = os.path.join(place.directory, file)
    return source.remembered.decode(name, decoder, path, place.sealed.read(file))


ARRAY_TYPES: Final = frozenset({"jax.Array", "np.ndarray", "scalar"})

_SLICE: Final = 8192
"""Leaves whose metadata is copied out of the index at once. Of a million it would be 400 MB."""


def has_value(type_: StoredType, /) -> bool:
    """Return whether the index may have a value under the name of a leaf of this type."""
    return not type_.skip and type_.typestr not in EMPTY_MARKERS and type_.typestr != "string"


def find_formats(
    sealed: SealedDocuments,
    index: Index,
    tree: TreeDocument,
    names: Sequence[str],
    valued: Sequence[int],
) -> tuple[list[ArrayFormat | None], bool]:
    """Find the metadata of arrays. Many leaves have few shapes, so equal metadata is decoded once.

    Args:
        sealed: The documents in the directory of the tree.
        index: Where the metadata is.
        tree: Which leaves there are.
        names: Of all leaves.
        valued: The leaves to look for.

    Returns:
        The format of each leaf, None of what is not in the index; and whether the index itself had all of it.
    """
    found: list[ArrayFormat | None] = [None] * len(names)
    known: dict[bytes, ArrayFormat] = {}
    placed: dict[int, ArrayFormat] = {}  # the same, by the place of the value in the index
    files: dict[str, bytes] = {}  # data files that were compared as a whole
    all_inline = True
    keys_of_metadata = METADATA_KEYS[::-1] if tree.use_zarr3 else METADATA_KEYS
    for start in range(0, len(valued), _SLICE):
        some = valued[start : start + _SLICE]
        for metadata_key in keys_of_metadata:
            if not some:
                break

            keys = [(f"{names[at]}/{metadata_key}" if names[at] else metadata_key).encode() for at in some]
            rows = index.table.find(keys)
            there = [(at, row) for at, row in zip(some, rows, strict=True) if row is not None]
            places = index.inline_places([row for _, row in there])
            forms = list(map(placed.get, places))
            for (at, row), place, form in zip(there, places, forms, strict=True):
                found[at] = form or placed.get(place)
                if found[at] is None:
                    value, key = index.value(row), index.keys_in_order[row].decode()
                    all_inline = all_inline and isinstance(value, Inline)
                    data = value.value if isinstance(value, Inline) else _far_value(sealed, value, files)
                    if data not in known:
                        try:
                            known[data] = zarr.decode(os.path.join(sealed.directory, key), data)
                        except CorruptCheckpointError as error:
                            error.key_path = show_key_path(tree.keys[at], tree.kinds[at])
                            raise

                    found[at] = known[data]
                    if place >= 0:
                        placed[place] = known[data]

            some = [at for at, row in zip(some, rows, strict=True) if row is None]

    return found, all_inline


def _far_value(sealed: SealedDocuments, value: Indirect, files: dict[str, bytes]) -> bytes:
    """Return the metadata of an array that is not in the index itself."""
    if value.file not in sealed.recorded.documents:
        return read_value(sealed.store, sealed.directory, value)

    # It is in front of the index's own nodes, in a file that was compared as a whole.
    if value.file not in files:
        files[value.file] = sealed.read(value.file)

    return files[value.file][value.offset : value.offset + value.length]


def leaf_table(
    place: ItemPlace,
    structure: Structure,
    index: Index,
    *,
    texts: dict[str, object],
    shardings: Mapping[str, str],
    random_keys: Mapping[str, str],
    uses_ocdbt: bool,
    foreign: frozenset[str],
) -> tuple[LeafTable, bool]:
    """Build the spec of every leaf. Equal values are shared between leaves.

    Args:
        place: Of the tree.
        structure: Which leaves there are, and their values in the msgpack file.
        index: Where arrays are, and their metadata.
        texts: What the document of strings has.
        shardings: By stored name.
        random_keys: Implementations, by stored name.
        uses_ocdbt: Whether arrays are in a database, or in a directory each.
        foreign: Types of leaves that may be in files of their handler's own, which alone describes them.

    Returns:
        The table, and whether all metadata of arrays was in the index itself.

    Raises:
        CorruptCheckpointError: If a value is not where it should be; names the leaf.
    """
    tree = structure.tree
    names = [".".join(keys) for keys in tree.keys]
    types = {id(type_): type_ for type_ in tree.types}
    with_value = {number for number, type_ in types.items() if has_value(type_)}
    valued = [at for at, type_ in enumerate(tree.types) if id(type_) in with_value]
    formats, all_inline = find_formats(place.sealed, index, tree, names, valued)
    none: list[None] = [None] * len(names)
    columns = (
        map(id, tree.types),
        map(id, formats),
        map(shardings.get, names) if shardings else none,
        map(random_keys.get, names) if random_keys else none,
    )
    made = _LeafSpecs(place.directory, structure, texts, foreign, uses_ocdbt=uses_ocdbt)
    known = made.known
    specs: list[LeafSpec] = []
    for at, shared in enumerate(zip(*columns, strict=True)):
        spec = known.get(shared)
        specs.append(made.make(at, names[at], formats[at], shared) if spec is None else spec)

    return LeafTable(tree.keys, tree.kinds, specs, formats, index.table, made.details), all_inline


_Alike: TypeAlias = tuple[int, int, str | None, str | None]
"""What leaves have in common that have one spec: the identities of type and format, sharding, random key."""


@final
class _LeafSpecs:
    """Makes the specs of leaves, and keeps those that others may share; see `leaf_table`."""

    def __init__(
        self,
        directory: str,
        structure: Structure,
        texts: dict[str, object],
        foreign: frozenset[str],
        *,
        uses_ocdbt: bool,
    ) -> None:
        self._directory, self._structure = directory, structure
        self._texts, self._foreign, self._uses_ocdbt = texts, foreign, uses_ocdbt
        self.known: dict[tuple[object, ...], LeafSpec] = {}
        self.details: dict[int, object] = {}  #: of leaves in the msgpack file

    def make(self, at: int, name: str, form: ArrayFormat | None, alike: _Alike) -> LeafSpec:
        """Describe a leaf.

        Raises:
            CorruptCheckpointError: If its value is not where it should be.
        """
        tree, (_, _, sharding, key_impl) = self._structure.tree, alike
        typestr, write_shape, skip = tree.types[at]
        is_foreign = typestr in self._foreign
        if form is None and typestr in ARRAY_TYPES and not skip and not is_foreign:
            raise _absent(self._directory, tree, at, ocdbt=self._uses_ocdbt)
        if tree.in_msgpack(at):
            found = self._structure.packed.get(tree.keys[at])
            spec, self.details[at] = packed_spec(self._directory, tree, at, found, sharding, self.known)
            return spec
        if typestr == "string" and not is_foreign:
            path = os.path.join(self._directory, STRINGS)
            key_path = show_key_path(tree.keys[at], tree.kinds[at])
            return LeafSpec(typestr, text=find_string(path, self._texts, name, key_path))
        if form is None:
            # A handler of another type may have stored a text.
            text = stored_text(self._texts, name) if self._texts and not is_foreign else None
            spec = LeafSpec(typestr, text=text)
        else:
            spec = LeafSpec(
                typestr=typestr,
                shape=form.shape,
                dtype=form.dtype,
                itemsize=form.itemsize,
                chunk_shape=form.chunk_shape,
                write_shape=write_shape,
                sharding=sharding,
                extended_dtype=key_impl,
            )
        if spec.text is None:
            self.known[alike] = spec

        return spec


def _absent(directory: str, tree: TreeDocument, at: int, *, ocdbt: bool) -> CorruptCheckpointError:
    """Make the error of a leaf that must be an array, where there is no array."""
    name, key_path = ".".join(tree.keys[at]), show_key_path(tree.keys[at], tree.kinds[at])
    if ocdbt:
        problem = f"the array {name!r} is listed in {METADATA} and is not there"
        return CorruptCheckpointError(directory, problem, key_path=key_path)

    path = os.path.join(directory, name, zarr.METADATA_KEYS[1 if tree.use_zarr3 else 0])
    problem = f"is not there as a file, and {METADATA} lists the array"
    return MissingFileError(path, problem, key_path=key_path)


_MOST_LEVELS: Final = 64  # of directories


@final
@dataclass(frozen=True, slots=True)
class Structure:
    """The leaves, and the values of those not stored as arrays."""

    tree: TreeDocument
    packed: Mapping[KeyPath, PackedLeaf] = field(default_factory=dict[KeyPath, PackedLeaf])


def read_structure(store: Store, place: ItemPlace, remembered: RememberedDocuments) -> Structure:
    """Read which leaves the tree at `place` has. `_METADATA` is decoded only if it was not before.

    Raises:
        CorruptCheckpointError: If a document is damaged, or lacks a value that another says is in it.
        UnsupportedFormatError: If it is valid, but penstock cannot represent it.
    """
    if place.kind is ItemKind.PACKED:
        place.sealed.check_file(LEGACY_MSGPACK)
        return _packed(read_tree(store, os.path.join(place.directory, LEGACY_MSGPACK)))
    if place.kind is ItemKind.NAMED:
        names = array_directories(store, place.directory)
        return Structure(_named(place.directory, names, _sharded(place)))

    path = os.path.join(place.directory, METADATA)
    if METADATA not in place.names and _is_single_array(store, place):
        return Structure(_named(place.directory, [LEGACY_MSGPACK], _sharded(place)))
    if METADATA not in place.names:
        raise MissingFileError(path, "is missing, and the structure of the tree with it")

    tree, first = remembered.decode(METADATA, _decode, path, place.sealed.read(METADATA))
    # Early Orbax always wrote this file, but it is read only if it is recorded to hold values.
    if first is None:
        return Structure(tree)

    packed = os.path.join(place.directory, LEGACY_MSGPACK)
    if LEGACY_MSGPACK not in place.names:
        key_path = show_key_path(tree.keys[first], tree.kinds[first])
        raise CorruptCheckpointError(packed, "is missing, and values are in it", key_path=key_path)

    place.sealed.check_file(LEGACY_MSGPACK)
    found = {leaf.keys: leaf for leaf in read_tree(store, packed)}
    elsewhere = {keys for keys, leaf in found.items() if leaf.elsewhere}
    rows = zip(tree.keys, tree.types, strict=True)
    types = [type_._replace(skip=type_.skip and keys not in elsewhere) for keys, type_ in rows]
    return Structure(replace(tree, types=types), found)


def _decode(path: str, data: bytes) -> tuple[TreeDocument, int | None]:
    """Read `_METADATA`, and return the first leaf whose value is in the msgpack file."""
    tree = decode_tree_metadata(path, data)
    has_types = tree.value_metadata_tree is not None
    if has_types and (tuples := tuple_paths(path, tree.value_metadata_tree)):
        rows = zip(tree.keys, tree.kinds, strict=True)
        tree = replace(tree, kinds=[_with_tuples(keys, kinds, tuples) for keys, kinds in rows])

    skipped = (at for at, type_ in enumerate(tree.types) if type_.skip)  # most trees have none
    return tree, next(filter(tree.in_msgpack, skipped), None)


def _with_tuples(
    keys: KeyPath, kinds: tuple[KeyKind, ...], tuples: frozenset[KeyPath]
) -> tuple[KeyKind, ...]:
    return tuple(
        [
            KeyKind.TUPLE if kind is KeyKind.SEQUENCE and keys[:depth] in tuples else kind
            for depth, kind in enumerate(kinds)
        ]
    )


def _packed(leaves: Sequence[PackedLeaf]) -> Structure:
    """Make the structure from the msgpack file alone. It has no types for arrays in other files."""
    columns = TreeEntries(
        keys=[leaf.keys for leaf in leaves],
        kinds=[leaf.kinds for leaf in leaves],
        types=[StoredType(leaf.typestr, skip=not leaf.elsewhere) for leaf in leaves],
    )
    return Structure(_tree(columns), {leaf.keys: leaf for leaf in leaves})


def _is_single_array(store: Store, place: ItemPlace) -> bool:
    """Return whether a database is an item of one array of Orbax 0.4, which needs no other document."""
    if MANIFEST not in place.names:
        return False

    keys = read_index(store, place.directory)
    return {key.rpartition(b"/")[0] for key in keys} == {LEGACY_MSGPACK.encode()}


def _sharded(place: ItemPlace) -> Collection[str]:
    """Name the arrays that have a recorded sharding: those that were jax.Arrays."""
    if SHARDING not in place.names:
        return ()

    path = os.path.join(place.directory, SHARDING)
    return decode_shardings(path, place.sealed.read(SHARDING))


def _named(directory: str, names: Iterable[str], sharded: Collection[str]) -> TreeDocument:
    """Build a tree of dicts from names, in which a dot may separate keys or be part of one."""
    found = dict.fromkeys([tuple(name.split(".")) if name else () for name in sorted(names)])
    for keys in found:
        above = next((keys[:n] for n in range(len(keys)) if keys[:n] in found), None)
        if above is not None:
            problem = f"has no {METADATA}, and of {'.'.join(above)!r} and {'.'.join(keys)!r}"
            raise UnsupportedFormatError(directory, f"{problem} one would be inside of the other")

    kinds = [(KeyKind.MAPPING,) * len(keys) for keys in found]
    jax_array, array = StoredType("jax.Array"), StoredType("np.ndarray")
    types = [jax_array if ".".join(keys) in sharded else array for keys in found]
    return _tree(TreeEntries(list(found), kinds, types))


def _tree(columns: TreeEntries) -> TreeDocument:
    return TreeDocument(*columns, use_ocdbt=None, use_zarr3=False, all_chunks_written=False)


def array_directories(store: Store, directory: str) -> Iterator[str]:
    """Yield the path, from `directory`, of every directory in it that holds an array. Blocking.

    Raises:
        CorruptCheckpointError: If links make too many paths.
    """
    entered = EnteredDirectories(store)
    pending = [("", 0)]
    while pending:
        name, levels = pending.pop()
        path = os.path.join(directory, name) if name else directory
        names = store.list_directory(path)
        if any(key in names for key in METADATA_KEYS):
            yield name
            continue

        entered.enter(path)
        if levels < _MOST_LEVELS:
            below = [inner for inner in names if store.kind(os.path.join(path, inner)) == "directory"]
            pending += [(f"{name}/{inner}" if name else inner, levels + 1) for inner in below]


_KINDS: Final = 4  # of documents: a tree has one of each
_TREES: Final = 2
_BYTES_OF_A_LEAF: Final = 200


@final
@dataclass(frozen=True, slots=True, eq=False)
class RememberedDocuments:
    """Decodes documents and remembers the last few. Thread-safe.

    A document is recognised by a cryptographic digest of its bytes, so the result can never be that of
    another document. Callers must not change the result.
    """

    keys: RememberedKeys = field(default_factory=RememberedKeys, init=False, repr=False)
    _documents: BoundedCache[tuple[str, bytes], Any] = field(
        default_factory=lambda: BoundedCache(_KINDS * _TREES), init=False, repr=False
    )
    tables: BoundedCache[Hashable, LeafTable] = field(
        default_factory=lambda: BoundedCache(_TREES), init=False, repr=False
    )
    """Those made last, each by the documents and the inline part of the index that it was made from."""

    @property
    def caches(self) -> Sequence[BoundedCache[Any, Any]]:
        """See `Caching`."""
        return (self._documents, self.tables, *self.keys.caches)

    def decode(self, kind: str, decoder: Callable[[str, bytes], T], path: str, data: bytes) -> T:
        """Return `decoder(path, data)`, made now or before.

        Args:
            kind: What document it is; one kind has one decoder.
            decoder: Depends on `data` alone; `path` is for its errors, which are not remembered.
            path: Where `data` was found.
            data: The content of the file.
        """
        key = kind, blake2b(data).digest()
        found: T | None = self._documents.get(key)
        if found is None:
            found = decoder(path, data)
            self._documents.put(key, found, len(data))

        return found


MOST_LOOKED_FOR: Final = 16
"""An array with at most this many chunks is looked up chunk by chunk; for more its directory is listed."""


Check: TypeAlias = Callable[[str, bytes], None]
"""Compares a document, by its name and content, with what was written."""


def _as_it_is(name: str, data: bytes, /) -> None:
    """Accept a document without a comparison."""


MOST_VALUE_BYTES: Final = 2**20
"""The longest metadata of an array. That of an array with 64 axes has some thousand bytes."""


def directory_index(
    store: Store, directory: str, names: Iterable[str], check: Check = _as_it_is
) -> dict[bytes, Value]:
    """Index arrays that are in a directory each, as an OCDBT database would.

    Raises:
        ChecksumError: If the metadata of an array is not as it was written; `check` raises it.
        CorruptCheckpointError: If a name leads out of `directory`.
    """
    names = list(names)
    for name in names:
        check_inside(directory, name)

    index: dict[bytes, Value] = {}
    for name in _add_small(index, store, directory, names, check):
        for key, is_file in _entries(store, directory, name):
            path = os.path.join(directory, key)
            is_metadata = key.rpartition("/")[2] in METADATA_KEYS
            if not is_file and not is_metadata:
                index[key.encode()] = Indirect(key, 0, -1)  # no chunk has this length
            elif is_file and is_metadata:
                data = store.read_file(path)
                check(key, data)
                index[key.encode()] = Inline(data)
            elif is_file:
                index[key.encode()] = Indirect(key, 0, store.size(path))

    return index


def _add_small(
    index: dict[bytes, Value], store: Store, directory: str, names: list[str], check: Check
) -> list[str]:
    """Look for the chunks of arrays that have few, by their names; return the arrays that remain."""
    chunks_of: dict[bytes, Sequence[str] | None] = {}
    chunks: list[str] = []
    left: list[str] = []
    for metadata_key in METADATA_KEYS:
        keys = [f"{prefix_of(name)}{metadata_key}" for name in names]
        documents = store.read_files([f"{directory}/{key}" for key in keys])
        for name, key, data in zip(names, keys, documents, strict=True):
            if data is None:
                continue

            check(key, data)
            if data not in chunks_of:
                chunks_of[data] = _few_chunks(key, data)

            found = chunks_of[data]
            if found is None:
                left.append(name)
            else:
                index[key.encode()] = Inline(data)
                chunks.extend([f"{prefix_of(name)}{chunk}" for chunk in found])

        names = [name for name, data in zip(names, documents, strict=True) if data is None]

    for key, nbytes in zip(chunks, store.file_sizes([f"{directory}/{key}" for key in chunks]), strict=True):
        if nbytes is not None:
            index[key.encode()] = Indirect(key, 0, nbytes)

    return [*left, *names]


def _few_chunks(path: str, document: bytes) -> Sequence[str] | None:
    """The names of the chunks of an array; None if they are many, or the document cannot be read."""
    try:
        form = zarr.decode(path, document)
    except PenstockError:
        return None  # reported when it is needed

    if math.prod(form.grid_shape) > MOST_LOOKED_FOR:
        return None

    return [form.chunk_key(at) for at in itertools.product(*map(range, form.grid_shape))]


def read_value(store: Store, directory: str, value: Value) -> bytes:
    """Fetch a small value, from the index itself or from a data file."""
    if isinstance(value, Inline):
        return value.value

    path = os.path.join(directory, value.file)
    if value.length > MOST_VALUE_BYTES:
        raise CorruptCheckpointError(path, f"{value.length} bytes are no metadata of an array")

    data = bytearray(value.length)
    file = store.open_data_file(path)
    try:
        file.read_at(value.offset, [memoryview(data)])
    finally:
        file.close()

    return bytes(data)


def check_files(store: Store, directory: str, needed: Mapping[str, int], *, whole: bool = True) -> None:
    """Check that every data file is in `directory` and, if it must be whole, is as long as the index needs.

    Args:
        store: Where.
        directory: What the files are relative to.
        needed: Bytes that must be in each file.
        whole: Whether to look at the files at all, or only at their names.

    Raises:
        TruncatedDataError: If one is too short.
        CorruptCheckpointError: If one is missing, or is outside of `directory`.
    """
    for file in needed:
        check_inside(directory, file)
    if not whole:
        return

    paths = [os.path.join(directory, file) for file in needed]
    sizes = store.file_sizes(paths)
    for path, nbytes, found in zip(paths, needed.values(), sizes, strict=True):
        if found is None or found < 0:
            raise CorruptCheckpointError(path, "is missing, and the index refers to it")
        if found < nbytes:
            raise TruncatedDataError(path, nbytes, found)


def _entries(store: Store, directory: str, name: str) -> Iterator[tuple[str, bool]]:
    """Yield every path below a directory, relative to it, and whether it is a file.

    Raises:
        CorruptCheckpointError: If links make too many paths.
    """
    if store.kind(os.path.join(directory, name)) != "directory":
        return

    entered = EnteredDirectories(store)
    pending = [name]
    while pending:
        outer = pending.pop()
        path = os.path.join(directory, outer)
        entered.enter(path)
        for entry in store.list_directory(path):
            inner = f"{outer}/{entry}" if outer else entry
            is_directory = store.kind(os.path.join(directory, inner)) == "directory"
            yield inner, not is_directory
            if is_directory:
                pending.append(inner)
