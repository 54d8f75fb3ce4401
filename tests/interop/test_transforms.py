"""Every row of ORBAX_FORMAT.md §6: Orbax 0.12.8 and penstock give the same, or both refuse.

Where Orbax gives what nobody can have asked for, penstock refuses; `REFUSED_BY_US_ALONE` has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import penstock
from penstock.errors import PenstockError

Compare = Callable[[Any, Any], None]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:DeprecationWarning:orbax"),
]

TWO = np.full(2, 7)  # what targets have where the checkpoint has two int64
THREE = np.full(3, 7.0)  # ... three float64
ONE = np.full(1, 7.0)
DEVICE = jnp.full((2, 3), 7.0)
NEW = np.full(4, 9)  # what no checkpoint leaf looks like


class Pair(NamedTuple):
    left: Any
    right: Any


class Case(NamedTuple):
    like: Any
    transforms: dict[str, dict[str, Any]]
    to_original: bool = True


def add_one(value: Any) -> Any:
    return value + 1


def total(key: str, tree: Any, _: Any) -> Any:
    assert key == "x"
    return np.asarray(tree["a"].sum() + tree["b"]["c"].sum())


INPUTS = {"a": np.ndarray, "b/c": np.ndarray}

SAME: dict[str, Case] = {
    # no transform for the key
    "in the checkpoint": Case({"a": TWO, "j": DEVICE, "s": 0, "t": (ONE,)}, {}),
    "in the checkpoint, target by default": Case({"a": TWO, "j": DEVICE, "s": 0}, {}, to_original=False),
    "not in the checkpoint": Case({"a": TWO, "x": NEW, "y": "text", "z": {"deep": 1.5}}, {}),
    "not in the checkpoint, target by default": Case({"x": NEW}, {}, to_original=False),
    "unknown rules are ignored": Case({"a": TWO}, {"zzz": {"original_key": "nothing"}}),
    "a rule must match all of the key": Case({"aa": NEW}, {"a": {"original_key": "a"}}),
    "a node where a leaf is stored": Case({"a": {"deep": NEW}}, {}),
    "a leaf where a node is stored": Case({"b": NEW}, {}),
    # use_fallback
    "fallback": Case({"a": TWO}, {"a": {"use_fallback": True}}),
    "fallback of what is not stored": Case({"x": NEW}, {"x": {"use_fallback": True}}),
    "fallback to the original": Case({"a": TWO}, {"a": {"use_fallback": True}}, to_original=False),
    # original_key
    "original key": Case({"x": THREE}, {"x": {"original_key": "b/c"}}),
    "original key, target by default": Case(
        {"x": THREE, "a": TWO}, {"x": {"original_key": "b/c"}}, to_original=False
    ),
    "index in a list": Case({"x": ONE}, {"x": {"original_key": "b/d/0"}}),
    "back-references": Case(
        {"q": {"c": THREE, "d": [ONE, TWO * 1.0]}}, {r"q/(.*)": {"original_key": r"b/\1"}}
    ),
    "named back-references": Case({"q": {"c": THREE}}, {r"q/(?P<rest>.*)": {"original_key": r"b/\g<rest>"}}),
    "two of one": Case({"x": TWO, "y": TWO}, {"x|y": {"original_key": "a"}}),
    "a scalar": Case({"x": 0}, {"x": {"original_key": "s"}}),
    "an array of jax": Case({"x": DEVICE}, {"x": {"original_key": "j"}}),
    "a tuple for a list": Case({"x": (ONE, TWO * 1.0)}, {r"x/(\d)": {"original_key": r"b/d/\1"}}),
    "fields of a namedtuple": Case(
        Pair(TWO, THREE), {"left": {"original_key": "a"}, "right": {"original_key": "b/c"}}
    ),
    "a rule that says nothing": Case({"a": TWO}, {"a": {}}),
    "a rule that says nothing, target by default": Case({"a": TWO}, {"a": {}}, to_original=False),
    "a bare leaf": Case(TWO, {"": {"original_key": "a"}}),
    # several rules for one key
    "the last in sorted order": Case({"x": TWO}, {"x.*": {"original_key": "a"}, "x": {"original_key": "j"}}),
    "the last in sorted order, given first": Case(
        {"x": TWO}, {"x": {"original_key": "j"}, "x.*": {"original_key": "a"}}
    ),
    "a fallback, last": Case({"a": TWO}, {"a": {"value_fn": add_one}, "a.*": {"use_fallback": True}}),
    "a fallback, first": Case({"a": TWO}, {"a": {"use_fallback": True}, "a.*": {"value_fn": add_one}}),
    "a fallback overrules nothing": Case(
        {"x": TWO}, {"x": {"original_key": "a"}, "x.*": {"use_fallback": True}}
    ),
    "a fallback to the original does": Case(
        {"a": TWO}, {"a": {"value_fn": add_one}, "a.*": {"use_fallback": True}}, to_original=False
    ),
    "a function overrules another": Case(
        {"a": TWO}, {"a": {"value_fn": add_one}, "a.*": {"value_fn": lambda value: value * 2}}
    ),
    "a rule that says nothing overrules": Case({"a": TWO}, {"a": {"value_fn": add_one}, "a.*": {}}),
    "two of one, only one made": Case(
        {"x": TWO, "y": TWO}, {"x": {"original_key": "a", "value_fn": add_one}, "y": {"original_key": "a"}}
    ),
    # value_fn
    "value_fn": Case({"a": TWO}, {"a": {"value_fn": add_one}}),
    "value_fn, target by default": Case({"a": TWO}, {"a": {"value_fn": add_one}}, to_original=False),
    "value_fn of another": Case({"x": TWO}, {"x": {"original_key": "a", "value_fn": add_one}}),
    "value_fn of a scalar": Case({"s": 0}, {"s": {"value_fn": add_one}}),
    "value_fn of an array of jax": Case({"j": DEVICE}, {"j": {"value_fn": lambda value: value.at[0].set(5)}}),
    "value_fn of another shape": Case(
        {"x": ONE}, {"x": {"original_key": "b/c", "value_fn": lambda value: value[1:2]}}
    ),
    # multi_value_fn
    "multi_value_fn": Case(
        {"x": np.zeros(())}, {"x": {"multi_value_fn": total, "multi_value_fn_input_args": INPUTS}}
    ),
    "multi_value_fn, target by default": Case(
        {"x": np.zeros(())},
        {"x": {"multi_value_fn": total, "multi_value_fn_input_args": INPUTS}},
        to_original=False,
    ),
    "multi_value_fn with patterns": Case(
        {"x": THREE},
        {
            "x": {
                "multi_value_fn": lambda key, tree, _: np.concatenate(tree["b"]["d"]),
                "multi_value_fn_input_args": {r"b/d/\d": np.ndarray},
            }
        },
    ),
    "multi_value_fn of nothing": Case(
        {"x": 0},
        {"x": {"multi_value_fn": lambda *_: 3, "multi_value_fn_input_args": {"unknown": np.ndarray}}},
    ),
    # None and empty containers
    "empties stay": Case({"a": TWO, "n": None, "e": {}, "new": None, "list": []}, {}),
    "empties stay, whatever is stored": Case({"a": None, "b": {}, "j": DEVICE}, {}),
    "empties stay, whatever the rules": Case(
        {"x": {}, "y": None}, {"x": {"original_key": "a"}, "y": {"use_fallback": True}}
    ),
    "an empty target": Case({}, {}),
}

BOTH_REFUSE: dict[str, Case] = {
    "original key that is not stored": Case({"x": TWO}, {"x": {"original_key": "zz"}}),
    "original key that is a node": Case({"x": TWO}, {"x": {"original_key": "b"}}),
    "original key without letters": Case({"x": TWO}, {"x": {"original_key": ""}}),
    "original key that is not stored, overruled": Case(
        {"x": TWO}, {"x": {"original_key": "zz"}, "x.*": {"original_key": "a"}}
    ),
    "fallback to an original that is not stored": Case(
        {"x": TWO}, {"x": {"use_fallback": True}}, to_original=False
    ),
    "a rule that says nothing, of what is not stored": Case({"x": TWO}, {"x": {}}),
    "fallback to an original that is not stored, last": Case(
        {"x": THREE}, {"x": {"original_key": "b/c"}, "x.*": {"use_fallback": True}}, to_original=False
    ),
    "value_fn of what is not stored": Case({"x": TWO}, {"x": {"value_fn": add_one}}),
    "value_fn of what is not stored, target by default": Case(
        {"x": TWO}, {"x": {"value_fn": add_one}}, to_original=False
    ),
    "value_fn of two arguments": Case({"a": TWO}, {"a": {"value_fn": lambda value, args: value}}),
    "value_fn that raises": Case({"a": TWO}, {"a": {"value_fn": lambda value: value[99]}}),
    "multi_value_fn without inputs": Case({"x": TWO}, {"x": {"multi_value_fn": total}}),
    "multi_value_fn of undeclared leaves": Case(
        {"x": TWO}, {"x": {"multi_value_fn": total, "multi_value_fn_input_args": {"a": np.ndarray}}}
    ),
    "no regular expression": Case({"x": TWO}, {"x(": {"original_key": "a"}}),
    "a reference to no group": Case({"x": TWO}, {"x": {"original_key": r"\1"}}),
    "a tuple as original key": Case({"x": TWO}, {"x": {"original_key": ("a",)}}),
    "original_key and use_fallback": Case({"x": TWO}, {"x": {"original_key": "a", "use_fallback": True}}),
    "value_fn and use_fallback": Case({"a": TWO}, {"a": {"value_fn": add_one, "use_fallback": True}}),
    "multi_value_fn and original_key": Case(
        {"x": TWO}, {"x": {"multi_value_fn": total, "original_key": "a"}}
    ),
    "multi_value_fn and value_fn": Case({"x": TWO}, {"x": {"multi_value_fn": total, "value_fn": add_one}}),
    "multi_value_fn and use_fallback": Case(
        {"x": TWO}, {"x": {"multi_value_fn": total, "use_fallback": True}}
    ),
    "inputs without multi_value_fn": Case(
        {"x": TWO}, {"x": {"original_key": "a", "multi_value_fn_input_args": {}}}
    ),
}

# What Orbax gives instead is in the comment.
REFUSED_BY_US_ALONE: dict[str, Case] = {
    # an object that describes the entry in _METADATA, as if it were the value
    "a leaf where None is stored": Case({"n": TWO}, {}),
    "a leaf where an empty dict is stored": Case({"e": TWO}, {}),
    "original key that is None": Case({"x": TWO}, {"x": {"original_key": "n"}}),
    "value_fn of None": Case({"n": TWO}, {"n": {"value_fn": lambda value: TWO}}),
    # an array of the stored shape, cast if need be
    "another shape": Case({"a": np.zeros(9, np.int64)}, {}),
    "another dtype": Case({"a": np.zeros(2)}, {}),
    "another kind": Case({"x": ONE}, {"x": {"original_key": "s"}}),
    # whatever the function gives, in place of the leaf
    "value_fn to another shape": Case({"b": {"c": THREE}}, {"b/c": {"value_fn": lambda value: value[:1]}}),
    "value_fn to None": Case({"a": TWO}, {"a": {"value_fn": lambda value: None}}),
    "multi_value_fn to a tree": Case(
        {"x": TWO},
        {
            "x": {
                "multi_value_fn": lambda key, tree, _: tree["b"],
                "multi_value_fn_input_args": {"b/.*": np.ndarray},
            }
        },
    ),
    # the abstract value itself
    "an abstract fallback": Case({"x": jax.ShapeDtypeStruct((2,), np.float32)}, {}),  # type: ignore[no-untyped-call]  # jax's
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("transforms") / "ckpt"
    tree = {
        "a": np.arange(2),
        "b": {"c": np.arange(3.0), "d": [np.ones(1), np.ones(2) * 2]},
        "e": {},
        "j": jnp.arange(6.0).reshape(2, 3),
        "n": None,
        "s": 5,
        "t": (np.zeros(1),),
    }
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, tree)

    return path


@pytest.fixture(scope="module")
def orbax() -> Iterator[Any]:
    with ocp.PyTreeCheckpointer() as checkpointer:
        yield checkpointer


def by_orbax(checkpointer: Any, path: Path, case: Case) -> Any:
    def rule(options: dict[str, Any]) -> Any:
        inputs = options.get("multi_value_fn_input_args")
        if inputs is not None:
            inputs = {key: ocp.RestoreArgs(restore_type=type_) for key, type_ in inputs.items()}
            options = {**options, "multi_value_fn_input_args": inputs}
        return ocp.RestoreTransform(**options)

    return checkpointer.restore(
        path,
        item=case.like,
        transforms={key: rule(options) for key, options in case.transforms.items()},
        restore_args=ocp.checkpoint_utils.construct_restore_args(case.like),
        transforms_default_to_original=case.to_original,
    )


def by_penstock(ours: Any, path: Path, case: Case) -> Any:
    return ours.restore(
        path,
        like=case.like,
        transforms={key: penstock.Transform(**options) for key, options in case.transforms.items()},
        transforms_default_to_original=case.to_original,
    )


@pytest.mark.parametrize("name", SAME)
def test_transforms_that_orbax_and_penstock_do_alike(
    saved: Path, orbax: Any, ours: Any, compare: Compare, name: str
) -> None:
    compare(by_penstock(ours, saved, SAME[name]), by_orbax(orbax, saved, SAME[name]))


@pytest.mark.parametrize("name", BOTH_REFUSE)
def test_transforms_that_orbax_and_penstock_both_refuse(
    saved: Path, orbax: Any, ours: Any, name: str
) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - asserts, lookups, whatever it happens to run into
        by_orbax(orbax, saved, BOTH_REFUSE[name])
    with pytest.raises(PenstockError):
        by_penstock(ours, saved, BOTH_REFUSE[name])


@pytest.mark.parametrize("name", REFUSED_BY_US_ALONE)
def test_refused_by_us_alone(saved: Path, orbax: Any, ours: Any, name: str) -> None:
    by_orbax(orbax, saved, REFUSED_BY_US_ALONE[name])
    with pytest.raises(PenstockError):
        by_penstock(ours, saved, REFUSED_BY_US_ALONE[name])


def test_transforms_need_a_target_in_orbax_and_penstock(saved: Path, orbax: Any, ours: Any) -> None:
    with pytest.raises(ValueError, match="item"):
        orbax.restore(saved, transforms={})
    with pytest.raises(PenstockError, match="like"):
        ours.restore(saved, transforms={})


@pytest.mark.parametrize("shape", [(5, 2), (2, 6), (1, 1), (2, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, jnp.bfloat16])
def test_padded_cut_off_and_cast_alike(
    saved: Path, orbax: Any, ours: Any, compare: Compare, shape: tuple[int, int], dtype: Any
) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    place: Any = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())  # type: ignore[no-untyped-call]  # jax's
    make: Any = jax.ShapeDtypeStruct
    args = ocp.ArrayRestoreArgs(sharding=place, global_shape=shape, dtype=dtype, strict=False)
    rest = {"a": ..., "b": {"c": ..., "d": [..., ...]}, "e": {}, "n": None, "s": ..., "t": (...,)}
    theirs = orbax.restore(
        saved,
        item={"j": 0, **rest},
        restore_args={"j": args, **jax.tree.map(lambda _: ocp.RestoreArgs(), rest)},
    )
    like = {"j": make(shape, dtype, sharding=place)}
    found = ours.restore(saved, like=like, strict=False, dtype="like", on_unexpected="skip")
    compare(found["j"], theirs["j"])
