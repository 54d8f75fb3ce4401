"""What an item of a checkpoint is, told by the names in its directory.

Source:
    ORBAX_FORMAT.md §1, §5.
"""

from __future__ import annotations

__all__ = ("JSON_FILES", "PROTO_FILE", "RANDOM_KEYS", "Form", "form_of", "holds_arrays", "json_file")

import os
from collections.abc import Collection
from enum import Enum, auto
from typing import Final

from penstock.handlers.layout.names import LEGACY_MSGPACK, MANIFEST, METADATA
from penstock.handlers.zarr import METADATA_KEYS
from penstock.kernel.protocols import Store

JSON_FILES: Final = ("data.json", "metadata", "metrics")  # of v1, of v0, and of both for metrics
PROTO_FILE: Final = "proto.pbtxt"


class Form(Enum):
    """How an item is stored."""

    TREE = auto()  #: with `_METADATA`
    PACKED = auto()  #: the structure, perhaps all of it, is in a msgpack file
    NAMED = auto()  #: nothing but the names of arrays tells the structure
    JSON = auto()
    PROTO = auto()  #: a protobuf message as text
    JAX_KEY = auto()
    NUMPY_KEY = auto()


RANDOM_KEYS: Final = {Form.JAX_KEY: "jax_random_key", Form.NUMPY_KEY: "np_random_key"}
"""What holds the array or tree; the directory beside it has `_metadata` appended."""


def form_of(store: Store, directory: str, names: Collection[str]) -> Form | None:
    """Say what lies in `directory`, whose entries are `names`; None if it is no item.

    That arrays lie there and nothing else is not looked for: see `holds_arrays`.
    """
    if METADATA in names:
        return Form.TREE
    for form, name in RANDOM_KEYS.items():
        if name in names and f"{name}_metadata" in names:
            return form
    if LEGACY_MSGPACK in names and store.kind(os.path.join(directory, LEGACY_MSGPACK)) == "file":
        return Form.PACKED
    if PROTO_FILE in names:
        return Form.PROTO

    return Form.JSON if json_file(store, directory, names) else None


def json_file(store: Store, directory: str, names: Collection[str]) -> str | None:
    """Name the file that holds a JSON item."""
    for name in JSON_FILES:
        if name in names and store.kind(os.path.join(directory, name)) == "file":
            return name

    return None


def holds_arrays(store: Store, directory: str, names: Collection[str]) -> bool:
    """Whether arrays lie in `directory`, in a database or each in a directory below it."""
    return MANIFEST in names or any(
        store.kind(os.path.join(directory, name, key)) == "file"
        for name in ("", *sorted(names))
        for key in METADATA_KEYS
    )
