"""`array_metadatas/process_N`: how each jax.Array was cut, and the kind of each typed PRNG key.

Source:
    ORBAX_FORMAT.md §1.4.
"""

from __future__ import annotations

__all__ = ("decode_random_keys", "encode")

import json
from collections.abc import Iterable
from json.encoder import encode_basestring_ascii as _quoted

from penstock.handlers.json_values import as_list, as_object, as_string, parse_object
from penstock.kernel.messages import Leaf, LeafSpec


def encode(arrays: Iterable[Leaf]) -> bytes:
    """Encode the document for the jax.Array leaves of a checkpoint, all of them.

    The bytes are those of `json.dumps`, put together from texts; see `metadata.encode`.
    """
    rests: dict[LeafSpec, str] = {}
    entries: list[str] = []
    for leaf in arrays:
        rest = rests.get(leaf.spec)
        if rest is None:
            rest = rests[leaf.spec] = json.dumps(_shapes(leaf.spec))[1:]

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
