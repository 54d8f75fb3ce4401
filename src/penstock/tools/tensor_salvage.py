"""Finds what of damaged safetensors is intact, and where the rest can be found. Blocking."""

from __future__ import annotations

__all__ = ("TensorSalvage",)

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, final

from penstock.handlers.formats.safetensors.damaged_files import DamagedTensors, open_damaged
from penstock.handlers.formats.safetensors.safetensors_checkpoint import (
    SafetensorsCheckpoint,
    StoredTensor,
    open_checkpoint,
)
from penstock.handlers.formats.safetensors.tensor_paths import is_safetensors
from penstock.handlers.formats.verification import Finding, RecordedRange, check_ranges
from penstock.handlers.leaves.stored_value import SourceFiles
from penstock.kernel.errors import PenstockError, SpecError
from penstock.kernel.protocols.layouts import StoredCheckpoint
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.stores import Store
from penstock.rewriting.stored_items import LEFT_OUT, StoredItems, stored_value, tree_of
from penstock.tools.repair_report import Outcome, RepairedLeaf

_Other: TypeAlias = "tuple[SafetensorsCheckpoint | None, Mapping[str, StoredLeaf]]"
"""Another checkpoint, and its leaves by name."""


@final
class TensorSalvage:
    """Decides of each tensor whether it is kept, taken from another checkpoint, or gone.

    Tensors are known by their names, as `verify` knows them.

    Args:
        store: Where all of them are.
        path: Of the damaged checkpoint.
        others: Paths of other checkpoints; those that are no safetensors are passed over.
    """

    def __init__(self, store: Store, path: str, others: Sequence[str]) -> None:
        self._store = store
        self._others = others
        self._opened: dict[str, _Other] = {}
        self._problems: dict[str, str] = {}
        self.damaged: DamagedTensors = open_damaged(store, path)
        self.leaves: list[RepairedLeaf] = []  #: what became of each, once `items` was called
        for finding in self.damaged.findings:
            outcome: Outcome = "unchecked" if finding.kind == "unchecked" else "gone"
            file = os.path.basename(finding.file)
            lost = [RepairedLeaf(outcome, name, problem=finding.problem) for name in finding.key_paths]
            self.leaves += lost or [RepairedLeaf(outcome, "", problem=f"{file}: {finding.problem}")]

    def add(self, findings: Iterable[Finding]) -> None:
        """Note which tensors are damaged."""
        for finding in findings:
            for key_path in finding.key_paths:
                self._problems.setdefault(key_path, finding.problem)

    @property
    def doubtful(self) -> list[StoredLeaf]:
        """The tensors that no checksum vouches for."""
        leaves = [leaf for leaf in self.damaged.opened.leaves if leaf.spec.shape is not None]
        return [leaf for leaf in leaves if self._is_unchecked(leaf)]

    def items(self, files: SourceFiles) -> StoredItems:
        """Return the intact leaves, which are saved.

        Args:
            files: Read the tensors when they are saved.
        """
        opened = self.damaged.opened
        ranges: dict[str, list[RecordedRange]] = {}
        for found in self.damaged.ranges:
            ranges.setdefault(found.key_paths[0], []).append(found)

        taken = [self._take(leaf, files, ranges.get(leaf.info.key_path, ())) for leaf in opened.leaves]
        in_order = iter(taken)
        tree = tree_of("", _as_tree(opened), lambda _, __, ___: next(in_order))
        return StoredItems(tree, None, opened.custom_metadata)

    def _take(self, leaf: StoredLeaf, files: SourceFiles, ranges: Sequence[RecordedRange]) -> object:
        key_path = leaf.info.key_path
        problem = self._problems.get(key_path)
        if problem is None:
            outcome: Outcome = "unchecked" if self._is_unchecked(leaf) else "kept"
            self.leaves.append(RepairedLeaf(outcome, key_path))
            return stored_value(files, self.damaged.opened, leaf)

        for path in self._others if ranges else ():
            other, leaves = self._other(path)
            there = leaves.get(leaf.info.name)
            if other is not None and there is not None and _holds_bytes(self._store, there, leaf, ranges):
                self.leaves.append(RepairedLeaf("taken", key_path, problem=problem, taken_from=path))
                return stored_value(files, other, there)

        self.leaves.append(RepairedLeaf("gone", key_path, problem=problem))
        return LEFT_OUT

    def _is_unchecked(self, leaf: StoredLeaf) -> bool:
        tensor = leaf.detail
        if not isinstance(tensor, StoredTensor):
            return not self.damaged.note_is_sealed

        return tensor.file in self.damaged.unsealed

    def _other(self, path: str) -> _Other:
        """Open another checkpoint; None and nothing if that cannot be done, or if it is no safetensors."""
        if path not in self._opened:
            try:
                opened = open_checkpoint(self._store, path) if is_safetensors(self._store, path) else None
            except PenstockError:
                opened = None

            self._opened[path] = opened, {leaf.info.name: leaf for leaf in opened.leaves} if opened else {}

        return self._opened[path]


def _as_tree(opened: SafetensorsCheckpoint) -> StoredCheckpoint:
    """Return the leaves, in the same order, at the places from which their names are made again.

    Names that are no tree, as `a` next to `a.b`, stay one flat dict.
    """
    try:
        return opened.split(".")
    except SpecError:
        return opened


def _holds_bytes(store: Store, there: StoredLeaf, leaf: StoredLeaf, ranges: Sequence[RecordedRange]) -> bool:
    """True if a tensor is of the same type and shape, and has the checksums recorded of the damaged one."""
    here, tensor = leaf.detail, there.detail
    if not isinstance(here, StoredTensor) or not isinstance(tensor, StoredTensor):
        return False
    if (there.spec.dtype, there.spec.shape) != (leaf.spec.dtype, leaf.spec.shape):
        return False

    moved = [
        RecordedRange(tensor.file, sum_._replace(offset=sum_.offset - here.offset + tensor.offset), ())
        for sum_ in [found.checksum for found in ranges]
    ]
    return not check_ranges(store, moved)
