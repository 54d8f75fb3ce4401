"""The option `transforms`: decides which stored leaves each leaf of a target is made from. Pure.

Source:
    ORBAX_FORMAT.md §6, tried with Orbax 0.12.8 by tests/interop/test_transforms.py.
"""

from __future__ import annotations

__all__ = ("match_transforms",)

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast, final

from penstock.kernel.errors import SpecError
from penstock.kernel.messages.restore import Change, RestoreOptions, Transform
from penstock.kernel.protocols.leaf import KeyPath, ParamInfo, StoredLeaf
from penstock.stages.planning.casting import source_like
from penstock.stages.planning.leaf_sources import (
    ABSENT,
    Function,
    Input,
    Matching,
    TargetLeaves,
    computed,
    described,
    keep,
    rule_difference,
)
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
