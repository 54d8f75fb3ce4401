"""Checks that leaves can each have a directory of their own. Pure.

Source:
    ORBAX_FORMAT.md §1.7; and §1.1 for why a name is a path with whatever slashes are in it.
"""

from __future__ import annotations

__all__ = ("check_directories",)

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from penstock.handlers.formats.common.chunk_keys import chunk_keys, prefix_of
from penstock.handlers.formats.common.temporary_names import TEMPORARY_SUFFIX
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
from penstock.kernel.protocols.views import StagedLeaf
from penstock.kernel.protocols.written import STAGE_RECORD

_RESERVED: Final = frozenset(
    {
        ARRAY_METADATAS,
        CHECKPOINT_METADATA,
        COMMIT_MARK,
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


def check_directories(arrays: Iterable[StagedLeaf], version: int, *, single: bool = False) -> None:
    """Refuse arrays whose directories or files would be the same, or lie outside of the checkpoint.

    Args:
        arrays: The leaves that have a shape; their names differ.
        version: Of zarr.
        single: Whether it is the one array of an item, which has a name that Orbax keeps for itself.

    Raises:
        InvalidLeafError: If the name of a leaf is not a usable path.
        DuplicateNameError: If two leaves would need one path; with both key paths.
    """
    files: dict[str, StagedLeaf] = {}
    folders: dict[str, StagedLeaf] = {}
    for leaf in arrays:
        _check_path(leaf, _RESERVED if single else _RESERVED | {LEGACY_MSGPACK})
        for folder in _prefixes(leaf.info.name.split("/")):
            folders.setdefault(folder, leaf)

        for key in _keys(leaf, version):
            for folder in _prefixes(key.split("/")[:-1]):
                folders.setdefault(folder, leaf)

            other = files.setdefault(key, leaf)
            if other is not leaf:
                raise DuplicateNameError(key, other.info.key_path, leaf.info.key_path)

    for key, leaf in files.items():
        if key in folders:
            raise DuplicateNameError(key, leaf.info.key_path, folders[key].info.key_path)


def _keys(leaf: StagedLeaf, version: int) -> Iterator[str]:
    prefix = prefix_of(leaf.info.name)
    yield prefix + METADATA_KEYS[version - 2]
    for key in chunk_keys(leaf.spec.grid_shape, version):
        yield prefix + key


def _prefixes(steps: Sequence[str]) -> Iterator[str]:
    for end in range(1, len(steps) + 1):
        yield "/".join(steps[:end])


def _check_path(leaf: StagedLeaf, reserved: frozenset[str]) -> None:
    name = leaf.info.name
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
        raise InvalidLeafError(leaf.info.key_path, f"{name!r} {problem}; {advice}")
