"""Changes of flat trees of parameters, beside Orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.model_surgery.transformations.nesting as orbax_nesting
import orbax.checkpoint.experimental.model_surgery.transformations.renaming as orbax_renaming
import pytest
from safetensors.numpy import save_file

import penstock.orbax
from penstock.orbax import transform_utils

LIBRARIES: list[Any] = [(transform_utils, transform_utils), (orbax_nesting, orbax_renaming)]
both = pytest.mark.parametrize(("nesting", "renaming"), LIBRARIES, ids=("penstock", "orbax"))


def flat() -> dict[str, Any]:
    return {"params.a.w": np.arange(3), "params.a.b": 2.0, "params.c": 7}


@both
def test_names_are_changed_by_each_rule_in_turn(nesting: Any, renaming: Any) -> None:
    rules = [(r"^params\.", ""), (r"a\.(\w)$", r"layer.\1.value"), ("value", "v")]
    source = flat()
    found = renaming.rename_by_regex(rules)(source)
    assert list(found) == ["layer.w.v", "layer.b.v", "c"]
    assert found["layer.w.v"] is source["params.a.w"]
    assert source.keys() == flat().keys()


@both
@pytest.mark.parametrize("inplace", [False, True])
def test_what_is_flat_is_nested(nesting: Any, renaming: Any, inplace: bool) -> None:
    source = flat()
    found = nesting.unflatten(inplace=inplace)(source)
    assert found["params"]["a"]["b"] == 2.0
    assert found["params"].keys() == {"a", "c"}
    assert bool(source) != inplace
    assert nesting.unflatten("/")({"x/y.z": 1}) == {"x": {"y.z": 1}}


@both
@pytest.mark.parametrize("inplace", [False, True])
def test_a_target_says_what_is_kept(nesting: Any, renaming: Any, inplace: bool) -> None:
    target = {"params": {"a": {"b": 0.0, "new": "stays"}}}
    found = nesting.unflatten(target=target, inplace=inplace)(flat())
    assert found == {"params": {"a": {"b": 2.0, "new": "stays"}}}


@both
def test_one_tree_is_changed_at_a_time(nesting: Any, renaming: Any) -> None:
    for change in (nesting.unflatten(), renaming.rename_by_regex([])):
        with pytest.raises((ValueError, AssertionError)):
            change(flat(), flat())


def test_what_would_lose_a_leaf_is_an_error() -> None:
    with pytest.raises(ValueError, match="both 'a1' and 'a2' would be 'a'"):
        transform_utils.rename_by_regex([(r"\d", "")])({"a1": 1, "a2": 2})
    with pytest.raises(ValueError, match="a"):
        transform_utils.unflatten()({"a": 1, "a.b": 2})


def test_quantised_weights_are_loaded_and_nested(tmp_path: Path) -> None:
    """As Qwix does."""
    stored: dict[str, Any] = {"model.q.kernel": np.ones((2, 2), np.int8)}
    stored["model.q.kernel_scale_inv"] = np.ones(2, np.float32)
    save_file(stored, tmp_path / "model.safetensors")
    v1 = penstock.orbax.v1
    with v1.Context(checkpoint_layout=v1.options.CheckpointLayout.SAFETENSORS):
        tree = v1.load(tmp_path)

    rules = [
        (r"^model\.", ""),
        (r"kernel$", "kernel.array.qvalue"),
        (r"kernel_scale_inv$", "kernel.array.scale"),
    ]
    for change in (transform_utils.rename_by_regex(rules), transform_utils.unflatten()):
        tree = change(tree)

    array = tree["q"]["kernel"]["array"]
    assert {name: leaf.shape for name, leaf in array.items()} == {"qvalue": (2, 2), "scale": (2,)}
    assert len(jax.tree.leaves(tree)) == 2
