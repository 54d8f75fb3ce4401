"""Trees compared, trimmed and merged: the same calls to both libraries."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.struct
import jax
import orbax.checkpoint
import pytest
from flax.core import FrozenDict
from tests.orbax_face.signatures import signature_difference

import penstock.orbax
import penstock.orbax.v1
from penstock.orbax.v0.trees.empty_node_leaves import with_markers


class Pair(NamedTuple):
    left: Any
    right: Any


@flax.struct.dataclass
class State:
    step: Any
    params: Any


THEIRS: Any = orbax.checkpoint
OURS: Any = penstock.orbax
TREES: list[Any] = [
    {"x": [1, 2, 3], "y": "same", "z": {"p": {}, "q": 4, "r": 6}},
    {"x": [1, 3], "y": "same", "z": {"p": {}, "q": 5, "s": 6}},
    {"x": [1, 2, 3], "y": 1.0},
    {"n": None, "y": 2.0},
    {"n": 1, "z": {"q": None}},
    Pair(1, {"c": 2}),
    Pair(1.5, {"c": "2"}),
    {"left": 1, "right": {"c": 2, "d": 3}},
    State(1, {"w": [2]}),
    State(1, {"w": [2.5], "b": 3}),
    (1, {"c": 2}),
    [1, {"c": 2}],
    {"0": 1, "1": {"c": 2}},
    {},
    None,
    5,
]
PAIRS = [(a, b) for a in TREES for b in TREES]


def outcome(function: Any, *args: Any, **options: Any) -> Any:
    """What a call returns; `Exception` if it refuses."""
    try:
        return function(*args, **options)
    except Exception:
        return Exception


FROZEN: Any = FrozenDict  # not annotated


class Nothing(NamedTuple):
    pass


@flax.struct.dataclass
class Empty:
    pass


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_a_tree_without_empty_classes_needs_no_marker_and_is_not_made_anew(tree: Any) -> None:
    assert with_markers(tree) is tree


@pytest.mark.parametrize("node", [Nothing(), Empty(), FROZEN()], ids=repr)
def test_empty_nodes_of_registered_classes_are_marked_wherever_they_stand(node: Any) -> None:
    marker: Any = {} if isinstance(node, FrozenDict) else None
    assert with_markers(node) == marker
    for tree, marked in (
        ({"a": 1, "b": node}, {"a": 1, "b": marker}),
        ({"a": [1, {"b": (2, [node], {})}]}, {"a": [1, {"b": (2, [marker], {})}]}),
        (Pair(1, [node]), Pair(1, [marker])),
        (State((), {"w": (None, node)}), State((), {"w": (None, marker)})),
    ):
        assert with_markers(tree) == marked


def test_trees_are_compared() -> None:
    for a, b in PAIRS:
        mine, other = (outcome(ocp.tree.tree_difference, a, b) for ocp in (OURS, THEIRS))
        assert mine == other, (a, b)

    assert OURS.tree.tree_difference({"a": 1}, {"a": 2}, leaves_equal=int.__eq__) == {"a": (1, 2)}
    assert OURS.tree.tree_difference([1], [1.0], is_leaf=_is_list) is None


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


@pytest.mark.parametrize("overwrite", [False, True])
def test_trees_are_merged(overwrite: bool) -> None:
    assert OURS.tree.merge_trees() == THEIRS.tree.merge_trees() == {}
    for a, b in PAIRS:
        mine, other = (outcome(ocp.tree.merge_trees, a, b, overwrite=overwrite) for ocp in (OURS, THEIRS))
        if not overwrite or other is not Exception:  # where types differ, Orbax trips now and then
            assert mine == other, (a, b)


@pytest.mark.parametrize("align", [False, True])
def test_trees_are_trimmed(align: bool) -> None:
    for template, structure in [pair for pair in PAIRS if pair[0] is not None]:
        found: list[Any] = []
        for ocp in (OURS, THEIRS):
            left_out: list[Any] = []
            options = {
                "trimmed_structure_callback": lambda *entry, to=left_out: to.append(entry),
                "allow_sequence_mapping_alignment": align,
            }
            trimmed = outcome(ocp.tree.tree_trim, template, structure, **options)
            found.append((trimmed, left_out if trimmed is not Exception else None))

        assert found[0] == found[1], (template, structure)


class Unregistered(dict[str, Any]):
    """A mapping that jax takes for a leaf."""


@pytest.mark.parametrize("ocp", [OURS, THEIRS], ids=["penstock", "orbax"])
def test_a_mapping_that_jax_does_not_know_is_trimmed(ocp: Any) -> None:
    left_out: list[Any] = []

    found = ocp.tree.tree_trim(
        [Unregistered(a=1, b={"d": 1})],
        [Unregistered(a=1, b={"d": 2, "e": 3}, c=3)],
        trimmed_structure_callback=lambda *entry: left_out.append(entry),
    )

    assert type(found[0]) is Unregistered
    assert found == [{"a": 1, "b": {"d": 2}}]
    assert sorted(left_out) == [((0, "b", "e"), 3), ((0, "c"), 3)]


# In Orbax a sequence may stand for a class with named fields, all of which are missing then.
SEQUENCES_FOR_STATES = [(a, b) for a, b in PAIRS if isinstance(a, State) and isinstance(b, list | tuple)]


@pytest.mark.parametrize("align", [False, True])
def test_trees_are_trimmed_to_what_is_there_of_them(align: bool) -> None:
    for template, structure in PAIRS:
        if template is None or (template, structure) in SEQUENCES_FOR_STATES:
            continue
        found: list[Any] = []
        for ocp in (OURS, THEIRS):
            options = {"strict": False, "allow_sequence_mapping_alignment": align}
            parts = outcome(ocp.tree.tree_trim, template, structure, **options)
            whole = outcome(getattr, parts, "full_structure")
            found.append((parts is Exception or parts.unsafe_structure, whole))

        assert found[0] == found[1], (template, structure)


TEMPLATE = {"a": 1, "b": [2, {"c": 3}]}
SOME: Any = {"b": [..., {"c": 30}]}
OTHERS: Any = {"a": 10, "b": [20, {"c": ...}]}


def both_parts(library: Any, value: Any) -> Any:
    """Parts of a tree as a library makes them: that of penstock has no public name of its own in Orbax."""
    made = library.tree.tree_trim(TEMPLATE, TEMPLATE, strict=False)
    return type(made)(TEMPLATE, value)


@pytest.mark.parametrize("ocp", [OURS, THEIRS], ids=["penstock", "orbax"])
def test_parts_of_a_tree_are_put_together(ocp: Any) -> None:
    some, others = both_parts(ocp, SOME), both_parts(ocp, OTHERS)
    whole = some.overlay(others)

    assert some.unsafe_structure == {"a": ..., "b": [..., {"c": 30}]}
    assert whole.full_structure == {"a": 10, "b": [20, {"c": 30}]}
    assert (whole - some).unsafe_structure == others.unsafe_structure
    assert whole.intersect(some).unsafe_structure == some.unsafe_structure
    assert type(whole).like(whole, {"a": 5}).unsafe_structure == {"a": 5, "b": [..., {"c": ...}]}
    assert type(whole).from_structure(SOME).unsafe_structure == SOME
    assert type(whole).empty(TEMPLATE).is_empty()
    assert not some.is_empty()
    assert some.structure_hash == both_parts(ocp, SOME).structure_hash != whole.structure_hash
    assert jax.tree.map(lambda leaf: leaf + 1, some).unsafe_structure == {"a": ..., "b": [..., {"c": 31}]}
    assert some == both_parts(ocp, SOME) != others
    with pytest.raises(ValueError, match="complete"):
        _ = some.full_structure
    with pytest.raises(ValueError, match="both"):
        whole.overlay(some, strict=True)
    with pytest.raises(ValueError, match="tree"):
        both_parts(ocp, {"z": 1})
    with pytest.raises(ValueError, match=r"differ|Mismatch"):
        some.overlay(type(some)({"a": 1}, {"a": 2}))


def test_what_is_missing_of_a_tree_is_named() -> None:
    with pytest.raises(ValueError, match="lacks 2 leaves, among them a, b/0") as raised:
        _ = both_parts(OURS, SOME).full_structure

    assert vars(raised.value)["missing"] == (("a",), ("b", "0"))


@pytest.mark.parametrize("name", ["merge_trees", "tree_difference", "tree_trim"])
def test_signatures_are_orbaxs(name: str) -> None:
    assert signature_difference(getattr(OURS.tree, name), getattr(THEIRS.tree, name)) is None


def test_both_apis_merge_alike() -> None:
    assert penstock.orbax.v1.tree.merge is OURS.tree.merge_trees
