"""Matching a target to stored leaves, compared with a second, simpler implementation."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock import Transform
from penstock.kernel import KeyKind, KeyPath, LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.messages import RestoreOptions
from penstock.stages.planning.leaf_sources import ABSENT, Function, Matching, TargetLeaves
from penstock.stages.planning.matching import match_leaves, pair_keys
from penstock.stages.planning.renaming import rename_leaves
from penstock.stages.pytree import flatten_tree

KEY = st.sampled_from(["a", "b", "c", "0", "1"])
PATHS = st.lists(st.lists(KEY, min_size=1, max_size=3).map(tuple), max_size=6, unique=True)
RULES = st.dictionaries(
    st.lists(KEY, max_size=2).map(tuple), st.none() | st.lists(KEY, max_size=2).map(tuple), max_size=4
)


def info_of(keys: KeyPath) -> ParamInfo:
    return ParamInfo(keys, (KeyKind.MAPPING,) * len(keys), "".join(f"[{key!r}]" for key in keys))


def stored_of(paths: list[KeyPath]) -> list[StoredLeaf]:
    spec = LeafSpec("np.ndarray", (2,), "float64", 8, (2,))
    return [StoredLeaf(info_of(keys), spec) for keys in paths]


def target_of(paths: list[KeyPath]) -> TargetLeaves:
    return TargetLeaves([info_of(keys) for keys in paths], [np.zeros(2)] * len(paths))


def matched(wanted: list[KeyPath], there: list[KeyPath], only: Any = None, **options: Any) -> Matching:
    return match_leaves("path", stored_of(there), target_of(wanted), RestoreOptions(**options, only=only))


@given(PATHS, PATHS)
def test_key_paths_are_paired_with_their_equals(wanted: list[KeyPath], there: list[KeyPath]) -> None:
    pairing = pair_keys(wanted, there)

    assert list(pairing.rows) == [there.index(keys) if keys in there else ABSENT for keys in wanted]
    assert list(pairing.unexpected) == [at for at, keys in enumerate(there) if keys not in wanted]
    assert pairing.missing == [at for at, keys in enumerate(wanted) if keys not in there]


@given(PATHS, PATHS, st.sets(KEY, min_size=1))
def test_what_is_not_selected_is_as_if_it_were_not_stored(
    wanted: list[KeyPath], there: list[KeyPath], chosen: set[str]
) -> None:
    selected = [keys for keys in there if keys[0] in chosen]
    if not selected:
        return

    for options in ({}, {"rename": {("a",): ("b",)}}, {"transforms": {"a": Transform()}}):
        found = matched(wanted, there, lambda keys: keys[0] in chosen, **options)
        alone = matched(wanted, selected, **options)

        assert found.rows == [row if row == ABSENT else there.index(selected[row]) for row in alone.rows]
        assert (found.differences, found.changes) == (alone.differences, alone.changes)


def expected_name(keys: KeyPath, rules: dict[KeyPath, KeyPath | None]) -> KeyPath | None:
    above = [rule for rule in rules if keys[: len(rule)] == rule]
    if not above:
        return keys
    rule = max(above, key=len)
    new = rules[rule]
    return None if new is None else (*new, *keys[len(rule) :])


@given(PATHS, RULES, st.booleans())
def test_the_longest_name_above_a_leaf_renames_it(
    paths: list[KeyPath], rules: dict[KeyPath, KeyPath | None], dotted: bool
) -> None:
    rename: dict[Any, Any] = dict(rules)
    if dotted:
        rename = {".".join(old): None if new is None else ".".join(new) for old, new in rules.items()}

    renamed = rename_leaves(stored_of(paths), range(len(paths)), rename, {})

    expected = {keys: expected_name(keys, rules) for keys in paths}
    names = [name for name in expected.values() if name is not None]
    assert {info.keys for info in renamed.infos} == set(names)
    found = zip(renamed.rows, renamed.infos, strict=True)
    assert {(paths[row], info.keys) for row, info in found} <= expected.items()
    collisions = [each for each in renamed.differences if "would both" in each.in_like]
    assert len(collisions) == len(names) - len(set(names))
    unused = {old for old in rename if repr(old) in {each.key_path for each in renamed.unused}}
    assert len(unused) == sum(
        all(
            keys[: len(rule)] != rule
            or any(len(other) > len(rule) and keys[: len(other)] == other for other in rules)
            for keys in paths
        )
        for rule in rules
    )
    left_out = {info_of(keys).key_path for keys, name in expected.items() if name is None}
    assert {change.key_path for change in renamed.changes if change.kind == "skipped"} == left_out


@given(PATHS, PATHS, st.sampled_from(["raise", "keep"]), st.sampled_from(["raise", "skip"]))
def test_each_leaf_of_either_side_is_found_told_or_refused(
    wanted: list[KeyPath], there: list[KeyPath], on_missing: Any, on_unexpected: Any
) -> None:
    matching = matched(wanted, there, on_missing=on_missing, on_unexpected=on_unexpected)

    assert read_names(matching, there) == {(keys, keys) for keys in wanted if keys in there}
    told = {(change.kind, change.key_path) for change in matching.changes}
    refused = {(each.kind, each.key_path) for each in matching.differences}
    missing = {info_of(keys).key_path for keys in wanted if keys not in there}
    unexpected = {info_of(keys).key_path for keys in there if keys not in wanted}
    kept, skipped = on_missing == "keep", on_unexpected == "skip"
    assert told == {("kept", at) for at in missing if kept} | {
        ("skipped", at) for at in unexpected if skipped
    }
    assert refused == {("missing", at) for at in missing if not kept} | {
        ("unexpected", at) for at in unexpected if not skipped
    }
    assert [info.keys for info in matching.infos] == wanted


def read_names(matching: Matching, there: list[KeyPath]) -> set[tuple[KeyPath, KeyPath]]:
    pairs = zip(matching.infos, matching.rows, strict=True)
    return {(info.keys, there[row]) for info, row in pairs if row != ABSENT}


PATTERNS = st.dictionaries(
    st.sampled_from(["a", "b", "a/b", "a/.*", "(.*)/b", ".*", "[ab]", "c/0"]),
    st.sampled_from(
        [
            Transform(),
            Transform(use_fallback=True),
            Transform(original_key="a"),
            Transform(original_key="b/c"),
            Transform(value_fn=len),
            Transform(original_key="c", value_fn=len),
        ]
    ),
    max_size=4,
)


@given(PATHS, PATHS, PATTERNS, st.booleans())
def test_transforms_do_as_the_table_says(
    wanted: list[KeyPath], there: list[KeyPath], rules: dict[str, Transform], to_original: bool
) -> None:
    matching = matched(wanted, there, transforms=rules, transforms_default_to_original=to_original)

    stored = {"/".join(keys) for keys in there}
    refusals = 0
    for at, info in enumerate(matching.infos):
        path = "/".join(info.keys)
        decided: tuple[str, str] | None = None
        for pattern in sorted(rules):
            rule = rules[pattern]
            if not re.fullmatch(pattern, path):
                continue
            if rule.use_fallback and to_original:
                decided = decided or ("kept", "")
                continue
            source = rule.original_key or path
            refusals += source not in stored
            decided = ("made" if rule.value_fn else "read", source) if source in stored else ("refused", "")
        if decided is None:
            decided = ("read", path) if path in stored and to_original else ("kept", "")

        row, function = matching.rows[at], matching.functions.get(at)
        if row != ABSENT:
            assert decided == ("read", "/".join(there[row]))
        elif function is not None:
            assert decided == ("made", "/".join(function.inputs[0].stored.info.keys))
        else:
            assert decided[0] in {"kept", "refused"}

    assert [info.keys for info in matching.infos] == wanted
    assert len(matching.differences) == refusals
    needed = {there[row] for row in matching.rows if row != ABSENT}
    needed |= {each.stored.info.keys for function in made_by(matching) for each in function.inputs}
    skipped = {change.key_path for change in matching.changes if change.kind == "skipped"}
    assert skipped == {info_of(keys).key_path for keys in there if keys not in needed}


def made_by(matching: Matching) -> list[Function]:
    return list(matching.functions.values())


def test_a_bare_leaf_has_the_empty_path() -> None:
    flat, _ = flatten_tree(np.zeros(2))
    options = RestoreOptions(transforms={"": Transform(original_key="a")})
    target = TargetLeaves([leaf.info for leaf in flat], [leaf.value for leaf in flat])

    matching = match_leaves("path", stored_of([("a",)]), target, options)

    assert read_names(matching, [("a",)]) == {((), ("a",))}
