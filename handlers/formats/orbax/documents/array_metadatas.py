"""`array_metadatas/process_N`: how each jax.Array was cut, and the kind of each typed PRNG key.

Source:
    ORBAX_FORMAT.md §1.4.
"""

from __future__ import annotations

__all__ = ("decode_random_keys", "encode")

import json
import re
from collections.abc import Iterable
from json.encoder import encode_basestring_ascii as _quoted
from typing import Final

from penstock.handlers.formats.common.checked_json import as_list, as_object, as_string, parse_object
from penstock.handlers.formats.common.json_slices import slices
from penstock.kernel.messages.save import Leaf
from penstock.kernel.protocols.leaf import LeafSpec

_START: Final = '{"array_metadatas": ['
_END: Final = "]}"
_BETWEEN: Final = "}}, {"
_TEXT: Final = r'[^"\\\x00-\x1f]*'
_ENTRY: Final = re.compile(
    rf'(\{{"array_metadata": \{{"param_name": "({_TEXT})", "write_shape": \[[0-9, ]*\], '
    rf'"chunk_shape": \[[0-9, ]*\], "ext_metadata": '
    rf'(?:null|\{{"random_key_impl": "({_TEXT})"\}})\}}\}})(?:, |$)'
)


def encode(arrays: Iterable[Leaf]) -> bytes:
    """Encode the document for the jax.Array leaves of a checkpoint, all of them.

    The bytes are those of `json.dumps`, put together from texts; see `metadata.encode`.
    """
    rests: dict[int, str] = {}  # by identity: most leaves share a few specs
    entries: list[str] = []
    for leaf in arrays:
        rest = rests.get(id(leaf.spec))
        if rest is None:
            rest = rests[id(leaf.spec)] = json.dumps(_shapes(leaf.spec))[1:]

        entries.append(f'{{"array_metadata": {{"param_name": {_quoted(leaf.info.name)}, {rest}}}')

    return f'{{"array_metadatas": [{", ".join(entries)}]}}'.encode()


def _shapes(spec: LeafSpec) -> dict[str, object]:
    return {
        "write_shape": spec.chunk_shape if spec.write_shape is None else spec.write_shape,
        "chunk_shape": spec.chunk_shape,
        "ext_metadata": {"random_key_impl": spec.random_key_impl} if spec.random_key_impl else None,
    }


def decode_random_keys(path: str, data: bytes) -> dict[str, str]:
    """Read what a restore needs of the document: stored name of each typed PRNG key to its implementation.

    Raises:
        CorruptCheckpointError: If it is not what such a document would be.
    """
    quick = _scan(data)
    return _decode(path, data) if quick is None else quick


def _decode(path: str, data: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in as_list(path, "array_metadatas", parse_object(path, data).get("array_metadatas")):
        entry = as_object(path, "array_metadata", as_object(path, "an item", item).get("array_metadata"))
        name = as_string(path, "param_name", entry.get("param_name"))
        extra = entry.get("ext_metadata")
        if extra is None:
            continue

        implementation = as_object(path, f"ext_metadata of {name!r}", extra).get("random_key_impl")
        if implementation is not None:
            found[name] = as_string(path, f"random_key_impl of {name!r}", implementation)

    return found


def _scan(data: bytes) -> dict[str, str] | None:
    """Read a document of the form that every known version writes; None if its form is another one."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    if not text.startswith(_START) or not text.endswith(_END):
        return None

    found: dict[str, str] = {}
    for part in slices(text, len(_START), len(text) - len(_END), _BETWEEN, 2):
        entries = _ENTRY.findall(part)
        if sum([len(entry[0]) + 2 for entry in entries]) != len(part) + 2:
            return None

        found.update([(name, implementation) for _, name, implementation in entries if implementation])

    return found
