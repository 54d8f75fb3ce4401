"""Stored key paths to those of the result, and what happens to leaves that only one side has. Pure."""

from __future__ import annotations

__all__ = ("MatchLeaves", "match_renamed", "rename_leaves")

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Protocol, TypeAlias, cast

from penstock.kernel.errors import SpecError, TreeDifference
from penstock.kernel.messages.restore_options import Change, Rename, RestoreOptions
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, ParamInfo, StoredLeaf
from penstock.stages.planning.leaf_sources import (
    Matching,
    Origin,
    call_foreign,
    described,
    keep,
    rule_difference,
)
from penstock.stages.pytree.flattening import FlatLeaf

MOST_CANDIDATES = 2_000  # a search for the nearest name compares with every other


class _Match(Protocol):
    @property
    def stored(self) -> StoredLeaf: ...


MatchLeaves: TypeAlias = Callable[
    [Sequence[FlatLeaf], Sequence[StoredLeaf]], tuple[Sequence[_Match], list[TreeDifference]]
]
"""Pairs the leaves of a target with stored ones by their keys, and lists those that have no partner."""


@dataclass(slots=True)
class Renamed:
    """Stored leaves under the names they get."""

    leaves: list[StoredLeaf] = field(default_factory=list[StoredLeaf])  #: with new infos
    originals: dict[KeyPath, StoredLeaf] = field(default_factory=dict[KeyPath, StoredLeaf])  #: by new keys
    differences: list[TreeDifference] = field(default_factory=list[TreeDifference])
    changes: list[Change] = field(default_factory=list[Change])


def match_renamed(
    flat: Sequence[FlatLeaf] | None,
    stored_leaves: Sequence[StoredLeaf],
    options: RestoreOptions,
    match: MatchLeaves,
) -> Matching:
    """Find each leaf of the result among the stored ones, under the names that these get.

    Args:
        flat: The target's leaves; None for a restore without a target.
        stored_leaves: All that are stored.
        options: Of which `rename`, `on_missing` and `on_unexpected` count here.
        match: Pairs leaves with equal keys.

    Raises:
        SpecError: If `rename` gives something that is no name.
        HandlerFailedError: If `rename` is a function and raises.
    """
    targets = {found.info.name: found.info for found in flat or ()}
    renamed = rename_leaves(stored_leaves, options.rename, targets)
    matching = Matching([], renamed.differences, renamed.changes)
    if flat is None:
        matching.origins += [
            Origin(leaf.info, read=renamed.originals[leaf.info.keys]) for leaf in renamed.leaves
        ]
        matching.differences += _leaves_within_leaves(renamed.leaves)
        return matching

    matches, differences = match(flat, renamed.leaves)
    found_keys = {found.stored.info.keys for found in matches}
    for found in flat:
        if found.info.keys in found_keys:
            read = renamed.originals[found.info.keys]
            matching.origins.append(Origin(found.info, found.value, has_like=True, read=read))
        elif options.on_missing == "keep":
            keep(matching, found.info, found.value)

    _tell_partners_missing(matching, differences, options)
    return matching


def _tell_partners_missing(
    matching: Matching, differences: Sequence[TreeDifference], options: RestoreOptions
) -> None:
    for difference in differences:
        if difference.kind == "unexpected" and options.on_unexpected == "skip":
            matching.changes.append(Change("skipped", difference.key_path, difference.on_disk))
        elif difference.kind != "missing" or options.on_missing != "keep":
            matching.differences.append(difference)


def rename_leaves(
    stored_leaves: Sequence[StoredLeaf], rename: Rename | None, targets: Mapping[str, ParamInfo]
) -> Renamed:
    """Give stored leaves the names they have in the result.

    Args:
        stored_leaves: All that are stored.
        rename: See `penstock.Checkpointer.restore`.
        targets: What the target has, by dotted name; a leaf renamed to one of these gets its keys.
    """
    renamer = _Renamer(rename)
    renamed = Renamed()
    taken: dict[str, StoredLeaf] = {}
    for stored in stored_leaves:
        keys = renamer(stored.info)
        if keys is None:
            renamed.changes.append(Change("skipped", stored.info.key_path, "left out by rename"))
            continue

        info = stored.info if keys == stored.info.keys else _renamed_info(stored.info, keys)
        info = targets.get(info.name, info)
        if info.keys != stored.info.keys:
            renamed.changes.append(Change("renamed", info.key_path, stored.info.key_path))

        first = taken.setdefault(info.name, stored)
        if first is not stored:
            text = f"{first.info.key_path} and {stored.info.key_path} would both be restored as {info.name!r}"
            renamed.differences.append(rule_difference(info.key_path, text))
            continue

        renamed.leaves.append(stored if info is stored.info else replace(stored, info=info))
        renamed.originals[info.keys] = stored

    renamed.differences += _unused(renamer, stored_leaves)
    return renamed


class _Renamer:
    """One form of the two that `rename` may have: a function from a stored leaf to its new keys."""

    def __init__(self, rename: Rename | None) -> None:
        self._function = rename if callable(rename) else None
        self.rules: dict[str | KeyPath, KeyPath | None] = {}
        self.used: set[str | KeyPath] = set()
        if isinstance(rename, Mapping):
            for old, new in cast("Mapping[object, object]", rename).items():
                self.rules[_old(old)] = _new(new, old)

    def __call__(self, info: ParamInfo) -> KeyPath | None:
        if self._function is not None:
            new = call_foreign(self._function, described("rename", self._function), info.key_path, info.keys)
            return _new(new, info.keys)

        # The longest rule that names the leaf, or a node above it.
        for depth in range(len(info.keys), -1, -1) if self.rules else ():
            above = info.keys[:depth]
            for rule in (above, ".".join(above)):
                if rule in self.rules and (rule or not depth):  # "" is the root, not a key without letters
                    self.used.add(rule)
                    new = self.rules[rule]
                    return None if new is None else (*new, *info.keys[depth:])

        return info.keys


def _old(name: object) -> str | KeyPath:
    if isinstance(name, str):
        return name

    return _keys(name, "names a stored leaf")


def _new(name: object, old: object) -> KeyPath | None:
    if name is None:
        return None
    if isinstance(name, str):
        return tuple(name.split(".")) if name else ()

    return _keys(name, f"is to be the new name of {old!r}")


def _keys(name: object, what: str) -> KeyPath:
    keys = cast("tuple[object, ...]", name) if isinstance(name, tuple) else ()
    if not isinstance(name, tuple) or not all(isinstance(key, str) for key in keys):
        raise SpecError(f"{name!r} {what}, and is neither a dotted text nor a tuple of texts")

    return cast("KeyPath", keys)


def _renamed_info(info: ParamInfo, keys: KeyPath) -> ParamInfo:
    """Say where a leaf stands under new keys.

    A number that was an index, or that comes in the place of one, is an index.
    """
    mapping = KeyKind.MAPPING
    indices = {key: kind for key, kind in zip(info.keys, info.kinds, strict=True) if kind is not mapping}
    replaced = info.kinds if len(info.kinds) == len(keys) else [mapping] * len(keys)
    kinds = tuple(
        (indices.get(key, mapping) if before is mapping else before) if key.isdecimal() else mapping
        for key, before in zip(keys, replaced, strict=True)
    )
    text = "".join(
        f"[{key!r}]" if kind is mapping else f"[{key}]" for key, kind in zip(keys, kinds, strict=True)
    )
    return ParamInfo(keys, kinds, text, info.directory)


def _unused(renamer: _Renamer, stored_leaves: Sequence[StoredLeaf]) -> list[TreeDifference]:
    unused = [rule for rule in renamer.rules if rule not in renamer.used]
    if not unused:
        return []

    names = [stored.info.name for stored in stored_leaves[:MOST_CANDIDATES]]
    differences: list[TreeDifference] = []
    for rule in unused:
        name = rule if isinstance(rule, str) else ".".join(rule)
        near = get_close_matches(name, names, n=1, cutoff=0.75)
        text = "rename names it, and nothing stored is called so"
        difference = rule_difference(repr(rule), text)
        differences.append(replace(difference, suggestion=repr(near[0]) if near else ""))

    return differences


def _leaves_within_leaves(leaves: Sequence[StoredLeaf]) -> list[TreeDifference]:
    """A renamed leaf may have come to stand where others have their container."""
    by_keys: dict[KeyPath, Any] = {leaf.info.keys: leaf for leaf in leaves}
    return [
        rule_difference(leaf.info.key_path, f"would lie within the leaf {by_keys[above].info.key_path}")
        for leaf in leaves
        for above in (leaf.info.keys[:depth] for depth in range(len(leaf.info.keys)))
        if above in by_keys
    ]
