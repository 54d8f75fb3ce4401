"""`array_metadatas/process_N`: how each jax.Array was cut, and the kind of each typed PRNG key.

Source:
    ORBAX_FORMAT.md §1.4.
"""

from __future__ import annotations

__all__ = ("decode_random_keys", "encode")

import json
from collections.abc import Iterable, Iterator, Sequence
from json.encoder import encode_basestring_ascii as _quoted
from typing import Final

from msgspec import Struct
from msgspec.json import Decoder

from penstock.handlers.formats.common.checked_json import as_list, convert_member, parse_object
from penstock.handlers.formats.common.json_slices import UnusualFormError, decode_slices
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.leaf_infos import SLICE

_START: Final = b'{"array_metadatas": ['
_END: Final = b"]}"
_BOUNDARY: Final = b"}},{"


class _Extra(Struct, gc=False):
    random_key_impl: str | None = None


class _Array(Struct, gc=False):
    param_name: str
    ext_metadata: _Extra | None = None


class _Item(Struct, gc=False):
    array_metadata: _Array


_ITEMS: Final = Decoder(list[_Item])


def encode(names: Sequence[str], specs: Sequence[LeafSpec]) -> Iterator[bytes]:
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

    slices = decode_slices(_ITEMS, data, len(_START), len(data) - len(_END), _BOUNDARY, b"[]")
    return {name: implementation for items, _ in slices for name, implementation in _random_keys(items)}


def _random_keys(items: Iterable[_Item]) -> Iterator[tuple[str, str]]:
    for item in items:
        array = item.array_metadata
        if array.ext_metadata is not None and array.ext_metadata.random_key_impl is not None:
            yield array.param_name, array.ext_metadata.random_key_impl
