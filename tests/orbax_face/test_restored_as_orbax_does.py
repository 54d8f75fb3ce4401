"""The same script on both libraries: what restores give and refuse where the request and the tree differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax.training.train_state import TrainState
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1

import penstock.orbax

both = pytest.mark.parametrize("ocp", [penstock.orbax, orbax.checkpoint], ids=["penstock", "orbax"])
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring"),
    pytest.mark.filterwarnings("ignore:.*requested in .* is not available"),
]


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A tree whose jax.Arrays have 64 bits, saved where jax allows them."""
    with jax.enable_x64(True):
        tree = {"f": jnp.arange(4, dtype=jnp.float64) / 3, "i": jnp.arange(3, dtype=jnp.int64)}
        with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "wide", {**tree, "n": np.arange(2.0)})

    return tmp_path / "wide"


def _dtypes(tree: Any) -> dict[str, str]:
    kinds = {key: "jax" if isinstance(leaf, jax.Array) else "np" for key, leaf in tree.items()}
    return {key: f"{kinds[key]} {leaf.dtype}" for key, leaf in tree.items()}


@both
def test_jax_arrays_have_a_dtype_that_jax_has_here(wide: Path, ocp: Any) -> None:
    narrow = {"f": "jax float32", "i": "jax int32", "n": "np float64"}
    here = SingleDeviceSharding(jax.devices()[0])
    args = {
        "f": ocp.ArrayRestoreArgs(sharding=here),
        "i": ocp.ArrayRestoreArgs(sharding=here, dtype=np.int64),
        "n": ocp.RestoreArgs(restore_type=np.ndarray),
    }
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert _dtypes(checkpointer.restore(wide)) == narrow
        restored = checkpointer.restore(wide, args=ocp.args.PyTreeRestore(restore_args=args))
        assert _dtypes(restored) == narrow
        np.testing.assert_array_equal(restored["f"], (np.arange(4) / 3).astype(np.float32))


@both
def test_jax_arrays_have_a_dtype_that_jax_has_here_in_v1(wide: Path, ocp: Any) -> None:
    struct: Any = jax.ShapeDtypeStruct
    here = SingleDeviceSharding(jax.devices()[0])
    abstract = {
        "f": struct((4,), np.float64, sharding=here),
        "i": struct((3,), np.int64, sharding=here),
        "n": np.empty(2),
    }

    restored = ocp.v1.load(wide, abstract, checkpointable_name=None)

    assert _dtypes(restored) == {"f": "jax float32", "i": "jax int32", "n": "np float64"}


@both
@pytest.mark.parametrize("wrong", ["typo", "missing", "one for all"])
def test_restore_args_must_fit_the_tree(tmp_path: Path, ocp: Any, wrong: str) -> None:
    tree = {"a": np.arange(3), "b": {"c": np.arange(2)}}
    one = ocp.RestoreArgs(restore_type=np.ndarray)
    args = {
        "typo": {"a": one, "b": {"d": one}},
        "missing": {"a": one},
        "one for all": one,
    }[wrong]
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", tree)
        for item in (None, tree):
            with pytest.raises((ValueError, KeyError)):
                checkpointer.restore(tmp_path / "tree", args=ocp.args.PyTreeRestore(item, args))


@both
def test_restore_args_may_be_none_for_a_leaf_and_more_than_part_of_a_tree(tmp_path: Path, ocp: Any) -> None:
    tree = {"a": np.arange(3), "b": {}, "c": np.arange(2), "d": None}
    one = ocp.RestoreArgs(restore_type=np.ndarray)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", tree)
        args = {"a": one, "b": {}, "c": one, "d": None}
        restored = checkpointer.restore(tmp_path / "tree", args=ocp.args.PyTreeRestore(tree, args))
        assert restored["b"] == {}
        part = ocp.args.PyTreeRestore({"a": tree["a"]}, {"a": one, "c": one}, partial_restore=True)
        assert list(checkpointer.restore(tmp_path / "tree", args=part)) == ["a"]


@both
def test_what_was_masked_is_none_where_a_struct_is_asked_for(tmp_path: Path, ocp: Any) -> None:
    tree = {"a": jnp.arange(3), "b": {"c": jnp.arange(2)}}
    struct: Any = jax.ShapeDtypeStruct
    abstract: Any = jax.tree.map(lambda leaf: struct(leaf.shape, leaf.dtype), tree)
    ocp.v1.save(tmp_path / "masked", {**tree, "a": optax.MaskedNode()})

    restored = ocp.v1.load(tmp_path / "masked", abstract)

    assert restored["a"] is None
    np.testing.assert_array_equal(restored["b"]["c"], np.arange(2))


@pytest.mark.thinned(2)
@both
@pytest.mark.parametrize("value", [0, 1])
def test_large_arrays_that_are_all_the_same_are_restored_without_a_target(
    ocp: Any, value: int, tmp_path: Path
) -> None:
    """As Adam's moments are before the first step, and the weights in Orbax's guides."""
    tree = {"mu": np.full((4100, 4100), value, np.float32), "step": 0}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", tree)
    with penstock.orbax.Checkpointer(penstock.orbax.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(tmp_path / "one")

    assert found["mu"].nbytes > 64 * 2**20
    assert (found["mu"] == value).all()


@both
def test_dicts_have_the_order_of_their_names_whatever_was_saved(tmp_path: Path, ocp: Any) -> None:
    state: Any = TrainState
    saved = state.create(apply_fn=None, params={"b": 1, "a": {"d": 2, "c": 3}}, tx=optax.sgd(1.0))
    with ocp.PyTreeCheckpointer() as checkpointer, ocp.StandardCheckpointer() as standard:
        checkpointer.save(tmp_path / "tree", saved)
        standard.save(tmp_path / "standard", saved)
        standard.wait_until_finished()
        trees = [checkpointer.restore(tmp_path / "tree"), standard.restore(tmp_path / "standard")]

    newer: Any = v1 if ocp is orbax.checkpoint else penstock.orbax.v1
    newer.save(tmp_path / "newer", saved)
    trees.append(newer.load(tmp_path / "newer"))

    for tree in trees:
        assert [*tree] == ["opt_state", "params", "step"]
        assert [*tree["params"]] == ["a", "b"]
        assert [*tree["params"]["a"]] == ["c", "d"]
