"""`replica_axis` in one process, and beside other options of a restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import penstock
from penstock.errors import SpecError

P: Any = PartitionSpec


async def test_one_process_reads_each_shard_once_anyway(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("model")))
    await penstock.save(tmp_path / "a", {"x": x})
    found = await penstock.restore(tmp_path / "a", like={"x": x}, replica_axis="data")
    assert found["x"].sharding == x.sharding
    assert (found["x"] == x).all()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "needs a `like`"),
        ({"like": {"x": jnp.arange(3)}, "mmap": True}, "mapped"),
        ({"like": {"x": jnp.arange(3)}, "dtype": "like"}, "dtypes and shapes"),
        ({"like": {"x": jnp.arange(3)}, "strict": False}, "dtypes and shapes"),
        ({"like": {"x": jnp.arange(3)}, "on_missing": "keep"}, "none can be kept"),
        ({"like": {"x": jnp.arange(3)}, "transforms": {"x": penstock.Transform()}}, "functions"),
    ],
)
async def test_options_that_replica_axis_excludes_are_refused_before_anything_is_read(
    options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=problem):
        await penstock.restore(tmp_path / "nothing", replica_axis="data", **options)
