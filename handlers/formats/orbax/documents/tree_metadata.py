"""`_METADATA`: the structure of the tree and the type of each leaf.

Source:
    ORBAX_FORMAT.md §1.1.
"""

from __future__ import annotations

__all__ = ("TreeMetadata", "decode", "encode")

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, Final, final

from penstock.handlers.formats.orbax.documents import tuple_types as rich_types
from penstock.handlers.formats.orbax.documents.tree_entries import Columns, decode_entries
from penstock.kernel.config.save_format import SaveFormat
from penstock.kernel.errors import CorruptCheckpointError, UnsupportedFormatError
from penstock.kernel.protocols.leaf import EMPTY_MARKERS, KeyKind, KeyPath, LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_infos import InfoRun, LeafInfos, runs_of

_DEFAULT: Final = SaveFormat()
_EMPTY_NAMED_TUPLE: Final = LeafSpec("NamedTuple")  # without rich types it is recorded as None

_ENDS: Final = {kind: f', "key_type": {kind:d}}}' for kind in KeyKind}  # of the entry of a key

MOST_STEPS: Final = 1000
"""Keys of one key path: Python's own limit for nested calls, which restoring a deeper tree would pass."""

_DEEP: Final = 64


@final
@dataclass(frozen=True, slots=True)
class TreeMetadata:
    """The whole document. Its entries for leaves and empty markers are in columns of equal length.

    Columns of strings and of tuples of strings cost the garbage collector next to nothing.
    """

    keys: Sequence[KeyPath]  #: as recorded, which is JAX's flatten order
    kinds: Sequence[tuple[KeyKind, ...]]
    typestrs: Sequence[str]
    write_shapes: Sequence[tuple[int, ...] | None]
    skips: Sequence[bool]
    """No array is stored under this name: an empty marker, or (before 0.5.16) a value in msgpack."""

    use_ocdbt: bool | None  #: None in old checkpoints: OCDBT if there is a manifest
    use_zarr3: bool
    all_chunks_written: bool  #: a missing chunk is an error; otherwise it reads as the fill value
    custom_metadata: object = None  #: the caller's metadata, any JSON
    value_metadata_tree: object = None  #: as recorded; see `rich_types`

    def in_msgpack(self, at: int) -> bool:
        """Whether the value of a leaf lies in the file beside `_METADATA` that early Orbax wrote."""
        return self.skips[at] and self.typestrs[at] not in EMPTY_MARKERS


def encode(
    infos: Sequence[ParamInfo],
    specs: Sequence[LeafSpec],
    form: SaveFormat = _DEFAULT,
    custom_metadata: Mapping[str, Any] | None = None,
) -> Iterator[bytes]:
    """Encode the document for leaves in flatten order, empty markers among them, stored as `form` says.

    The bytes are those of `json.dumps`. They are assembled from text fragments, because thousands of leaves
    have few kinds and few parents: dicts for all of them would take ten times as long and trigger the garbage
    collector.

    Yields:
        Slices of the document, one for each run of siblings.
    """
    values = _values(infos, specs)
    yield b'{"tree_metadata": {'
    if len(infos) == 1 and not infos[0].keys:
        yield f'"()": {{"key_metadata": [], "value_metadata": {values[0]}}}'.encode()
    else:
        at, comma = 0, ""
        for run in runs_of(infos):
            yield f"{comma}{', '.join(_entries(run, values[at : at + len(run.keys)]))}".encode()
            at, comma = at + len(run.keys), ", "

    about: dict[str, object] = {"use_ocdbt": form.ocdbt, "use_zarr3": form.zarr == 3}
    about |= {"store_array_data_equal_to_fill_value": True, "custom_metadata": custom_metadata}
    if form.rich_types:
        about["value_metadata_tree"] = rich_types.encode(zip(infos, values, strict=True))

    rest = json.dumps(about)
    yield f"}}, {rest[1:]}".encode()


def _entries(run: InfoRun, values: Sequence[str]) -> list[str]:
    """Encode the entries of siblings."""
    name = _quoted("(" + "".join([f"{key!r}, " for key in run.outer]))[:-1]
    end = ")" if run.outer else ",)"
    outer = zip(run.outer, run.outer_kinds, strict=True)
    path = "".join([f'{{"key": {_quoted(key)}{_ENDS[kind]}, ' for key, kind in outer])
    rows = zip(run.keys, run.kinds, values, strict=True)
    return [
        f'{name}{_quoted(repr(key))[1:-1]}{end}": {{"key_metadata": [{path}{{"key": {_quoted(key)}'
        f'{_ENDS[kind]}], "value_metadata": {value}}}'
        for key, kind, value in rows
    ]


def _values(infos: Sequence[ParamInfo], specs: Sequence[LeafSpec]) -> list[str]:
    """Encode the type of each leaf."""
    known = {id(spec): spec for spec in specs}  # most leaves share a few
    texts = {number: json.dumps(_value_metadata(spec)) for number, spec in known.items()}
    found = [texts[id(spec)] for spec in specs]
    if isinstance(infos, LeafInfos):  # without the types of nodes
        return found

    for at, (info, spec) in enumerate(zip(infos, specs, strict=True)):
        if info.nodes and info.nodes[-1] and spec.typestr == "None":
            found[at] = json.dumps(_value_metadata(_EMPTY_NAMED_TUPLE))

    return found


def _value_metadata(spec: LeafSpec) -> dict[str, object]:
    value: dict[str, object] = {"value_type": spec.typestr, "skip_deserialize": spec.is_empty_marker}
    if spec.write_shape is not None and spec.shapes_recorded:
        value["write_shape"] = spec.write_shape

    return value


def decode(path: str, data: bytes) -> TreeMetadata:
    """Read the document. Unknown members are ignored, at every level.

    An entry whose key path is a proper prefix of another one is left out, as Orbax does.

    Args:
        path: Where `data` was found, for the error.
        data: The content of the file.

    Raises:
        CorruptCheckpointError: If it is malformed.
    """
    columns, document = decode_entries(path, data)
    deepest = max(map(len, columns.keys), default=0)
    if deepest > MOST_STEPS:
        raise UnsupportedFormatError(
            path, f"has a key path of {deepest} keys; penstock reads up to {MOST_STEPS}"
        )

    _check_distinct(path, columns.keys)
    columns = _without(columns, _proper_prefixes(columns.keys, deepest))
    return TreeMetadata(
        *columns,
        use_ocdbt=_flag(path, document, "use_ocdbt"),
        use_zarr3=_flag(path, document, "use_zarr3") or False,
        all_chunks_written=_flag(path, document, "store_array_data_equal_to_fill_value") or False,
        custom_metadata=document.get("custom_metadata"),
        value_metadata_tree=document.get("value_metadata_tree"),
    )


def _flag(path: str, document: dict[str, object], name: str) -> bool | None:
    value = document.get(name)
    if value is not None and type(value) is not bool:
        raise CorruptCheckpointError(path, f"{name} is {value!r}, not a boolean")

    return value


def _check_distinct(path: str, paths: list[KeyPath]) -> None:
    if len(set(paths)) == len(paths):
        return

    seen: set[KeyPath] = set()
    for keys in paths:
        if keys in seen:
            raise CorruptCheckpointError(path, f"{keys} is listed twice")
        seen.add(keys)


def _proper_prefixes(paths: list[KeyPath], deepest: int) -> set[KeyPath]:
    if deepest > _DEEP:  # remembering every prefix would take the square of the depth
        return {a for a, b in pairwise(sorted(paths)) if b[: len(a)] == a}

    prefixes: set[KeyPath] = set()
    for keys in paths:
        prefix = keys
        while prefix:
            prefix = prefix[:-1]
            if prefix in prefixes:
                break
            prefixes.add(prefix)

    return prefixes


def _without(columns: Columns, inner: set[KeyPath]) -> Columns:
    if inner.isdisjoint(columns.keys):
        return columns

    kept = [at for at, keys in enumerate(columns.keys) if keys not in inner]
    return Columns(
        [columns.keys[at] for at in kept],
        [columns.kinds[at] for at in kept],
        [columns.typestrs[at] for at in kept],
        [columns.write_shapes[at] for at in kept],
        [columns.skips[at] for at in kept],
    )
