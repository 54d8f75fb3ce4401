"""Finds what of a damaged checkpoint is intact, and where the rest can be found. Blocking."""

from __future__ import annotations

__all__ = ("Damage", "Salvage", "find_damage")

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast, final

from penstock.handlers.formats.leaf_table import StoredArray
from penstock.handlers.formats.orbax.checkpoint_documents import CheckpointDocument, SealedDocuments
from penstock.handlers.formats.orbax.discovery import (
    KINDS_OF_TREES,
    RANDOM_KEYS,
    Contents,
    ItemKind,
    arrays_in,
    contents_of,
)
from penstock.handlers.formats.orbax.file_names import CHECKPOINT_METADATA, INTEGRITY
from penstock.handlers.formats.orbax.item_survey import ItemSurvey, holds_recorded_bytes, survey_item
from penstock.handlers.formats.orbax.stored_checkpoint import OrbaxCheckpoint
from penstock.handlers.formats.verification import Finding
from penstock.handlers.layouts.item_parts import Parts
from penstock.handlers.leaves.stored_value import SourceFiles
from penstock.kernel.errors import CorruptCheckpointError, ExpansionError, PenstockError
from penstock.kernel.protocols.layouts import StoredCheckpoint
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.stores import Store
from penstock.rewriting.stored_items import LEFT_OUT, ItemsReader, StoredItems, stored_value
from penstock.stages.planning.restore_planner import check_expansion
from penstock.tools.damaged_trees import DamagedTree, open_tree_at, problem_of, split_place
from penstock.tools.patched_store import PatchedStore, patch_documents
from penstock.tools.repair_report import Outcome, RepairedLeaf
from penstock.verification.checkpoint_survey import recorded_directories


@final
@dataclass(slots=True)
class Damage:
    """The damage of a checkpoint. Items are known by their place in it: `state`, `key/jax_random_key`.

    The name is empty if the checkpoint is one tree.
    """

    store: PatchedStore  #: in which damaged documents that can be done without are hidden
    path: str
    about: CheckpointDocument
    kinds: Mapping[str, ItemKind]  #: by item
    surveys: dict[str, ItemSurvey] = field(default_factory=dict[str, ItemSurvey])  #: of trees, by their place
    leaves: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    """What is wrong with each damaged leaf, by the place of its item and by key path."""
    unchecked: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Leaves without a checksum, by the place of their item; all of them if the set is empty."""
    lost: list[RepairedLeaf] = field(default_factory=list[RepairedLeaf])  #: documents and items

    def add(self, place: str, findings: Iterable[Finding]) -> None:
        """Add the findings about the tree at `place`."""
        leaves = self.leaves.setdefault(place, {})
        for finding in findings:
            if finding.kind == "unchecked":
                self.unchecked.setdefault(place, set()).update(finding.key_paths)
                continue
            for key_path in finding.key_paths:
                leaves.setdefault(key_path, finding.problem)

    def doubtful(self, max_expansion: int) -> list[tuple[str, OrbaxCheckpoint, list[StoredLeaf]]]:
        """Return the place of each tree, the tree, and its leaves that may not be readable. Blocking.

        Raw bytes that agree with their checksum can be read. Encoded ones may have been wrong before the
        checksum was taken. A tree that claims too much is passed over: it will not be saved.
        """
        found: list[tuple[str, OrbaxCheckpoint, list[StoredLeaf]]] = []
        for place in self.surveys:
            try:
                opened = open_tree_at(cast("Store", self.store), self.path, place)
                check_expansion(self.store.inner, opened, range(len(opened.leaves)), max_expansion)
            except PenstockError:
                continue

            known = self.leaves.get(place, {})
            there = [leaf for leaf in opened.leaves if leaf.spec.shape is not None]
            doubtful = [leaf for leaf in there if self.is_unchecked(place, leaf) or not _is_raw(leaf)]
            found.append((place, opened, [leaf for leaf in doubtful if leaf.info.key_path not in known]))

        return found

    def is_unchecked(self, place: str, leaf: StoredLeaf) -> bool:
        """True if there is no checksum of some bytes of a leaf of the tree at `place`."""
        named = self.unchecked.get(place)
        return leaf.spec.nbytes > 0 and named is not None and (not named or leaf.info.key_path in named)


def find_damage(store: Store, path: str, others: Sequence[str]) -> Damage:
    """Survey every item of the checkpoint at `path`. The bytes of arrays are not compared yet.

    Args:
        store: Where.
        path: Of the checkpoint.
        others: Paths of other checkpoints, whose documents are used where they are the same.
    """
    patched = PatchedStore(store)
    reading = cast("Store", patched)
    lost: list[RepairedLeaf] = []
    for directory in recorded_directories(store, path):
        patch_documents(patched, path, directory, others, lost)

    about = _about(patched, path, lost)
    contents = contents_of(reading, path)
    whole = contents.whole
    kinds = {"": whole} if whole is not None else dict(_kinds(patched, path, contents, about, lost))
    damage = Damage(patched, path, about, kinds, lost=lost)
    for name, found in kinds.items():
        place = os.path.join(name, RANDOM_KEYS[found]) if found in RANDOM_KEYS else name
        if found in KINDS_OF_TREES or found is ItemKind.NAMED or found in RANDOM_KEYS:
            DamagedTree(patched, path, place, lost).make_openable()
            survey = survey_item(reading, *split_place(path, place))
            damage.surveys[place] = survey
            damage.add(place, survey.findings)

    return damage


def _about(store: PatchedStore, path: str, lost: list[RepairedLeaf]) -> CheckpointDocument:
    reading = cast("Store", store)
    try:
        names = store.list_directory(path)
        return SealedDocuments.open(reading, path, names).about(names)
    except PenstockError as error:
        record, problem = os.path.join(path, INTEGRITY), problem_of(error)
        if getattr(error, "path", "") == record and store.hide(record, problem):
            lost.append(RepairedLeaf("gone", "", problem=f"{INTEGRITY}: {problem}"))
            return _about(store, path, lost)

        store.hide(os.path.join(path, CHECKPOINT_METADATA), problem)
        lost.append(RepairedLeaf("gone", "", problem=f"custom metadata: {problem}"))
        return CheckpointDocument()


def _kinds(
    patched: PatchedStore,
    path: str,
    contents: Contents,
    about: CheckpointDocument,
    lost: list[RepairedLeaf],
) -> Iterator[tuple[str, ItemKind]]:
    store = cast("Store", patched)
    found = contents.items
    for name in sorted((contents.names | set(about.items)) - {contents.gone}):
        directory = os.path.join(path, name)
        if name in found:
            yield name, found[name]
        elif (has_arrays := arrays_in(store, path, name)) is not None:
            if has_arrays:
                yield name, ItemKind.NAMED
            else:
                problem = patched.problem_below(directory) or "penstock does not know what it holds"
                lost.append(RepairedLeaf("gone", "", name, problem))
        elif name in about.items:
            lost.append(RepairedLeaf("gone", "", name, "is missing"))


def _is_raw(leaf: StoredLeaf) -> bool:
    array = leaf.detail
    return isinstance(array, StoredArray) and array.format.plain


@final
class Salvage:
    """Decides of each leaf whether it is kept, taken from another checkpoint, or gone.

    Args:
        damage: Of the checkpoint.
        others: Paths of other checkpoints, and of directories of steps.
        max_expansion: How many times the bytes stored the arrays of a tree may take.
    """

    def __init__(self, damage: Damage, others: Sequence[str], max_expansion: int) -> None:
        self._max_expansion = max_expansion
        self._damage = damage
        self._others = others
        self._opened: dict[tuple[str, str], OrbaxCheckpoint | None] = {}
        self.leaves: list[RepairedLeaf] = list(
            dict.fromkeys(damage.lost)
        )  #: what became of each, once `items` was called

    def items(self, files: SourceFiles) -> StoredItems:
        """Return the intact leaves, which are saved.

        Args:
            files: Read the new checkpoint's bytes when it is saved.

        Raises:
            CorruptCheckpointError: If it is one tree, and no leaf of it can be read.
            ExpansionError: If something would take far more memory than is stored.
        """
        damage = self._damage
        reading = cast("Store", damage.store)
        reader = ItemsReader(
            reading, partial(self._take, files), whole=False, max_expansion=self._max_expansion
        )
        if "" in damage.kinds:
            try:
                found = reader.read(damage.path)
            except ExpansionError:
                raise  # what it takes can be allowed
            except PenstockError as error:
                problem = f"holds nothing that can be saved: {self._problem_of(error)}"
                raise CorruptCheckpointError(damage.path, problem) from error

            return StoredItems(found.tree, None, damage.about.custom_metadata, found.tree_custom_metadata)

        tree, parts = dict[str, object](), Parts()
        for name, kind in damage.kinds.items():
            before = len(self.leaves)
            try:
                reader.add(tree, parts, damage.path, name, kind, self._handler(name))
            except ExpansionError:
                raise
            except PenstockError as error:
                del self.leaves[before:]
                self.leaves.append(RepairedLeaf("gone", "", name, self._problem_of(error)))
                continue

            if len(self.leaves) == before:  # a document
                self.leaves.append(RepairedLeaf("kept", "", name))

        return StoredItems(tree, parts, damage.about.custom_metadata)

    def _problem_of(self, error: PenstockError) -> str:
        """Say what is wrong; of a file that was hidden why it was, and not that there is none."""
        path = getattr(error, "path", "")
        hidden = self._damage.store.problem_of(path)
        return f"{os.path.basename(path)}: {hidden}" if hidden else problem_of(error)

    def _handler(self, name: str) -> str | None:
        handlers = self._damage.about.item_handlers
        return handlers.get(name) if isinstance(handlers, Mapping) else None

    def _take(self, files: SourceFiles, place: str, opened: StoredCheckpoint, leaf: StoredLeaf) -> object:
        key_path, damage = leaf.info.key_path, self._damage
        if leaf.spec.shape is None and leaf.spec.text is None and not leaf.spec.is_empty_marker:
            return self._gone(place, key_path, f"a {leaf.spec.typestr} can be read by its own handler alone")

        problem = damage.leaves.get(place, {}).get(key_path)
        if problem is not None:
            return self._from_others(files, place, opened, leaf, problem)

        outcome: Outcome = "unchecked" if damage.is_unchecked(place, leaf) else "kept"
        self.leaves.append(RepairedLeaf(outcome, key_path, place))
        return stored_value(files, opened, leaf)

    def _from_others(
        self, files: SourceFiles, place: str, opened: StoredCheckpoint, leaf: StoredLeaf, problem: str
    ) -> object:
        key_path = leaf.info.key_path
        for path in self._others:
            other = self._other(path, place)
            if other is None or not isinstance(opened, OrbaxCheckpoint):
                continue
            for there in other.leaves:
                if there.info.name == leaf.info.name and holds_recorded_bytes(opened, leaf, other, there):
                    self.leaves.append(RepairedLeaf("taken", key_path, place, problem, path))
                    return stored_value(files, other, there)

        return self._gone(place, key_path, problem)

    def _gone(self, place: str, key_path: str, problem: str) -> object:
        self.leaves.append(RepairedLeaf("gone", key_path, place, problem))
        return LEFT_OUT

    def _other(self, path: str, place: str) -> OrbaxCheckpoint | None:
        """Open the same item of another checkpoint; None if that cannot be done."""
        if (path, place) not in self._opened:
            try:
                opened: Any = open_tree_at(self._damage.store.inner, path, place)
            except PenstockError:
                opened = None

            self._opened[path, place] = opened

        return self._opened[path, place]
