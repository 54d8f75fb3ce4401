"""The names of what lies in a checkpoint directory, and how key paths are shown.

Source:
    ORBAX_FORMAT.md §1 and §3.
"""

from __future__ import annotations

__all__ = (
    "ARRAY_METADATAS",
    "CHECKPOINT_METADATA",
    "COMMIT_MARK",
    "DATA_FOLDER",
    "INTEGRITY",
    "LEGACY_MSGPACK",
    "MANIFEST",
    "MARKS",
    "METADATA",
    "SHARDING",
    "STRINGS",
    "TEMPORARY_SUFFIX",
    "V1_MARK",
    "show_key_path",
)

from collections.abc import Sequence
from typing import Final

from penstock.kernel.messages import KeyKind, KeyPath

METADATA: Final = "_METADATA"
SHARDING: Final = "_sharding"
STRINGS: Final = "_strings.json"
ARRAY_METADATAS: Final = "array_metadatas"
CHECKPOINT_METADATA: Final = "_CHECKPOINT_METADATA"
INTEGRITY: Final = "_PENSTOCK_INTEGRITY"
MANIFEST: Final = "manifest.ocdbt"
DATA_FOLDER: Final = "d"
COMMIT_MARK: Final = "commit_success.txt"
V1_MARK: Final = "orbax.checkpoint"
LEGACY_MSGPACK: Final = "checkpoint"
TEMPORARY_SUFFIX: Final = ".orbax-checkpoint-tmp"

MARKS: Final = frozenset({METADATA, CHECKPOINT_METADATA, MANIFEST, COMMIT_MARK, V1_MARK, LEGACY_MSGPACK})
"""Each of these tells that a directory is a checkpoint, or holds one."""


def show_key_path(keys: KeyPath, kinds: Sequence[KeyKind]) -> str:
    """Return the path as `jax.tree_util.keystr` prints it, as far as the medium tells: `['opt'][0]['mu']`.

    Attributes and dict keys are not told apart on the medium, so both are shown as dict keys.
    """
    return "".join(
        [
            f"[{key}]" if kind is KeyKind.SEQUENCE else f"[{key!r}]"
            for key, kind in zip(keys, kinds, strict=True)
        ]
    )
