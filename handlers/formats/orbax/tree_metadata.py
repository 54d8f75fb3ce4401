"""The documents of a tree, encoded and decoded.

* `_METADATA`: the structure of the tree, the type of each leaf, and which sequences were tuples if the save
  asked for it (§1.1, §1.2). Ten versions of Orbax all write the same form, down to the blanks. That form is
  read in slices; any other is parsed as a whole.
* `array_metadatas/process_N`: how each jax.Array was cut, and the kind of each typed PRNG key (§1.4).
* `_sharding`: the sharding of each jax.Array, as JSON as text within JSON (§1.3). Only the array handler
  interprets the texts.
* `_strings.json`: the string leaves, each at the JSON pointer that its name spells (§1.8, RFC 6901). The name
  is not escaped, so a `/` in it nests, and `~0` and `~1` in it stand for `~` and `/`.

Source:
    ORBAX_FORMAT.md; the names that TensorStore refuses were tested with 0.1.86.
"""

from __future__ import annotations

__all__ = (
    "StoredType",
    "TreeDocument",
    "TreeEntries",
    "decode_entries",
    "decode_random_keys",
    "decode_shardings",
    "decode_strings",
    "decode_tree_metadata",
    "encode_array_metadatas",
    "encode_shardings",
    "encode_strings",
    "encode_tree_metadata",
    "find_string",
    "stored_text",
    "tuple_paths",
)

import json
import re
from base64 import urlsafe_b64encode
from binascii import a2b_base64
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from json.encoder import encode_basestring_ascii as _quoted
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, cast, final

from msgspec import Meta, Raw, Struct
from msgspec.json import Decoder

from penstock.handlers.formats.orbax.sibling_entries import SiblingEntries
from penstock.handlers.formats.untrusted import (
    SLICE_BYTES,
    Slices,
    UnusualFormError,
    as_list,
    as_object,
    as_string,
    check_unicode,
    convert_member,
    decode_object,
    parse_distinct,
    parse_object,
    parse_value,
)
from penstock.kernel.concurrency.brief_steps import STEP_BYTES, parts_of
from penstock.kernel.errors import CorruptCheckpointError, InvalidLeafError, UnsupportedFormatError
from penstock.kernel.protocols.leaf import (
    EMPTY_MARKERS,
    SLICE,
    InfoRun,
    KeyKind,
    KeyPath,
    LeafInfos,
    LeafSpec,
    ParamInfo,
    runs_of,
)
from penstock.kernel.protocols.save_format import SaveFormat

_DEFAULT: Final = SaveFormat()
_EMPTY_NAMED_TUPLE: Final = LeafSpec("NamedTuple")  # without rich types it is recorded as None

_ENDS: Final = {kind: f', "key_type": {kind:d}}}' for kind in KeyKind}  # of the entry of a key

MOST_STEPS: Final = 1000
"""Keys of one key path: Python's own limit for nested calls, which restoring a deeper tree would pass."""

_DEEP: Final = 64


@final
class StoredType(NamedTuple):
    """The content of an entry but for its key path. Most leaves of one type share an object."""

    typestr: str
    write_shape: tuple[int, ...] | None = None
    skip: bool = False
    """No array is stored under the name: an empty marker, or (before 0.5.16) a value in msgpack."""


@final
@dataclass(frozen=True, slots=True)
class TreeDocument:
    """The whole document. Its entries for leaves and empty markers are in columns of equal length.

    Columns of strings and of tuples of strings cost the garbage collector next to nothing.
    """

    keys: Sequence[KeyPath]  #: as recorded, which is JAX's flatten order
    kinds: Sequence[tuple[KeyKind, ...]]
    types: Sequence[StoredType]

    use_ocdbt: bool | None  #: None in old checkpoints: OCDBT if there is a manifest
    use_zarr3: bool
    all_chunks_written: bool  #: a missing chunk is an error; otherwise it reads as the fill value
    custom_metadata: object = None  #: the caller's metadata, any JSON
    value_metadata_tree: object = None  #: as recorded; see `rich_types`

    def in_msgpack(self, at: int) -> bool:
        """Return whether the value of a leaf is in the file next to `_METADATA` that early Orbax wrote."""
        return self.types[at].skip and self.types[at].typestr not in EMPTY_MARKERS


def encode_tree_metadata(
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
        about["value_metadata_tree"] = encode_tuples(zip(infos, values, strict=True))

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


def decode_tree_metadata(path: str, data: bytes) -> TreeDocument:
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

    distinct: set[KeyPath] = set()
    for some in parts_of(columns.keys):  # one long call would hold the interpreter
        distinct.update(some)
    if len(distinct) < len(columns.keys):
        twice = next(keys for keys, n in Counter(columns.keys).items() if n > 1)
        raise CorruptCheckpointError(path, f"{twice} is listed twice")

    outer = _proper_prefixes(columns.keys, deepest)
    if not outer.isdisjoint(distinct):
        kept = [at for at, keys in enumerate(columns.keys) if keys not in outer]
        columns = TreeEntries(
            [columns.keys[at] for at in kept],
            [columns.kinds[at] for at in kept],
            [columns.types[at] for at in kept],
        )

    return TreeDocument(
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


def _proper_prefixes(paths: list[KeyPath], deepest: int) -> set[KeyPath]:
    if deepest > _DEEP:  # remembering every prefix would take the square of the depth
        return {a for a, b in pairwise(sorted(paths)) if b[: len(a)] == a}

    prefixes: set[KeyPath] = set()
    for prefix in {keys[:-1] for keys in paths if keys}:  # siblings share it
        above = prefix
        while above not in prefixes:  # the empty one is above itself
            prefixes.add(above)
            above = above[:-1]

    return prefixes


_MEMBER: Final = "tree_metadata"
_START: Final = b'{"tree_metadata": {'
_END: Final = b"}}}, "  # of the last entry, of `tree_metadata`, and what follows it
_BOUNDARY: Final = b'}},"'


class _Step(Struct, gc=False):
    key: str
    key_type: Literal[1, 2]


class _Value(Struct, gc=False):
    value_type: str
    skip_deserialize: bool = False
    write_shape: tuple[Annotated[int, Meta(ge=0)], ...] | None = None


class _Entry(Struct, gc=False):
    key_metadata: tuple[_Step, ...]
    value_metadata: _Value


class _Texts(Struct, gc=False):
    """An entry whose parts are not decoded yet: those of most leaves are few texts, again and again."""

    key_metadata: Raw
    value_metadata: Raw


_TEXTS_OF_ENTRIES: Final = Decoder(dict[str, _Texts])
_PATH: Final = Decoder(tuple[_Step, ...])
_VALUE: Final = Decoder(_Value)
_BEFORE_KEY: Final = b', {"key": '
_MANY_SIBLINGS: Final = 32  # those are read faster by an example than together with others
_KINDS: Final = {1: KeyKind.SEQUENCE, 2: KeyKind.MAPPING}


@final
class TreeEntries(NamedTuple):
    """The entries of the document, one list per attribute."""

    keys: list[KeyPath]
    kinds: list[tuple[KeyKind, ...]]
    types: list[StoredType]


def decode_entries(path: str, data: bytes) -> tuple[TreeEntries, dict[str, object]]:
    """Read the document.

    Args:
        path: Where `data` was found, for the error.
        data: All of it.

    Returns:
        The entries, and the other members of the document.

    Raises:
        CorruptCheckpointError: If it is not JSON, an entry is not one, or a name occurs twice.
    """
    try:
        return _decode_usual(path, data)
    except (UnusualFormError, CorruptCheckpointError):
        return _decode_any(path, data)  # it may be valid; if it is not, this raises the reason


def _decode_usual(path: str, data: bytes) -> tuple[TreeEntries, dict[str, object]]:
    end = data.find(_END)
    if not data.startswith(_START) or end < 0:
        raise UnusualFormError

    collected = _Collected()
    slices = Slices(_TEXTS_OF_ENTRIES, data, len(_START), end + 2, _BOUNDARY)
    slices.nbytes = 1  # one entry, as the example of its siblings
    for entries, text in slices:
        try:
            collected.add_texts(entries)
        except (ValueError, RecursionError) as error:
            raise UnusualFormError(str(error)) from error

        nbytes = collected.add_siblings(*entries.popitem(), text, data, slices.at, end + 2)
        slices.at += nbytes
        # Where leaves have few siblings, slices are soon as long as elsewhere.
        slices.nbytes = 1 if nbytes else min(2 * len(text), SLICE_BYTES)

    rest = parse_object(path, b"{" + data[end + len(_END) :])
    if _MEMBER in rest or collected.has_twice():
        raise UnusualFormError  # a name occurs twice

    return collected.columns, rest


def _decode_any(path: str, data: bytes) -> tuple[TreeEntries, dict[str, object]]:
    document = parse_distinct(path, data)
    collected = _Collected()
    members = as_object(path, _MEMBER, document.pop(_MEMBER, None))
    entries = [convert_member(path, name, value, _Entry) for name, value in members.items()]
    if entries:
        collected.add_paths(*zip(*[_in_columns(entry.key_metadata) for entry in entries], strict=True))
        collected.columns.types.extend(_type_of(entry.value_metadata) for entry in entries)
    for keys in collected.columns.keys:
        check_unicode(path, keys)  # Python's parser, unlike that of the usual form, takes surrogates

    return collected.columns, document


@final
class _Collected:
    """The entries so far. What many leaves have in common is decoded once, and is one object."""

    __slots__ = ("_kinds", "_n_siblings", "_names", "_paths", "_siblings", "_types", "columns")

    def __init__(self) -> None:
        self.columns = TreeEntries([], [], [])
        self._names: set[str] = set()
        self._n_siblings = _MANY_SIBLINGS  # to be looked at first
        self._siblings: dict[str, set[str]] = {}  # the last keys of all other names, by what is before
        self._kinds: dict[tuple[int, ...], tuple[KeyKind, ...]] = {}
        self._paths: dict[bytes, tuple[KeyPath, tuple[int, ...]]] = {b"": ((), ())}
        self._types: dict[bytes, StoredType] = {}

    def has_twice(self) -> bool:
        """Return whether a name occurs twice, or might."""
        n_siblings = sum(map(len, self._siblings.values()))
        if len(self._names) + n_siblings < len(self.columns.keys):
            return True
        for name in self._names if n_siblings else ():
            begin, quote, key = name.rpartition("'")[0].rpartition("'")
            if key in self._siblings.get(begin + quote, ()):
                return True

        return False

    def add_siblings(self, name: str, entry: _Texts, text: bytes, data: bytes, start: int, end: int) -> int:
        """Add the entries from `start` on that are written as the one added last, if they are many.

        Args:
            name: Of the entry added last.
            entry: Its parts.
            text: What ends with it.
            data: The document.
            start: Where the next entry begins.
            end: Where entries end.

        Returns:
            How many bytes they take, with what is before the next entry.
        """
        columns = self.columns
        outer, path, value = columns.keys[-1][:-1], bytes(entry.key_metadata), bytes(entry.value_metadata)
        form = SiblingEntries.like(text, name, columns.keys[-1], path, value)
        keys = [] if form is None else form.read(data, start, end, self._n_siblings)
        self._n_siblings = max(len(keys) + 1, _MANY_SIBLINGS)  # containers are often alike
        if form is None or len(keys) < _MANY_SIBLINGS:
            return 0

        for some in parts_of(keys):
            self._siblings.setdefault(form.begin, set()).update(some)
            columns.keys.extend(zip(*map(repeat, outer), some, strict=False))  # as many as `some` has
            columns.kinds.extend(repeat(columns.kinds[-1], len(some)))
            columns.types.extend(repeat(columns.types[-1], len(some)))

        return len(keys) * len(form.example)

    def add_texts(self, entries: Mapping[str, _Texts]) -> None:
        """Add entries by their names, the JSON of their key paths and of their values.

        A path is cut before its last key: siblings have all above it in common, and keys such as `bias` are
        in many places. The cut cannot be inside a string, since that has no bare quote mark. So the whole is
        a path if both parts are.

        Raises:
            ValueError: If one is not what it should be, or the path cannot be cut so.
        """
        paths, types = self._paths, self._types
        keys: list[KeyPath] = []
        numbers: list[tuple[int, ...]] = []
        self._names.update(entries)
        for entry in entries.values():
            above, cut, last = bytes(entry.key_metadata).rpartition(_BEFORE_KEY)
            outer, inner = paths.get(above), paths.get(last)
            if outer is None:
                outer = paths[above] = _in_columns(_PATH.decode(above + b"]"))
            if inner is None:
                inner = paths[last] = _in_columns(_PATH.decode(b'[{"key": ' + last if cut else last))

            value = bytes(entry.value_metadata)
            type_ = types.get(value)
            if type_ is None:
                type_ = types[value] = _type_of(_VALUE.decode(value))

            keys.append(outer[0] + inner[0])
            numbers.append(outer[1] + inner[1])
            self.columns.types.append(type_)

        self.add_paths(keys, numbers)

    def add_paths(self, keys: Iterable[KeyPath], numbers: Collection[tuple[int, ...]]) -> None:
        """Add the key paths of entries, and the recorded kinds of their keys; their types are added apart."""
        for each in set(numbers) - self._kinds.keys():
            self._kinds[each] = tuple([_KINDS[number] for number in each])

        self.columns.keys.extend(keys)
        self.columns.kinds.extend(map(self._kinds.__getitem__, numbers))


def _in_columns(steps: Iterable[_Step]) -> tuple[KeyPath, tuple[int, ...]]:
    return tuple([step.key for step in steps]), tuple([step.key_type for step in steps])


def _type_of(value: _Value) -> StoredType:
    return StoredType(value.value_type, value.write_shape, value.skip_deserialize)


_NAME: Final = "value_metadata_tree"
_LEAF: Final = "ValueMetadataEntry"
_Json: TypeAlias = "dict[str, _Json] | list[_Json] | str | int | bool | None"


def tuple_paths(path: str, text: object) -> frozenset[KeyPath]:
    """Find the tuples in the document that `_METADATA` holds as a text.

    Named tuples are not among them: their fields are recorded like the keys of a dict.

    Args:
        path: Of `_METADATA`, for the error.
        text: What is recorded; None if nothing is.

    Raises:
        CorruptCheckpointError: If it is malformed.
    """
    if text is None:
        return frozenset()

    tree = parse_value(f"{path}, {_NAME}", as_string(path, _NAME, text))
    try:
        return frozenset(_tuples(path, tree, ()))
    except RecursionError as error:
        raise CorruptCheckpointError(path, f"{_NAME} is nested without end") from error


def _tuples(path: str, node: object, keys: KeyPath) -> Iterator[KeyPath]:
    members: object = node
    if isinstance(members, dict) and _is(cast("dict[str, object]", members), "custom", "tuple"):
        yield keys
    for key, child in _children(path, node, keys):
        yield from _tuples(path, child, (*keys, str(key)))


def _children(path: str, value: object, keys: KeyPath) -> Iterator[tuple[object, object]]:
    """Yield the children of a node, by the keys that `tree_metadata` has for them."""
    if isinstance(value, list):
        yield from enumerate(cast("list[object]", value))
        return

    node = as_object(path, _NAME, value)
    if _is(node, "custom", _LEAF):
        return
    if _is(node, "custom", "tuple"):
        yield from enumerate(as_list(path, _NAME, node["entries"]))
    elif node.get("category") == "namedtuple" and "entries" in node:
        for entry in as_list(path, _NAME, node["entries"]):
            field = as_object(path, _NAME, entry)
            yield as_string(path, f"a field at {keys}", field.get("key")), field.get("value")
    else:
        yield from node.items()


def _is(node: dict[str, object], category: str, class_: str) -> bool:
    content = "data" if class_ == _LEAF else "entries"
    return node.get("category") == category and node.get("clazz") == class_ and content in node


def encode_tuples(leaves: Iterable[tuple[ParamInfo, str]]) -> str:
    """Encode the document that `tuple_paths` reads.

    Args:
        leaves: Where each stands, with its `nodes`; and what `tree_metadata` says of its value, as JSON.
    """
    root = _Node()
    for info, value in leaves:
        node = root
        for key, kind, name in zip(info.keys, info.kinds, info.nodes, strict=False):
            node.kind, node.name = kind, name
            node = node.children.setdefault(key, _Node())

        node.value = {"category": "custom", "clazz": _LEAF, "data": json.loads(value)}

    return json.dumps(root.document())


@final
@dataclass(slots=True)
class _Node:
    kind: KeyKind = KeyKind.MAPPING  #: of its children's keys
    name: str = ""  #: as in `ParamInfo.nodes`
    children: dict[str, _Node] = field(default_factory=dict[str, "_Node"])
    value: _Json = None  #: of a leaf

    def document(self) -> _Json:
        if not self.children:
            return self.value
        if self.name == "tuple":
            return {"category": "custom", "clazz": "tuple", "entries": self._documents()}
        if self.name:
            module, _, name = self.name.rpartition(":")
            entries: list[_Json] = [
                {"key": key, "value": child.document()} for key, child in self.children.items()
            ]
            return {"category": "namedtuple", "module": module, "clazz": name, "entries": entries}
        # An index is missing where a node of a user's own class has nothing in it.
        if self.kind is KeyKind.SEQUENCE and list(self.children) == list(map(str, range(len(self.children)))):
            return self._documents()

        return {key: child.document() for key, child in self.children.items()}

    def _documents(self) -> list[_Json]:
        return [child.document() for child in self.children.values()]


_ARRAYS_START: Final = b'{"array_metadatas": ['
_ARRAYS_END: Final = b"]}"
_BETWEEN_ARRAYS: Final = b"}},{"


class _Extra(Struct, gc=False):
    random_key_impl: str | None = None


class _Array(Struct, gc=False):
    param_name: str
    ext_metadata: _Extra | None = None


class _Item(Struct, gc=False):
    array_metadata: _Array


_ITEMS: Final = Decoder(list[_Item])


def encode_array_metadatas(names: Sequence[str], specs: Sequence[LeafSpec]) -> Iterator[bytes]:
    """Encode the document for the jax.Array leaves of a checkpoint, all of them, by stored name.

    The bytes are those of `json.dumps`, put together from texts; see `metadata.encode`.

    Yields:
        Slices of the document.
    """
    known = {id(spec): spec for spec in specs}  # most leaves share a few
    rests = {number: f", {json.dumps(_shapes(spec))[1:]}}}" for number, spec in known.items()}
    comma = ""
    yield _ARRAYS_START
    for at in range(0, len(names), SLICE):
        rows = zip(names[at : at + SLICE], specs[at : at + SLICE], strict=True)
        entries = [
            f'{{"array_metadata": {{"param_name": {_quoted(name)}{rests[id(spec)]}' for name, spec in rows
        ]
        yield f"{comma}{', '.join(entries)}".encode()
        comma = ", "

    yield _ARRAYS_END


def _shapes(spec: LeafSpec) -> dict[str, object]:
    return {
        "write_shape": spec.chunk_shape if spec.write_shape is None else spec.write_shape,
        "chunk_shape": spec.chunk_shape,
        "ext_metadata": {"random_key_impl": spec.extended_dtype} if spec.extended_dtype else None,
    }


def decode_random_keys(path: str, data: bytes) -> dict[str, str]:
    """Read the document: stored name of each typed PRNG key to its implementation.

    Raises:
        CorruptCheckpointError: If it is malformed.
    """
    try:
        return _decode_usual_arrays(data)
    except UnusualFormError:
        entries = as_list(path, "array_metadatas", parse_object(path, data).get("array_metadatas"))
        items = [convert_member(path, f"item {at}", entry, _Item) for at, entry in enumerate(entries)]
        return dict(_random_keys(items))


def _decode_usual_arrays(data: bytes) -> dict[str, str]:
    if not data.startswith(_ARRAYS_START) or not data.endswith(_ARRAYS_END):
        raise UnusualFormError

    slices = Slices(_ITEMS, data, len(_ARRAYS_START), len(data) - len(_ARRAYS_END), _BETWEEN_ARRAYS, b"[]")
    return {name: implementation for items, _ in slices for name, implementation in _random_keys(items)}


def _random_keys(items: Iterable[_Item]) -> Iterator[tuple[str, str]]:
    for item in items:
        array = item.array_metadata
        if array.ext_metadata is not None and array.ext_metadata.random_key_impl is not None:
            yield array.param_name, array.ext_metadata.random_key_impl


_BETWEEN_SHARDINGS: Final = b'}","'  # each text is that of a JSON object
_TEXTS: Final = Decoder(dict[str, str])


def encode_shardings(names: Sequence[str], shardings: Sequence[str]) -> Iterator[bytes]:
    """Encode stored names with their sharding texts.

    If the file exists, Orbax fails to restore arrays that are not in it. So either every jax.Array is in it,
    or there is no file.

    Yields:
        Slices of the document.
    """
    quoted = {text: f'": {json.dumps(text)}'.encode() for text in set(shardings)}  # many arrays, few of them
    comma = b'"'
    yield b"{"
    # Of a job of thousands of processes each text has thousands of numbers.
    longest = max(map(len, quoted.values()), default=1)
    step = min(SLICE, max(STEP_BYTES // longest, 1))
    for at in range(0, len(names), step):
        rows = zip(names[at : at + step], shardings[at : at + step], strict=True)
        yield comma + b', "'.join([urlsafe_b64encode(name.encode()) + quoted[text] for name, text in rows])
        comma = b', "'

    yield b"}"


def decode_shardings(path: str, data: bytes) -> dict[str, str]:
    """Read the document: stored name to sharding text.

    Raises:
        CorruptCheckpointError: If it is not JSON, a member is not a text, or a name occurs twice.
    """
    try:
        texts = decode_object(_TEXTS, data, _BETWEEN_SHARDINGS)
    except UnusualFormError:
        members = parse_distinct(path, data)
        texts = {name: as_string(path, f"the sharding of {name!r}", members[name]) for name in members}

    found: dict[str, str] = {}
    for encoded, text in texts.items():
        try:
            found[a2b_base64(encoded.replace("-", "+").replace("_", "/")).decode()] = text
        except ValueError as error:
            raise CorruptCheckpointError(path, f"the key {encoded!r} is not base64 of a name") from error

    return found


_BETWEEN_STRINGS: Final = b'","'
_MEMBERS: Final = Decoder(dict[str, object])
_BAD_ESCAPE: Final = re.compile("~(?![01])")


def encode_strings(leaves: Iterable[tuple[ParamInfo, str]]) -> bytes:
    """Encode the document for the string leaves of a checkpoint: the place and the value of each.

    Raises:
        InvalidLeafError: If the name of a leaf is not a JSON pointer, or leads through another string.
    """
    document: dict[str, object] = {}
    for info, text in leaves:
        name = info.name
        if _BAD_ESCAPE.search(name):
            problem = "a string cannot be stored under a name in which '~' is not followed by 0 or 1"
            raise InvalidLeafError(info.key_path, f"{problem}: {name!r}")

        *outer, last = _steps(name)
        place = document
        for step in outer:
            below = place.setdefault(step, {})
            if not isinstance(below, dict):
                raise _collision(info, step)
            place = cast("dict[str, object]", below)

        if last in place:
            raise _collision(info, last)
        place[last] = text

    return json.dumps(document, separators=(",", ":")).encode()


def decode_strings(path: str, data: bytes) -> dict[str, object]:
    """Read the document, for `find_string`.

    Raises:
        CorruptCheckpointError: If it is not a JSON object.
    """
    try:
        return decode_object(_MEMBERS, data, _BETWEEN_STRINGS)
    except UnusualFormError:
        return parse_object(path, data)  # strings within objects, or damage


def find_string(path: str, document: dict[str, object], name: str, key_path: str) -> str:
    """Look up one string leaf by its stored name.

    Raises:
        CorruptCheckpointError: If there is no string at that place; names the leaf.
    """
    place = _at(document, name)
    if not isinstance(place, str):
        problem = "is missing" if place is None else "is not a string"
        raise CorruptCheckpointError(path, f"the string {name!r} {problem}", key_path=key_path)

    return place


def stored_text(document: dict[str, object], name: str) -> str | None:
    """Return the text of a leaf by its stored name; None if it has none."""
    place = _at(document, name)
    return place if isinstance(place, str) else None


def _at(document: dict[str, object], name: str) -> object:
    place: object = document
    for step in _steps(name):
        place = _member(place, step)

    return place


def _steps(name: str) -> list[str]:
    if "~" not in name:
        return name.split("/")

    return [step.replace("~1", "/").replace("~0", "~") for step in name.split("/")]


def _member(place: object, step: str) -> object:
    return cast("dict[str, object]", place).get(step) if isinstance(place, dict) else None


def _collision(info: ParamInfo, step: str) -> InvalidLeafError:
    problem = f"its stored name {info.name!r} collides at {step!r} with that of another string"
    return InvalidLeafError(info.key_path, f"{problem} ('/' in a name nests); rename one")
