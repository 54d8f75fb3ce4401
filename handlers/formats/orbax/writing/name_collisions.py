"""Checks that leaves can each have a directory of their own. Pure.

Source:
    ORBAX_FORMAT.md §1.7; and §1.1 for why a name is a path with whatever slashes are in it.
"""

from __future__ import annotations

__all__ = ("check_directories",)

from collections.abc import Iterator, Sequence
from typing import Final

from penstock.handlers.formats.common.chunk_keys import chunk_keys, prefix_of
from penstock.handlers.formats.common.temporary_names import TEMPORARY_SUFFIX
from penstock.handlers.formats.common.tree_columns import TreeColumns
from penstock.handlers.formats.common.zarr_metadata import METADATA_KEYS
from penstock.handlers.formats.orbax.documents.file_names import (
    ARRAY_METADATAS,
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    INTEGRITY,
    LEGACY_MSGPACK,
    MANIFEST,
    METADATA,
    SHARDING,
    STRINGS,
    V1_MARK,
)
from penstock.kernel.errors import DuplicateNameError, InvalidLeafError
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.written import DISK_MARK, STAGE_RECORD

_RESERVED: Final = frozenset(
    {
        ARRAY_METADATAS,
        CHECKPOINT_METADATA,
        COMMIT_MARK,
        DISK_MARK,
        INTEGRITY,
        MANIFEST,
        METADATA,
        SHARDING,
        STAGE_RECORD,
        STRINGS,
        V1_MARK,
    }
)
_LONGEST: Final = 255  # bytes, of one step of a path


def check_directories(arrays: TreeColumns, version: int, *, single: bool = False) -> None:
    """Refuse arrays whose directories or files would be the same, or lie outside of the checkpoint.

    Args:
        arrays: The leaves that have a shape; their names differ.
        version: Of zarr.
        single: Whether it is the one array of an item, which has a name that Orbax keeps for itself.

    Raises:
        InvalidLeafError: If the name of a leaf is not a usable path.
        DuplicateNameError: If two leaves would need one path; with both key paths.
    """
    files: dict[str, ParamInfo] = {}
    folders: dict[str, ParamInfo] = {}
    for info, spec in zip(arrays.infos, arrays.specs, strict=True):
        _check_path(info, _RESERVED if single else _RESERVED | {LEGACY_MSGPACK})
        for folder in _prefixes(info.name.split("/")):
            folders.setdefault(folder, info)

        for key in _keys(info, spec, version):
            for folder in _prefixes(key.split("/")[:-1]):
                folders.setdefault(folder, info)

            other = files.setdefault(key, info)
            if other is not info:
                raise DuplicateNameError(key, other.key_path, info.key_path)

    for key, info in files.items():
        if key in folders:
            raise DuplicateNameError(key, info.key_path, folders[key].key_path)


def _keys(info: ParamInfo, spec: LeafSpec, version: int) -> Iterator[str]:
    prefix = prefix_of(info.name)
    yield prefix + METADATA_KEYS[version - 2]
    for key in chunk_keys(spec.grid_shape, version):
        yield prefix + key


def _prefixes(steps: Sequence[str]) -> Iterator[str]:
    for end in range(1, len(steps) + 1):
        yield "/".join(steps[:end])


def _check_path(info: ParamInfo, reserved: frozenset[str]) -> None:
    name = info.name
    if not name:  # of a bare leaf: it lies in the checkpoint itself
        return

    steps = name.split("/")
    problem = ""
    if not all(steps) or not {".", ".."}.isdisjoint(steps):
        problem = "is no path below the checkpoint"
    elif any(step in reserved or TEMPORARY_SUFFIX in step for step in steps):
        problem = "is the name of something else in a checkpoint"
    elif "\\" in name:
        problem = "has a backslash, which TensorStore takes for a slash"
    elif "\0" in name or any(len(step.encode()) > _LONGEST for step in steps):
        problem = "is no name that a file can have"
    if problem:
        advice = "rename the leaf, or save with ocdbt=True, where any name will do"
        raise InvalidLeafError(info.key_path, f"{name!r} {problem}; {advice}")
