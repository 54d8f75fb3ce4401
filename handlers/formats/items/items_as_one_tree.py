"""Several items of a checkpoint, opened as the one tree that they were saved as."""

from __future__ import annotations

__all__ = ("JoinedCheckpoint", "Opened")

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from penstock.handlers.formats.leaf_table import show_key_path
from penstock.kernel.protocols.checkpoints import StoredCheckpoint
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, ParamInfo, StoredLeaf
from penstock.kernel.protocols.reads import Destination, Read
from penstock.kernel.protocols.written import Written


@final
@dataclass(frozen=True, slots=True)
class Opened:
    """An opened item, and where its leaves stand in the one tree."""

    keys: KeyPath  #: what the keys of its leaves begin with
    folder: str  #: relative to the checkpoint
    checkpoint: StoredCheckpoint


@final
@dataclass(frozen=True, slots=True, eq=False)
class JoinedCheckpoint:
    """The leaves of several items. Data files are named from the checkpoint.

    Make it with `of`.
    """

    path: str
    items: Sequence[Opened]  #: those with leaves
    leaves: Sequence[StoredLeaf]
    """Every leaf, with its keys in the one tree; its detail is the leaf as its item has it."""
    digests: Mapping[str, bytes]

    @classmethod
    def of(cls, path: str, items: Sequence[Opened]) -> JoinedCheckpoint:
        """Join items of the checkpoint at `path`."""
        digests: dict[str, bytes] = {}
        for item in items:
            prefix = ".".join(item.keys)
            for name, digest in item.checkpoint.digests.items():
                digests[".".join([part for part in (prefix, name) if part])] = digest

        return cls(
            path, items, [_placed(item, leaf) for item in items for leaf in item.checkpoint.leaves], digests
        )

    @property
    def directory(self) -> str:
        """Where data files are named from."""
        return self.path

    @property
    def custom_metadata(self) -> Mapping[str, Any] | None:
        return self.items[0].checkpoint.custom_metadata if self.items else None

    @property
    def tree_custom_metadata(self) -> object:
        return None

    @property
    def root_custom_metadata(self) -> Mapping[str, Any] | None:
        return None

    @property
    def committed_at_ns(self) -> int | None:
        return self.items[0].checkpoint.committed_at_ns if self.items else None

    def parts(self, numbers: Sequence[int], leaves: Sequence[int]) -> Sequence[Sequence[Written]]:
        """Say where the bytes of some leaves lie; see `StoredCheckpoint.parts`."""
        found: list[Sequence[Written]] = [()] * len(numbers)
        first = 0
        for item in self.items:
            behind = first + len(item.checkpoint.leaves)
            of_item = [at for at, number in enumerate(numbers) if first <= number < behind]
            rows, indices = [numbers[at] - first for at in of_item], [leaves[at] for at in of_item]
            for at, parts in zip(of_item, item.checkpoint.parts(rows, indices), strict=True):
                found[at] = [replace(part, file=f"{item.folder}/{part.file}") for part in parts]

            first = behind

        return found

    def reads(self, index: int, stored: StoredLeaf, region: Destination, piece_bytes: int) -> Iterator[Read]:
        """Plan the reads that fill `region`; see `StoredCheckpoint.reads`."""
        item, leaf = _origin(stored)
        return item.checkpoint.reads(index, leaf, region, piece_bytes)


def _placed(item: Opened, leaf: StoredLeaf) -> StoredLeaf:
    info = leaf.info
    keys = (*item.keys, *info.keys)
    kinds = (*[KeyKind.MAPPING] * len(item.keys), *info.kinds)
    placed = ParamInfo(keys, kinds, show_key_path(keys, kinds), info.directory)
    return StoredLeaf(placed, leaf.spec, (item, leaf))


def _origin(stored: StoredLeaf) -> tuple[Opened, StoredLeaf]:
    match stored.detail:
        case (Opened() as item, StoredLeaf() as leaf):
            return item, leaf
        case _:
            raise AssertionError("a leaf of another checkpoint")
