"""A checkpointer of either library saves what that of the other restores, and replaces nothing unasked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as _orbax
import pytest

import penstock.orbax as _penstock

ours: Any = _penstock
theirs: Any = _orbax  # it has no types
BOTH = [pytest.param(ours, id="penstock"), pytest.param(theirs, id="orbax")]
CHECKPOINTERS: list[Any] = [
    pytest.param(lambda ocp: ocp.Checkpointer(ocp.StandardCheckpointHandler()), id="Checkpointer"),
    pytest.param(lambda ocp: ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()), id="AsyncCheckpointer"),
    pytest.param(lambda ocp: ocp.StandardCheckpointer(), id="StandardCheckpointer"),
    pytest.param(lambda ocp: ocp.PyTreeCheckpointer(), id="PyTreeCheckpointer"),
]
TREE = {"w": jnp.arange(6.0).reshape(2, 3), "step": 7, "layers": [np.arange(3, dtype=np.int16)]}
Make = Callable[[Any], Any]
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring")


def save(ocp: Any, make: Make, path: Path, tree: Any, **options: Any) -> None:
    with make(ocp) as checkpointer:
        checkpointer.save(path, tree, **options)
        if hasattr(checkpointer, "wait_until_finished"):
            checkpointer.wait_until_finished()


def restored(ocp: Any, make: Make, path: Path) -> Any:
    with make(ocp) as checkpointer:
        return checkpointer.restore(path)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("make", CHECKPOINTERS)
@pytest.mark.parametrize(("writer", "reader"), [(ours, ours), (ours, theirs), (theirs, ours)])
def test_each_library_restores_what_the_other_saved(
    tmp_path: Path, writer: Any, reader: Any, make: Make
) -> None:
    save(writer, make, tmp_path / "saved", TREE)

    found = restored(reader, make, tmp_path / "saved")

    structures: list[Any] = [jax.tree.structure(tree) for tree in (found, TREE)]
    assert structures[0] == structures[1]
    jax.tree.map(np.testing.assert_array_equal, found, TREE)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("ocp", BOTH)
@pytest.mark.parametrize("make", CHECKPOINTERS)
def test_a_checkpoint_is_replaced_if_asked_alone(tmp_path: Path, ocp: Any, make: Make) -> None:
    save(ocp, make, tmp_path / "saved", TREE)

    with pytest.raises(ValueError, match="exists"):
        save(ocp, make, tmp_path / "saved", {"w": np.zeros(2)})
    np.testing.assert_array_equal(restored(ours, make, tmp_path / "saved")["w"], TREE["w"])

    save(ocp, make, tmp_path / "saved", {"w": np.zeros(2)}, force=True)
    np.testing.assert_array_equal(restored(ours, make, tmp_path / "saved")["w"], np.zeros(2))
