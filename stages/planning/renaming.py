"""The option `rename`: maps stored key paths to key paths of the result. Pure."""

from __future__ import annotations

__all__ = ("Renamed", "leaves_within_leaves", "rename_leaves", "renamed_info")

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Final, cast

from penstock.kernel.errors import SpecError, TreeDifference
from penstock.kernel.messages.restore import Change, Rename
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, ParamInfo, StoredLeaf
from penstock.stages.planning.key_patterns import keys_in
from penstock.stages.planning.leaf_sources import call_foreign, described, rule_difference

MOST_CANDIDATES: Final = 2_000  # a search for a similar name compares with every other name


@dataclass(slots=True)
class Renamed:
    """The stored leaves that are restored, under their new names: `rows` and `infos` have the same length."""

    rows: list[int] = field(default_factory=list[int])  #: places in the stored leaves
    infos: list[ParamInfo] = field(default_factory=list[ParamInfo])  #: of each row, in the result
    differences: list[TreeDifference] = field(default_factory=list[TreeDifference])
    unused: list[TreeDifference] = field(default_factory=list[TreeDifference])  #: rules that name no leaf
    changes: list[Change] = field(default_factory=list[Change])


def rename_leaves(
    stored_leaves: Sequence[StoredLeaf], rows: Sequence[int], rename: Rename, targets: Mapping[str, ParamInfo]
) -> Renamed:
    """Give stored leaves the names they have in the result.

    Args:
        stored_leaves: All stored leaves.
        rows: Places of the leaves to rename.
        rename: See `penstock.Checkpointer.restore`.
        targets: The target's leaves by dotted name; a leaf renamed to one of these gets its keys.

    Raises:
        SpecError: If `rename` gives something that is not a name.
        HandlerFailedError: If `rename` is a function and raises.
    """
    renamer = _Renamer(rename)
    renamed = Renamed()
    taken: dict[str, StoredLeaf] = {}
    for row in rows:
        stored = stored_leaves[row]
        keys = renamer(stored.info)
        if keys is None:
            renamed.changes.append(Change("skipped", stored.info.key_path, "left out by rename"))
            continue

        info = stored.info if keys == stored.info.keys else renamed_info(stored.info, keys)
        info = targets.get(info.name, info)
        if info.keys != stored.info.keys:
            renamed.changes.append(Change("renamed", info.key_path, stored.info.key_path))

        first = taken.setdefault(info.name, stored)
        if first is not stored:
            text = f"{first.info.key_path} and {stored.info.key_path} would both be restored as {info.name!r}"
            renamed.differences.append(rule_difference(info.key_path, text))
            continue

        renamed.rows.append(row)
        renamed.infos.append(info)

    renamed.unused = _unused(renamer, [stored_leaves[row] for row in rows[:MOST_CANDIDATES]])
    return renamed


class _Renamer:
    """Applies either form of `rename` to a stored leaf. Returns its new keys, or None to leave it out."""

    def __init__(self, rename: Rename) -> None:
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

        # The longest rule that names the leaf or a node above it wins.
        for depth in range(len(info.keys), -1, -1) if self.rules else ():
            above = info.keys[:depth]
            for rule in (above, ".".join(above)):
                if rule in self.rules and (rule or not depth):  # "" names the root, not an empty key
                    self.used.add(rule)
                    new = self.rules[rule]
                    return None if new is None else (*new, *info.keys[depth:])

        return info.keys


def _old(name: object) -> str | KeyPath:
    if isinstance(name, str):
        return keys_in(name) or name

    return _keys(name, "is a key of rename")


def _new(name: object, old: object) -> KeyPath | None:
    if name is None:
        return None
    if isinstance(name, str):
        return keys_in(name) or (tuple(name.split(".")) if name else ())

    return _keys(name, f"is the new name of {old!r} in rename")


def _keys(name: object, what: str) -> KeyPath:
    keys = cast("tuple[object, ...]", name) if isinstance(name, tuple) else ()
    if not isinstance(name, tuple) or not all(isinstance(key, str) for key in keys):
        raise SpecError(f"{name!r} {what}, but it is neither a dotted string nor a tuple of strings")

    return cast("KeyPath", keys)


def renamed_info(info: ParamInfo, keys: KeyPath) -> ParamInfo:
    """Return the info of a leaf under new keys.

    A decimal key is an index if the same key was one before, or if it replaces one.
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

    names = [stored.info.name for stored in stored_leaves]
    differences: list[TreeDifference] = []
    for rule in unused:
        name = rule if isinstance(rule, str) else ".".join(rule)
        near = get_close_matches(name, names, n=1, cutoff=0.75)
        text = "rename names it, but no stored leaf has this name"
        difference = rule_difference(repr(rule), text)
        differences.append(replace(difference, suggestion=repr(near[0]) if near else ""))

    return differences


def leaves_within_leaves(infos: Sequence[ParamInfo]) -> list[TreeDifference]:
    """Return a difference for each leaf whose new key path would be below another leaf."""
    by_keys = {info.keys: info for info in infos}
    return [
        rule_difference(info.key_path, f"would lie within the leaf {by_keys[above].key_path}")
        for info in infos
        for above in (info.keys[:depth] for depth in range(len(info.keys)))
        if above in by_keys
    ]
