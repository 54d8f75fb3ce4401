"""The cache of structures: it gives the same answer as no cache, and never that of another tree."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import tree_util

from penstock import PerProcess
from penstock.errors import DuplicateNameError, InvalidLeafError, SpecError
from penstock.kernel.memory import BoundedCache
from penstock.kernel.protocols import keys_of, names_of, runs_of
from penstock.stages.pytree.flattening import StructureCache, flatten_tree

_jax: Any = tree_util


class Point(NamedTuple):
    x: Any
    y: Any


class Other(NamedTuple):
    x: Any
    z: Any


class Nothing(NamedTuple):
    pass


class Box:
    """A node whose key names differ by instance, and whose static data compares equal to any other."""

    def __init__(self, value: Any, name: str) -> None:
        self.value = value
        self.name = name

    def __repr__(self) -> str:
        return f"Box({self.value!r}, {self.name!r})"


class AlwaysEqual:
    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AlwaysEqual)

    __hash__ = None  # type: ignore[assignment]


class Refusing:
    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


class Holder:
    """A node without key names, whose static data can be neither compared nor hashed."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __repr__(self) -> str:
        return f"Holder{self.values!r}"


_jax.register_pytree_with_keys(
    Box,
    lambda box: (((_jax.GetAttrKey(box.name), box.value),), AlwaysEqual(box.name)),
    lambda aux, children: Box(children[0], aux.name),
)
_jax.register_pytree_node(
    Holder, lambda holder: (holder.values, Refusing()), lambda _, children: Holder(*children)
)


def check_same(cache: StructureCache, tree: object) -> Sequence[object]:
    """Flatten with and without the cache, compare the results, and return the infos."""
    flat, treedef = flatten_tree(tree)
    infos, leaves, found = cache.flatten(tree)
    assert list(infos) == [infos[at] for at in range(len(infos))] == [leaf.info for leaf in flat]
    assert names_of(infos) == [leaf.info.name for leaf in flat]
    assert keys_of(infos) == [leaf.info.keys for leaf in flat]
    if all(leaf.info.keys for leaf in flat):
        runs = [
            (*run.outer, key, *run.outer_kinds, kind)
            for run in runs_of(infos)
            for key, kind in zip(run.keys, run.kinds, strict=True)
        ]
        assert runs == [(*leaf.info.keys, *leaf.info.kinds) for leaf in flat]

    assert len(leaves) == len(flat)
    assert all(a is b.value for a, b in zip(leaves, flat, strict=True))
    assert type(found) is type(treedef)
    return infos


TREES = [
    3,
    None,
    {},
    [],
    (),
    {"b": 1, "a": [2, (3, None), {"c": {}}]},
    {1: "one", 0: "zero", 10: "ten", 2: "two"},
    {True: 1, False: 2},
    {0: 1, True: 2},
    {1.5: 1, 0.5: 2},
    OrderedDict(b=1, a=2),
    defaultdict(int, b=1, a=2),
    Point({"x": 1}, [Nothing(), Other(1, 2)]),
    Box({"x": 1, "y": Box(2, "inner")}, "outer"),
    Holder(1, {"a": 2}, Holder(3), Holder()),
    [Holder(), 1, Holder()],
    Holder(),
    [[[[[1], 2], 3], 4], 5],
    [1, [2, [3, [4, [5]]]]],
    {"ä": 1, "日": 2},
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_a_tree_is_taken_apart_as_without_the_cache(tree: object) -> None:
    cache = StructureCache(BoundedCache(8))
    check_same(cache, tree)
    check_same(cache, tree)


def test_the_same_structure_gives_the_very_same_infos_whatever_the_leaves() -> None:
    cache = StructureCache(BoundedCache(8))
    first, _, _ = cache.flatten({"a": 1, "b": [2, None], "p": Point(1, 2), "x": Box(1, "n")})
    second, leaves, _ = cache.flatten({"a": "t", "b": [np.ones(2), {}], "p": Point(3, 4), "x": Box(5, "n")})
    assert first is second
    assert leaves[0] == "t"


CHANGES = [
    ({"a": 1, "b": 2}, {"a": 1, "c": 2}),
    ({"a": 1, "b": 2}, {"a": 1}),
    ({1: 5}, {True: 5}),
    ({1: 5}, {1.0: 5}),
    ({0.0: 5}, {-0.0: 5}),
    ({0: 1, 1: 2}, {False: 1, True: 2}),
    ({0: 1, 1: 2}, [1, 2]),
    ([1, 2], (1, 2)),
    ([[1], 2], [1, [2]]),
    ([[1, 2]], [[1], [2]]),
    ([1, [2]], [1, 2]),
    ({"0": 1}, {0: 1}),
    ({"x": 1, "y": 2}, Point(1, 2)),
    (Point(1, 2), Other(1, 2)),
    ({"x": 1}, OrderedDict(x=1)),
    (OrderedDict(x=1, y=2), OrderedDict(y=1, x=2)),
    (Box(1, "one"), Box(1, "two")),
    (Box([1], "one"), Box(1, "one")),
    (Holder(1, 2), Holder(1)),
    ([Holder(), 1], [1, Holder()]),
    ({"a": None}, {"a": [1]}),
    ({"a": {}, "b": 1}, {"a": {"b": 1}}),
]


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=repr)
def test_a_changed_tree_never_reuses_what_was_remembered(before: object, after: object) -> None:
    cache = StructureCache(BoundedCache(8))
    first = check_same(cache, before)
    second = check_same(cache, after)
    assert first is not second
    check_same(cache, before)


def test_keys_whose_names_cannot_be_told_from_their_equality_are_not_remembered() -> None:
    cache = StructureCache(BoundedCache(8))
    first = check_same(cache, {1.5: 1})
    assert check_same(cache, {1.5: 1}) is not first


def test_the_treedef_is_the_trees_own() -> None:
    cache = StructureCache(BoundedCache(8))
    cache.flatten(Box(1, "same"))
    tree = Box(2, "same")
    _, leaves, treedef = cache.flatten(tree)
    rebuilt = _jax.tree_unflatten(treedef, leaves)
    assert isinstance(rebuilt, Box)
    assert rebuilt.value == 2


def test_a_class_that_becomes_a_node_is_noticed() -> None:
    class Late:
        def __init__(self, value: object) -> None:
            self.value = value

    cache = StructureCache(BoundedCache(8))
    assert len(check_same(cache, [Late([1, 2])])) == 1
    _jax.register_pytree_node(Late, lambda late: ((late.value,), None), lambda _, children: Late(*children))
    assert len(check_same(cache, [Late([1, 2])])) == 2


def test_only_the_last_few_structures_are_remembered() -> None:
    cache = StructureCache(BoundedCache(2))
    first, _, _ = cache.flatten([1])
    second, _, _ = cache.flatten([1, 2])
    assert cache.flatten([1])[0] is first
    cache.flatten([1, 2, 3])
    assert cache.flatten([1])[0] is first
    assert cache.flatten([1, 2])[0] is not second


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        ({"a.b": 1, "a": {"b": 2}}, DuplicateNameError),
        ({"a": 1, 2: 3}, SpecError),
        ({"\ud800": 1}, InvalidLeafError),
    ],
)
def test_what_cannot_be_stored_is_refused_each_time(tree: object, error: type[Exception]) -> None:
    cache = StructureCache(BoundedCache(8))
    for _ in range(2):
        with pytest.raises(error):
            cache.flatten(tree)


def test_abstract_leaves_are_leaves() -> None:
    cache = StructureCache(BoundedCache(8))
    tree = {"s": cast("Any", jax).ShapeDtypeStruct((2,), np.float32), "t": np.ndarray, "u": int}
    check_same(cache, tree)


def test_the_cache_holds_no_value_of_the_tree() -> None:
    class Leaf:
        alive = 0

        def __init__(self) -> None:
            Leaf.alive += 1

        def __del__(self) -> None:
            Leaf.alive -= 1

    cache = StructureCache(BoundedCache(8))
    cache.flatten({"a": Leaf(), "b": Box([Leaf()], "n")})
    assert Leaf.alive == 0


def test_threads_may_share_the_cache_of_structures() -> None:
    cache = StructureCache(BoundedCache(2))
    trees: list[Any] = [[0] * n for n in range(1, 6)]

    def work() -> None:
        for tree in trees * 20:
            assert len(cache.flatten(tree)[0]) == len(tree)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


keys = st.one_of(st.sampled_from("abc"), st.text(max_size=2))
trees = st.recursive(
    st.one_of(st.none(), st.integers()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.integers(0, 12), inner, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Box, inner, st.sampled_from("pq")),
        st.lists(inner, max_size=2).map(lambda values: Holder(*values)),
    ),
    max_leaves=12,
)


@pytest.mark.many_cases
@given(st.lists(trees, min_size=1, max_size=4))
def test_cached_structures_of_any_trees_equal_fresh_ones(found: list[object]) -> None:
    cache = StructureCache(BoundedCache(3))
    for tree in [*found, *found]:
        try:
            flatten_tree(tree)
        except SpecError:
            with pytest.raises(SpecError):
                cache.flatten(tree)
        else:
            check_same(cache, tree)


@pytest.mark.parametrize("keys", [("x", "y"), ("x", 1.5)], ids=["cached", "never cached"])
def test_what_each_process_has_stands_below_its_key(keys: tuple[object, ...]) -> None:
    cache = StructureCache(BoundedCache(8))
    tree = {"a": 0, "it": PerProcess([dict.fromkeys(keys[:1], 0), 0]), "z": dict.fromkeys(keys[1:], 0)}
    found = {count: cache.flatten(tree, (count - 1, count))[0] for count in (1, 2, 3)}

    assert [info.name for info in found[1]][:3] == ["a", "it.0.x", "it.1"]
    for count in (2, 3):
        assert [info.name for info in found[count]][1] == f"it.process_{count - 1}-of-{count}.0.x"
        assert len(found[count][1].kinds) == len(found[count][1].keys)
    assert {info.own_from for infos in found.values() for info in infos[1:3]} == {1}
    assert {info.own_from for infos in found.values() for info in (infos[0], *infos[3:])} == {None}
    assert cache.flatten(tree, (0, 2))[0][1].name == "it.process_0-of-2.0.x"
