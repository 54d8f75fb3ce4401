"""Matches the leaves of a restore target to stored leaves. Pure.

The options `only`, `rename`, `transforms`, `on_missing` and `on_unexpected` apply here. Without them,
each leaf of the target is read from the stored leaf with the same keys.

Source:
    ORBAX_FORMAT.md §6 for `transforms`, tried with Orbax 0.12.8 by tests/interop/test_transforms.py.
"""

from __future__ import annotations

__all__ = (
    "Pairing",
    "match_leaves",
    "match_transforms",
    "pair_keys",
)

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, Final, TypeAlias, cast, final

from penstock.kernel.errors import SpecError, TreeDifference
from penstock.kernel.messages.restore import Change, RestoreOptions, Transform
from penstock.kernel.protocols.leaf import KeyPath, ParamInfo, StoredLeaf, keys_of
from penstock.stages.planning.casting import source_like
from penstock.stages.planning.key_patterns import select_rows
from penstock.stages.planning.leaf_sources import (
    ABSENT,
    Function,
    Input,
    Matching,
    StoredInfos,
    TargetLeaves,
    computed,
    describe_stored,
    describe_target,
    described,
    keep,
    key_columns,
    rule_difference,
    spec_column,
)
from penstock.stages.planning.own_values import NOTHING_OWN, OwnValues
from penstock.stages.planning.renaming import leaves_within_leaves, rename_leaves
from penstock.stages.pytree.flattening import FlatLeaf, is_empty, nest

Source: TypeAlias = int | Function | None
"""The number of a stored leaf to read, a function to call, or None to keep the target's own value.
`ABSENT` stands for a rule that cannot be applied; its difference has been recorded already."""


def match_transforms(
    target: TargetLeaves, stored_leaves: Sequence[StoredLeaf], rows: Sequence[int], options: RestoreOptions
) -> Matching:
    """Decide what each leaf of a target is made from.

    Every rule whose key matches is checked, in the order of the sorted keys. The last one wins, but the
    others must be possible, too. A `use_fallback` that falls back to the target wins only if no other
    rule matches. A leaf without a rule is read from the checkpoint if it is there and
    `transforms_default_to_original` is set; else it keeps the target's value. None and empty containers
    always stay as they are in the target.

    Args:
        target: The leaves to restore.
        stored_leaves: The stored leaves that may be used.
        rows: The place of each of these among all stored leaves.
        options: `transforms` and `transforms_default_to_original` are used here.

    Raises:
        SpecError: If the key of a rule is not a regular expression.
    """
    matching = Matching(target.infos, target.values, ())
    matcher = _Matcher(stored_leaves, options, matching)
    found = [
        matcher.add(at, FlatLeaf(*each))
        for at, each in enumerate(zip(target.infos, target.values, strict=True))
    ]
    matching.rows = [ABSENT if number == ABSENT else rows[number] for number in found]
    matcher.finish()
    return matching


@final
class _Matcher:
    def __init__(
        self, stored_leaves: Sequence[StoredLeaf], options: RestoreOptions, matching: Matching
    ) -> None:
        transforms = options.transforms or {}
        self._rules = [
            (key, _compiled(key), transforms[key], _compiled_inputs(transforms[key]))
            for key in sorted(transforms)
        ]
        self._to_original = options.transforms_default_to_original
        self._stored_leaves = stored_leaves
        self._numbers = {_path(stored.info): number for number, stored in enumerate(stored_leaves)}
        counts = Counter(_path(stored.info) for stored in stored_leaves)
        self._ambiguous = {path for path, count in counts.items() if count > 1}
        self._tree = _LazyTree(stored_leaves)
        self._used: set[int] = set()
        self._used_rules: set[str] = set()
        self._matching = matching

    def add(self, at: int, found: FlatLeaf) -> int:
        """Decide on one leaf of the target. Returns the number of the stored leaf to read, or `ABSENT`."""
        if is_empty(found.value):
            return ABSENT

        path = _path(found.info)
        decide: Callable[[], Source] | None = None
        for key, pattern, rule, inputs in self._rules:
            matched = pattern.fullmatch(path)
            if matched is not None:
                self._used_rules.add(key)
                # A fallback to the target yields to any other rule that matches.
                if decide is None or not (rule.use_fallback and self._to_original):
                    decide = self._by_rule(found, rule, inputs, matched)

        if decide is None:
            number = self._find(path, found.info) if self._to_original else None
            decide = partial(_constant, number)

        source = decide()
        if source is None:
            keep(self._matching, found.info, found.value)
        elif isinstance(source, Function):
            self._matching.functions[at] = source
            self._matching.changes.append(computed(found.info, source))
        elif source != ABSENT:
            self._note_read(found.info, source)
            return source

        return ABSENT

    def finish(self) -> None:
        """Record the stored leaves and the rules that were not used."""
        changes = self._matching.changes
        changes += [
            Change("skipped", stored.info.key_path, stored.spec.typestr)
            for number, stored in enumerate(self._stored_leaves)
            if number not in self._used and not stored.spec.is_empty_marker
        ]
        changes += [Change("unused", key) for key, *_ in self._rules if key not in self._used_rules]

    def _by_rule(
        self,
        found: FlatLeaf,
        rule: Transform,
        inputs: Sequence[tuple[re.Pattern[str], Any]],
        matched: re.Match[str],
    ) -> Callable[[], Source]:
        """Return how a rule makes a leaf. Refuses an impossible rule, even if a later one overrides it."""
        path = _path(found.info)
        if rule.use_fallback and self._to_original:
            return partial(_constant, None)
        if rule.multi_value_fn is not None:
            return partial(self._by_several, found, rule.multi_value_fn, inputs)

        original = path if rule.original_key is None else self._expanded(rule.original_key, matched, found)
        number = None if original is None else self._find(original, found.info)
        if number is None:
            if original is not None and original not in self._ambiguous:
                self._refuse(found.info, f"{original!r} is not in the checkpoint")

            return partial(_constant, ABSENT)
        if rule.value_fn is not None:
            return partial(self._by_one, found, rule.value_fn, number)

        return partial(_constant, number)

    def _by_one(self, found: FlatLeaf, function: Callable[[Any], Any], number: int) -> Source:
        stored = self._stored_leaves[number]
        if stored.spec.is_empty_marker:
            problem = f"value_fn needs {stored.info.key_path}, which is an empty {stored.spec.typestr}"
            self._refuse(found.info, problem)
            return ABSENT

        self._used.add(number)
        like, has_like, prepare = source_like(stored.spec, found.value)

        def call(values: Sequence[Any]) -> object:
            return function(prepare(values[0]))

        return Function(described("value_fn", function), (Input(stored, like, has_like),), call)

    def _by_several(
        self,
        found: FlatLeaf,
        function: Callable[[str, Any, Any], Any],
        patterns: Sequence[tuple[re.Pattern[str], Any]],
    ) -> Source:
        inputs: list[Input] = []
        for number, stored in enumerate(self._stored_leaves):
            path = _path(stored.info)
            like = next((like for pattern, like in patterns if pattern.fullmatch(path)), _UNDECLARED)
            if like is not _UNDECLARED and not stored.spec.is_empty_marker:
                self._used.add(number)
                inputs.append(Input(stored, like, has_like=like is not None))

        keys = [each.stored.info.keys for each in inputs]

        def call(values: Sequence[Any]) -> object:
            tree = _with_values(self._tree.get(), dict(zip(keys, values, strict=True)))
            return function(_path(found.info), tree, found.value)

        return Function(described("multi_value_fn", function), tuple(inputs), call)

    def _expanded(self, original_key: str, matched: re.Match[str], found: FlatLeaf) -> str | None:
        try:
            return matched.expand(original_key)
        except (re.error, IndexError) as error:
            self._refuse(found.info, f"original_key {original_key!r}: {error}")
            return None

    def _find(self, path: str, info: ParamInfo) -> int | None:
        if path in self._ambiguous:
            problem = f"{path!r} means several leaves of the checkpoint, because some keys contain slashes"
            self._refuse(info, problem)
            return None

        return self._numbers.get(path)

    def _note_read(self, info: ParamInfo, number: int) -> None:
        self._used.add(number)
        stored = self._stored_leaves[number].info
        if stored.keys != info.keys:
            self._matching.changes.append(Change("renamed", info.key_path, stored.key_path))

    def _refuse(self, info: ParamInfo, problem: str) -> None:
        self._matching.differences.append(rule_difference(info.key_path, problem))


_UNDECLARED: Any = object()


@final
class _LazyTree:
    """The checkpoint's tree with each leaf replaced by its spec; built when first needed."""

    def __init__(self, stored_leaves: Sequence[StoredLeaf]) -> None:
        self._stored_leaves = stored_leaves
        self._made: list[object] = []

    def get(self) -> object:
        if not self._made:
            stored = self._stored_leaves
            self._made.append(nest([leaf.info for leaf in stored], [leaf.spec for leaf in stored]))

        return self._made[0]


def _with_values(tree: Any, values: Mapping[KeyPath, object]) -> Any:
    """Return a copy of the tree with `values` at their key paths. Unchanged parts are shared."""
    if () in values:
        return values[()]

    below: dict[str, dict[KeyPath, object]] = {}
    for keys, value in values.items():
        below.setdefault(keys[0], {})[keys[1:]] = value

    if isinstance(tree, list):
        items: list[Any] = [*cast("Sequence[Any]", tree)]
        for key, inner in below.items():
            items[int(key)] = _with_values(items[int(key)], inner)

        return items

    mapping = dict(cast("dict[str, Any]", tree))
    for key, inner in below.items():
        mapping[key] = _with_values(mapping[key], inner)

    return mapping


def _constant(source: Source) -> Source:
    return source


def _path(info: ParamInfo) -> str:
    return "/".join(info.keys)


def _compiled(key: str) -> re.Pattern[str]:
    try:
        return re.compile(key)
    except re.error as error:
        raise SpecError(f"the transform {key!r} is not a regular expression: {error}") from error


def _compiled_inputs(rule: Transform) -> list[tuple[re.Pattern[str], Any]]:
    return [(_compiled(key), like) for key, like in (rule.multi_value_fn_input_args or {}).items()]


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
            divided anew together with `transforms`.
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
