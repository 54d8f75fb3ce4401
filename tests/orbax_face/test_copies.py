"""Copies of handlers: each works by itself, in use or not, as copies of Orbax's do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint
import pytest

import penstock.orbax

LIBRARIES: tuple[Any, Any] = (penstock.orbax, orbax.checkpoint)
both = pytest.mark.parametrize("ocp", LIBRARIES, ids=("penstock", "orbax"))
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring"),
    # Orbax closes event loops that TensorStore still has something to tell.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TREE = {"a": np.arange(3), "b": 1.5}
SAVED: dict[str, Any] = {
    "PyTreeCheckpointHandler": ("PyTreeSave", TREE),
    "StandardCheckpointHandler": ("StandardSave", TREE),
    "ArrayCheckpointHandler": ("ArraySave", np.arange(4)),
    "JsonCheckpointHandler": ("JsonSave", {"x": 1}),
    "JaxRandomKeyCheckpointHandler": ("JaxRandomKeySave", jax.random.key(3)),
}


@pytest.mark.thinned(3)
@both
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("name", SAVED)
def test_a_copy_of_a_handler_works_by_itself(ocp: Any, name: str, used: bool, tmp_path: Path) -> None:
    args, value = SAVED[name]
    handler = getattr(ocp.handlers, name)()
    if used:
        ocp.Checkpointer(handler).save(tmp_path / "first", args=getattr(ocp.args, args)(value))

    other = copy.deepcopy(handler)
    handler.close()
    with ocp.Checkpointer(other) as checkpointer:
        checkpointer.save(tmp_path / "one", args=getattr(ocp.args, args)(value))
        found = checkpointer.restore(tmp_path / "one")

    assert type(other) is type(handler)
    same = jax.tree.map(lambda one, expected: bool(np.all(one == expected)), found, value)
    assert all(jax.tree.leaves(same))


@both
def test_a_copy_of_a_composite_handler_has_its_items(ocp: Any, tmp_path: Path) -> None:
    handler = ocp.CompositeCheckpointHandler(state=ocp.StandardCheckpointHandler())
    with ocp.Checkpointer(copy.deepcopy(handler)) as checkpointer:
        args = ocp.args.Composite(state=ocp.args.StandardSave(TREE))
        checkpointer.save(tmp_path / "one", args=args)
        np.testing.assert_array_equal(checkpointer.restore(tmp_path / "one")["state"]["a"], TREE["a"])
