"""The same script on both libraries: restoring onto an item, where there is a short way and where not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest

import penstock.orbax
from penstock.orbax import restore_tree as restoring

_jax: Any = jax
LIBRARIES: tuple[Any, Any] = (penstock.orbax, orbax.checkpoint)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring"),
    # Orbax closes event loops that TensorStore still has something to tell.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def saved() -> dict[str, Any]:
    return {
        "w": jnp.arange(12, dtype=jnp.float32).reshape(3, 4),
        "host": np.arange(6, dtype=np.int32),
        "flag": True,
        "step": 7,
        "rate": 0.5,
        "name": "adam",
        "key": jax.random.key(3),
        "count": jnp.uint32(4),
        "list": [np.ones(2), jnp.zeros(3)],
    }


def args_of(ocp: Any, item: Any, **changed: Any) -> Any:
    found = ocp.checkpoint_utils.construct_restore_args({**saved(), **item})
    return {**found, **{name: make(ocp) for name, make in changed.items()}}


def told(value: Any) -> Any:
    """Type, dtype, shape and content of a leaf."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return "key", str(value.dtype), np.asarray(jax.random.key_data(value)).tolist()
    if isinstance(value, np.ndarray | jax.Array):
        kind = "jax" if isinstance(value, jax.Array) else "numpy"
        return kind, str(value.dtype), value.shape, np.asarray(value).tolist()

    return type(value).__name__, value


CASES: dict[str, tuple[dict[str, Any], dict[str, Callable[[Any], Any]]]] = {
    "as it is": ({}, {}),
    "numbers of another kind": (
        {},
        {
            "flag": lambda ocp: ocp.RestoreArgs(restore_type=int),
            "step": lambda ocp: ocp.RestoreArgs(restore_type=float),
        },
    ),
    "another dtype": ({}, {"host": lambda ocp: ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.float64)}),
    "another dtype in the item": ({"host": np.arange(6.0)}, {}),
    "another shape in the item": ({"host": np.arange(5, dtype=np.int32)}, {}),
    "a jax.Array as one of NumPy": ({}, {"w": lambda ocp: ocp.RestoreArgs(restore_type=np.ndarray)}),
    "as saved": ({}, {"w": lambda ocp: ocp.RestoreArgs()}),
    "cast on the way": ({"w": jnp.zeros((3, 4), jnp.bfloat16)}, {}),
    "a placeholder": ({"host": ..., "name": ...}, {}),
    "another structure": ({"list": (np.ones(2), jnp.zeros(3))}, {}),
    "an abstract one": ({"w": _jax.ShapeDtypeStruct((3, 4), np.float32)}, {}),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_args", [True, False])
def test_restoring_onto_an_item(case: str, with_args: bool, tmp_path: Path) -> None:
    item, changed = CASES[case]
    found: list[Any] = []
    for ocp in LIBRARIES:
        checkpointer = ocp.PyTreeCheckpointer()
        checkpointer.save(tmp_path / ocp.__name__, saved())
        keywords = {"restore_args": args_of(ocp, item, **changed)} if with_args else {}
        restored = checkpointer.restore(tmp_path / ocp.__name__, item={**saved(), **item}, **keywords)
        found.append(jax.tree.map(told, restored, is_leaf=lambda node: node is ...))
        checkpointer.close()

    assert found[0] == found[1]


def test_the_short_way_is_taken_where_it_may(tmp_path: Path) -> None:
    tree = {"a": [jnp.arange(3.0), np.arange(4)], "b": {"c": 5, "d": "text"}}
    path, asked = tmp_path / "one", penstock.orbax.checkpoint_utils.construct_restore_args(tree)
    checkpointer = penstock.orbax.PyTreeCheckpointer()
    checkpointer.save(path, tree)
    target = restoring.target_of(tree, asked)
    assert target is not None

    def metadata() -> Any:
        raise AssertionError("it is not needed")

    result = restoring.restore_tree(
        restoring.TreeRequest(tree, asked), restoring.Reader(metadata=metadata, restore=lambda like: tree)
    )
    assert result is tree
    assert restoring.target_of({**tree, "more": 1}, asked) is None
    assert not restoring.fits({**tree, "b": {"c": True, "d": "text"}}, target[1])
    checkpointer.close()
