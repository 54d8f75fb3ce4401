"""The leaves of a tree that is being saved, in columns, and the check that their names can be directories."""

from __future__ import annotations

__all__ = ("TreeColumns", "check_directories")

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, final

from penstock.handlers.formats.orbax.file_names import (
    ARRAY_METADATAS,
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    INTEGRITY,
    LEGACY_MSGPACK,
    MANIFEST,
    METADATA,
    SHARDING,
    STRINGS,
    TEMPORARY_SUFFIX,
    V1_MARK,
)
from penstock.handlers.formats.zarr import METADATA_KEYS, chunk_keys, prefix_of
from penstock.kernel.errors import DuplicateNameError, InvalidLeafError
from penstock.kernel.messages.save import Leaves
from penstock.kernel.protocols.leaf import ChosenInfos, LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_handlers import Leaf
from penstock.kernel.protocols.written import DISK_MARK, STAGE_RECORD


@final
@dataclass(frozen=True, slots=True, eq=False)
class TreeColumns:
    """All leaves of a tree in flatten order, empty markers among them."""

    indices: Sequence[int]  #: their places in the tree that was saved, of which this may be a part
    infos: Sequence[ParamInfo]
    specs: Sequence[LeafSpec]

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> TreeColumns:
        """Put leaves into columns, in order. Those of a whole plan are taken as they are."""
        if isinstance(leaves, Leaves) and isinstance(leaves.infos, Sequence):
            infos: Sequence[ParamInfo] = leaves.infos
            if leaves.indices == range(len(infos)):
                return cls(leaves.indices, infos, leaves.specs)

        ordered = sorted(leaves, key=attrgetter("index"))
        return cls(
            [leaf.index for leaf in ordered], [leaf.info for leaf in ordered], [leaf.spec for leaf in ordered]
        )

    def __len__(self) -> int:
        return len(self.specs)

    def arrays(self) -> TreeColumns:
        """Return the leaves with array bytes, or at least a stored shape."""
        numbers = [at for at, spec in enumerate(self.specs) if spec.shape is not None]
        if len(numbers) == len(self):
            return self

        return TreeColumns(
            [self.indices[at] for at in numbers],
            ChosenInfos(self.infos, numbers),
            [self.specs[at] for at in numbers],
        )

    def texts(self) -> Iterator[tuple[ParamInfo, str]]:
        """Yield each string leaf: its place and its value."""
        for at, spec in enumerate(self.specs):
            if spec.text is not None:
                yield self.infos[at], spec.text


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
    """Refuse arrays whose directories or files would be the same, or are outside of the checkpoint.

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
    if not name:  # of a bare leaf: it is in the checkpoint itself
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
