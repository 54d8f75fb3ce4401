"""Matches the leaves of a restore target to stored leaves. Pure.

The options `only`, `rename`, `transforms`, `on_missing` and `on_unexpected` apply here. Without them,
each leaf of the target is read from the stored leaf with the same keys.
"""

from __future__ import annotations

__all__ = ("Pairing", "match_leaves", "pair_keys")

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from penstock.kernel.errors import SpecError, TreeDifference
from penstock.kernel.messages.restore import Change, RestoreOptions
from penstock.kernel.protocols.leaf import KeyPath, ParamInfo, StoredLeaf
from penstock.kernel.protocols.leaf_infos import keys_of
from penstock.stages.planning.key_patterns import select_rows
from penstock.stages.planning.leaf_sources import (
    ABSENT,
    Matching,
    StoredInfos,
    TargetLeaves,
    computed,
    describe_stored,
    describe_target,
    keep,
    key_columns,
    spec_column,
)
from penstock.stages.planning.own_values import NOTHING_OWN, OwnValues
from penstock.stages.planning.renaming import leaves_within_leaves, rename_leaves
from penstock.stages.planning.transforms import match_transforms

MOST_SUGGESTIONS: Final = 40  # a search for a similar name compares with every other name,
MOST_CANDIDATES: Final = 2_000  # so both are bounded: a different tree may have thousands


@dataclass(frozen=True, slots=True)
class Pairing:
    """Pairs of equal key paths in two lists."""

    rows: Sequence[int]  #: for each wanted key path, its place in the stored list, or `ABSENT`
    unexpected: Sequence[int]  #: places of stored key paths that are not wanted

    @property
    def missing(self) -> list[int]:
        """Places of wanted key paths that are not stored."""
        return [at for at, row in enumerate(self.rows) if row == ABSENT]


def pair_keys(wanted: Sequence[KeyPath], stored: Sequence[KeyPath]) -> Pairing:
    """Find each wanted key path in the stored list. Neither list may contain duplicates."""
    if list(wanted) == list(stored):
        return Pairing(range(len(wanted)), ())

    on_disk = {keys: row for row, keys in enumerate(stored)}
    rows = [on_disk.get(keys, ABSENT) for keys in wanted]
    if len(rows) == len(on_disk) and ABSENT not in rows:
        return Pairing(rows, ())

    known = set(wanted)
    return Pairing(rows, [row for row, keys in enumerate(stored) if keys not in known])


def match_leaves(
    path: str,
    stored: Sequence[StoredLeaf],
    target: TargetLeaves | None,
    options: RestoreOptions,
    own: OwnValues = NOTHING_OWN,
) -> Matching:
    """Decide where each leaf of a result comes from.

    None and empty containers count as leaves, with one exception: one that is stored but not in the
    target is no difference. It holds no data, and some classes do not report theirs when flattened.

    Args:
        path: The checkpoint, for messages.
        stored: All its leaves.
        target: The leaves to restore; None for every stored leaf, as it was saved.
        options: `rename`, `transforms`, `on_missing` and `on_unexpected` are used here.
        own: What the target has of this process for itself.

    Raises:
        SpecError: If an option is invalid: `only` matches nothing, `rename` gives something that is not
            a name, a key of `transforms` is not a regular expression, or a value of one process is to be
            divided anew beside `transforms`.
        HandlerFailedError: If `rename` is a function and raises.
    """
    keys, _ = key_columns(stored)
    rows: Sequence[int] = range(len(keys)) if options.only is None else select_rows(path, keys, options.only)
    if own.hidden:
        rows = [row for row in rows if row not in own.hidden]
    if own.functions and options.transforms is not None:
        raise SpecError("`transforms` cannot be combined with a PerProcess that divides its value anew")
    if options.transforms is not None and target is not None:
        chosen = stored if isinstance(rows, range) else [stored[row] for row in rows]
        return match_transforms(target, chosen, rows, options)

    there: Sequence[ParamInfo] = StoredInfos(stored, rows)
    if options.rename is None:
        names = keys if isinstance(rows, range) else [keys[row] for row in rows]
        return _by_keys(stored, rows, there, names, target, options, own)

    targets = {} if target is None else {info.name: info for info in target.infos}
    renamed = rename_leaves(stored, rows, options.rename, targets)
    names = [info.keys for info in renamed.infos]
    matching = _by_keys(stored, renamed.rows, renamed.infos, names, target, options, own)
    matching.differences[:0] = [*renamed.differences, *renamed.unused]
    matching.changes[:0] = renamed.changes
    if target is None:
        matching.differences += leaves_within_leaves(renamed.infos)

    return matching


def _by_keys(
    stored: Sequence[StoredLeaf],
    rows: Sequence[int],
    infos: Sequence[ParamInfo],
    keys: Sequence[KeyPath],
    target: TargetLeaves | None,
    options: RestoreOptions,
    own: OwnValues,
) -> Matching:
    """Match by equal keys.

    Args:
        stored: All leaves.
        rows: Places in `stored` of the leaves to match.
        infos: For each row, its info under the name it has in the result.
        keys: For each row, its keys under that name.
        target: The leaves to restore; None for all rows.
        options: `on_missing` and `on_unexpected` are used here.
        own: Whose functions make what is not stored as it is.
    """
    if target is None:
        return Matching(infos, None, rows)

    pairing = pair_keys(keys_of(target.infos), keys)
    found = pairing.rows
    if not isinstance(rows, range):
        found = [ABSENT if at == ABSENT else rows[at] for at in found]

    matching = Matching(target.infos, target.values, found)
    if found is pairing.rows and not pairing.unexpected and isinstance(found, range):
        return matching

    specs = spec_column(stored)
    unexpected = [
        (infos[at], stored[rows[at]]) for at in pairing.unexpected if not specs[rows[at]].is_empty_marker
    ]
    missing: list[int] = []
    for at in pairing.missing:
        function = own.functions.get(target.infos[at].keys)
        if function is None:
            missing.append(at)
        else:
            matching.functions[at] = function
            matching.changes.append(computed(target.infos[at], function))

    _tell_partners_missing(matching, missing, unexpected, options)
    return matching


def _tell_partners_missing(
    matching: Matching,
    missing: Sequence[int],
    unexpected: Sequence[tuple[ParamInfo, StoredLeaf]],
    options: RestoreOptions,
) -> None:
    """Record what happens to each leaf that only one side has: a change or a difference."""
    infos, likes = matching.infos, matching.likes or ()
    if options.on_missing == "keep":
        for at in missing:
            keep(matching, infos[at], likes[at])
    else:
        names = {info.name: info.key_path for info, _ in unexpected}
        matching.differences += [
            TreeDifference(
                "missing",
                infos[at].key_path,
                in_like=describe_target(likes[at]),
                suggestion=_nearest(infos[at].name, names) if number < MOST_SUGGESTIONS else "",
            )
            for number, at in enumerate(missing)
        ]
    if options.on_unexpected == "skip":
        matching.changes += [
            Change("skipped", info.key_path, describe_stored(leaf)) for info, leaf in unexpected
        ]
    else:
        names = {infos[at].name: infos[at].key_path for at in missing}
        matching.differences += [
            TreeDifference(
                "unexpected",
                info.key_path,
                on_disk=describe_stored(leaf),
                suggestion=_nearest(info.name, names) if number < MOST_SUGGESTIONS else "",
            )
            for number, (info, leaf) in enumerate(unexpected)
        ]


def _nearest(name: str, others: dict[str, str]) -> str:
    near = get_close_matches(name, list(others)[:MOST_CANDIDATES], n=1, cutoff=0.75)
    return others[near[0]] if near else ""
