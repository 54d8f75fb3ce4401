"""grain's own handler, arguments and iterators: the next batch is the same, whoever saved and restores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as _orbax
import orbax.checkpoint.experimental.v1 as _orbax_v1
import pytest

import penstock.orbax as _ours
import penstock.orbax.v1 as _ours_v1

grain: Any = pytest.importorskip("grain", reason="grain is in no extra: pip install grain")
LIBRARIES: tuple[Any, ...] = (_ours, _orbax)
NEWER: tuple[Any, ...] = (_ours_v1, _orbax_v1)
BOTH = pytest.mark.parametrize("writer", [0, 1], ids=["penstock", "orbax"])
READERS = pytest.mark.parametrize("reader", [0, 1], ids=["to-penstock", "to-orbax"])


def batches() -> Any:
    """An iterator of shuffled batches."""
    data = grain.MapDataset.range(32).shuffle(seed=1).batch(4).to_iter_dataset()
    return iter(data)


@BOTH
@READERS
def test_an_iterator_in_a_composite_resumes_at_the_same_batch(
    tmp_path: Path, writer: int, reader: int
) -> None:
    ocp, data = LIBRARIES[writer], batches()
    for _ in range(3):
        next(data)
    with ocp.CheckpointManager(tmp_path) as manager:
        state = ocp.args.StandardSave({"w": jnp.ones(3)})
        manager.save(7, args=ocp.args.Composite(state=state, data=grain.checkpoint.CheckpointSave(data)))
    expected = [next(data), next(data)]

    ocp, data = LIBRARIES[reader], batches()
    with ocp.CheckpointManager(tmp_path) as manager:
        wanted = grain.checkpoint.CheckpointRestore(data)
        data = manager.restore(7, args=ocp.args.Composite(data=wanted))["data"]
    np.testing.assert_array_equal([next(data), next(data)], expected)


@BOTH
@READERS
def test_an_iterator_is_saved_and_loaded_by_the_newer_api(tmp_path: Path, writer: int, reader: int) -> None:
    data = batches()
    next(data)
    NEWER[writer].save_checkpointables(tmp_path / "one", {"data": data, "state": {"w": jnp.ones(3)}})
    expected = next(data)

    data = batches()
    NEWER[reader].load_checkpointables(tmp_path / "one", {"data": data})
    np.testing.assert_array_equal(next(data), expected)
