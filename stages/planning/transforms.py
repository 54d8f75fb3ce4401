"""Transforms over the leaves of a target: which stored leaves each is made of. Pure.

Source:
    ORBAX_FORMAT.md §6, tried with Orbax 0.12.8 by tests/interop/test_transforms.py.
"""

from __future__ import annotations

__all__ = ("match_transforms",)

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast, final

from penstock.kernel.errors import SpecError
from penstock.kernel.messages.restore_options import Change, RestoreOptions, Transform
from penstock.kernel.protocols.leaf import KeyPath, ParamInfo, StoredLeaf
from penstock.stages.planning.leaf_sources import (
    Function,
    Input,
    Matching,
    Origin,
    described,
    keep,
    rule_difference,
)
from penstock.stages.planning.value_conversion import source_like
from penstock.stages.pytree.flattening import FlatLeaf, is_empty, nest


def match_transforms(
    flat: Sequence[FlatLeaf], stored_leaves: Sequence[StoredLeaf], options: RestoreOptions
) -> Matching:
    """Decide for each leaf of a target what it is made of.

    Every rule whose key matches is tried, in the order of the sorted keys; the last one counts, and
    the others must be possible. `use_fallback` that means the target counts only if no other rule
    matches. Leaves without a rule come from the checkpoint if it has them (or
    are the target's, if that is the default), else they are the target's. None and empty containers
    stay as the target has them.

    Args:
        flat: The target's leaves.
        stored_leaves: All that are stored.
        options: Of which `transforms` and `transforms_default_to_original` count here.

    Raises:
        SpecError: If the key of a rule is no regular expression.
    """
    matcher = _Matcher(stored_leaves, options)
    for found in flat:
        matcher.add(found)

    return matcher.finish()


@final
class _Matcher:
    def __init__(self, stored_leaves: Sequence[StoredLeaf], options: RestoreOptions) -> None:
        transforms = options.transforms or {}
        self._rules = [
            (key, _compiled(key), transforms[key], _compiled_inputs(transforms[key]))
            for key in sorted(transforms)
        ]
        self._to_original = options.transforms_default_to_original
        self._stored_leaves = stored_leaves
        self._stored = {_path(stored.info): stored for stored in stored_leaves}
        counts = Counter(_path(stored.info) for stored in stored_leaves)
        self._ambiguous = {path for path, count in counts.items() if count > 1}
        self._tree = _LazyTree(stored_leaves)
        self._used: set[KeyPath] = set()
        self._used_rules: set[str] = set()
        self._matching = Matching()

    def add(self, found: FlatLeaf) -> None:
        """Append the origin of one leaf of the target."""
        if is_empty(found.value):
            self._matching.origins.append(Origin(found.info, found.value, has_like=True))
            return

        path = _path(found.info)
        decide: Callable[[], Origin | None] | None = None
        for key, pattern, rule, inputs in self._rules:
            matched = pattern.fullmatch(path)
            if matched is not None:
                self._used_rules.add(key)
                # To fall back to the target is what is done when no other rule says more.
                if decide is None or not (rule.use_fallback and self._to_original):
                    decide = self._by_rule(found, rule, inputs, matched)

        if decide is None:
            stored = self._find(path, found.info) if self._to_original else None
            decide = partial(_read, found, stored)

        origin = decide()
        if origin is None:
            keep(self._matching, found.info, found.value)
        else:
            self._use(origin)

    def finish(self) -> Matching:
        """Return the origins, with what is told of leaves and rules that were not used."""
        changes = self._matching.changes
        changes += [
            Change("skipped", stored.info.key_path, stored.spec.typestr)
            for stored in self._stored_leaves
            if stored.info.keys not in self._used and not stored.spec.is_empty_marker
        ]
        changes += [Change("unused", key) for key, *_ in self._rules if key not in self._used_rules]
        return self._matching

    def _by_rule(
        self,
        found: FlatLeaf,
        rule: Transform,
        inputs: Sequence[tuple[re.Pattern[str], Any]],
        matched: re.Match[str],
    ) -> Callable[[], Origin | None]:
        """Say how a rule makes a leaf; also of a rule that another one overrules, it must be possible."""
        path = _path(found.info)
        if rule.use_fallback and self._to_original:
            return partial(_read, found, None)
        if rule.multi_value_fn is not None:
            return partial(self._by_several, found, rule.multi_value_fn, inputs)

        original = path if rule.original_key is None else self._expanded(rule.original_key, matched, found)
        stored = None if original is None else self._find(original, found.info)
        if stored is None:
            if original is not None and original not in self._ambiguous:
                self._refuse(found.info, f"{original!r} is not in the checkpoint")

            return partial(_broken, found)
        if rule.value_fn is not None:
            return partial(self._by_one, found, rule.value_fn, stored)

        return partial(_read, found, stored)

    def _by_one(self, found: FlatLeaf, function: Callable[[Any], Any], stored: StoredLeaf) -> Origin:
        if stored.spec.is_empty_marker:
            problem = f"value_fn is for {stored.info.key_path}, which is an empty {stored.spec.typestr}"
            self._refuse(found.info, problem)
            return _broken(found)

        like, has_like, prepare = source_like(stored.spec, found.value)

        def call(values: Sequence[Any]) -> object:
            return function(prepare(values[0]))

        made = Function(described("value_fn", function), (Input(stored, like, has_like),), call)
        return Origin(found.info, found.value, has_like=True, function=made)

    def _by_several(
        self,
        found: FlatLeaf,
        function: Callable[[str, Any, Any], Any],
        patterns: Sequence[tuple[re.Pattern[str], Any]],
    ) -> Origin:
        inputs: list[Input] = []
        for stored in self._stored_leaves:
            path = _path(stored.info)
            like = next((like for pattern, like in patterns if pattern.fullmatch(path)), _UNDECLARED)
            if like is not _UNDECLARED and not stored.spec.is_empty_marker:
                inputs.append(Input(stored, like, has_like=like is not None))

        keys = [each.stored.info.keys for each in inputs]

        def call(values: Sequence[Any]) -> object:
            tree = _with_values(self._tree.get(), dict(zip(keys, values, strict=True)))
            return function(_path(found.info), tree, found.value)

        made = Function(described("multi_value_fn", function), tuple(inputs), call)
        return Origin(found.info, found.value, has_like=True, function=made)

    def _expanded(self, original_key: str, matched: re.Match[str], found: FlatLeaf) -> str | None:
        try:
            return matched.expand(original_key)
        except (re.error, IndexError) as error:
            self._refuse(found.info, f"original_key {original_key!r}: {error}")
            return None

    def _find(self, path: str, info: ParamInfo) -> StoredLeaf | None:
        if path in self._ambiguous:
            problem = f"{path!r} means several leaves of the checkpoint, for keys in it contain slashes"
            self._refuse(info, problem)
            return None

        return self._stored.get(path)

    def _use(self, origin: Origin) -> None:
        self._matching.origins.append(origin)
        key_path = origin.info.key_path
        if origin.read is not None:
            self._used.add(origin.read.info.keys)
            if origin.read.info.keys != origin.info.keys:
                self._matching.changes.append(Change("renamed", key_path, origin.read.info.key_path))
        elif origin.function is not None:
            stored = [each.stored.info for each in origin.function.inputs]
            self._used.update(info.keys for info in stored)
            shown = ", ".join(info.key_path for info in stored[:8]) + (", ..." if len(stored) > 8 else "")
            self._matching.changes.append(Change("computed", key_path, shown))

    def _refuse(self, info: ParamInfo, problem: str) -> None:
        self._matching.differences.append(rule_difference(info.key_path, problem))


_UNDECLARED: Any = object()


@final
class _LazyTree:
    """The checkpoint's tree, with what is known of each leaf in its place; made when it is first needed."""

    def __init__(self, stored_leaves: Sequence[StoredLeaf]) -> None:
        self._stored_leaves = stored_leaves
        self._made: list[object] = []

    def get(self) -> object:
        if not self._made:
            stored = self._stored_leaves
            self._made.append(nest([leaf.info for leaf in stored], [leaf.spec for leaf in stored]))

        return self._made[0]


def _with_values(tree: Any, values: Mapping[KeyPath, object]) -> Any:
    """Return the tree with other leaves at some key paths. What is not changed is shared."""
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


def _read(found: FlatLeaf, stored: StoredLeaf | None) -> Origin | None:
    return None if stored is None else Origin(found.info, found.value, has_like=True, read=stored)


def _broken(found: FlatLeaf) -> Origin:
    """Stand for a leaf whose rule cannot be carried out, which was told."""
    return Origin(found.info, found.value, has_like=True)


def _path(info: ParamInfo) -> str:
    return "/".join(info.keys)


def _compiled(key: str) -> re.Pattern[str]:
    try:
        return re.compile(key)
    except re.error as error:
        raise SpecError(f"the transform {key!r} is no regular expression: {error}") from error


def _compiled_inputs(rule: Transform) -> list[tuple[re.Pattern[str], Any]]:
    return [(_compiled(key), like) for key, like in (rule.multi_value_fn_input_args or {}).items()]
