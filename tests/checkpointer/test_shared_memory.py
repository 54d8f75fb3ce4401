"""jax.Arrays that lie in the memory of NumPy arrays, which their owner changes once the save is staged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

from penstock import Checkpointer
from penstock.handlers import ArrayHandler, default_handlers

pytestmark = pytest.mark.anyio

N = 100_000  # more than is packed


def aligned() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Zeros that jax can use where they lie."""
    memory = np.zeros(4 * N + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + 4 * N].view(np.float32)


def copying() -> Any:
    registry, handler = default_handlers(), ArrayHandler(alias_host=False)
    types: tuple[type, ...] = (jax.Array, jax.ShapeDtypeStruct, Tracer)
    for type_ in types:
        registry.register(type_, handler, override=True)

    return registry


@pytest.mark.parametrize("way", ["jnp.array", "alias_host", "durable"])
async def test_each_documented_way_saves_what_there_was(tmp_path: Path, way: str) -> None:
    numbers = aligned()
    array = jnp.array(numbers) if way == "jnp.array" else jax.device_put(numbers, may_alias=True)
    async with Checkpointer(registry=copying() if way == "alias_host" else None) as checkpointer:
        save = await checkpointer.save(tmp_path / "a", {"x": array})
        if way == "durable":
            await save

        numbers[:] = 7
        await save
        found = await checkpointer.restore(tmp_path / "a")

    assert not np.asarray(found["x"]).any()
