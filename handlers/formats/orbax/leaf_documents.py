"""The documents next to `_METADATA` that say more about some of the leaves.

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
    "decode_random_keys",
    "decode_shardings",
    "decode_strings",
    "encode_array_metadatas",
    "encode_shardings",
    "encode_strings",
    "find_string",
    "stored_text",
)

import json
import re
from base64 import urlsafe_b64encode
from binascii import a2b_base64
from collections.abc import Iterable, Iterator, Sequence
from json.encoder import encode_basestring_ascii as _quoted
from typing import Final, cast

from msgspec import Struct
from msgspec.json import Decoder

from penstock.handlers.formats.json_documents import (
    UnusualFormError,
    as_list,
    as_string,
    convert_member,
    decode_object,
    decode_slices,
    parse_distinct,
    parse_object,
)
from penstock.kernel.concurrency.brief_steps import STEP_BYTES
from penstock.kernel.errors import CorruptCheckpointError, InvalidLeafError
from penstock.kernel.protocols.leaf import SLICE, LeafSpec, ParamInfo

_START: Final = b'{"array_metadatas": ['
_END: Final = b"]}"
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
    yield _START
    for at in range(0, len(names), SLICE):
        rows = zip(names[at : at + SLICE], specs[at : at + SLICE], strict=True)
        entries = [
            f'{{"array_metadata": {{"param_name": {_quoted(name)}{rests[id(spec)]}' for name, spec in rows
        ]
        yield f"{comma}{', '.join(entries)}".encode()
        comma = ", "

    yield _END


def _shapes(spec: LeafSpec) -> dict[str, object]:
    return {
        "write_shape": spec.chunk_shape if spec.write_shape is None else spec.write_shape,
        "chunk_shape": spec.chunk_shape,
        "ext_metadata": {"random_key_impl": spec.random_key_impl} if spec.random_key_impl else None,
    }


def decode_random_keys(path: str, data: bytes) -> dict[str, str]:
    """Read what a restore needs of the document: stored name of each typed PRNG key to its implementation.

    Raises:
        CorruptCheckpointError: If it is malformed.
    """
    try:
        return _decode_usual(data)
    except UnusualFormError:
        entries = as_list(path, "array_metadatas", parse_object(path, data).get("array_metadatas"))
        items = [convert_member(path, f"item {at}", entry, _Item) for at, entry in enumerate(entries)]
        return dict(_random_keys(items))


def _decode_usual(data: bytes) -> dict[str, str]:
    if not data.startswith(_START) or not data.endswith(_END):
        raise UnusualFormError

    slices = decode_slices(_ITEMS, data, len(_START), len(data) - len(_END), _BETWEEN_ARRAYS, b"[]")
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
