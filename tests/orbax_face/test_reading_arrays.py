"""Stored arrays become jax.Arrays of other types, shapes and shardings exactly where Orbax makes them so."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.orbax_face.leaf_round_trips import LIBRARIES, infos, on

from penstock.orbax import type_handlers as ours

STORED: dict[str, Any] = {
    "float64": np.arange(8.0),
    "int64": np.arange(8) - 3,
    "int4": np.arange(8).astype(jnp.int4),
    "bfloat16": np.arange(8).astype(jnp.bfloat16),
    "complex64": np.arange(8).astype(np.complex64),
    "bool": np.arange(8) % 2 == 0,
    "key": np.arange(8, dtype=np.uint32).reshape(4, 2),
}
SHAPES = ((None, True), ((4,), False), ((12,), False), ((4,), True), ((2, 2), False))


def dtypes() -> list[Any]:
    named = [np.dtype(name) for name in ("float32", "int8", "float64")]
    return [None, *named, np.dtype(jnp.bfloat16), jax.random.key(0).dtype]


async def outcome(library: str, directory: Path, name: str, args: dict[str, Any]) -> tuple[Any, ...]:
    """What becomes of one array, or the kind of the error."""
    module = LIBRARIES[library]
    leaf = infos(library, directory, [name], is_ocdbt_checkpoint=False)
    try:
        (found,) = await module.ArrayHandler().deserialize(leaf, [module.ArrayRestoreArgs(**args)])
    except Exception as error:
        kinds: tuple[type[Exception], ...] = (ValueError, TypeError)
        return ([kind for kind in kinds if isinstance(error, kind)],)

    value = np.asarray(found)
    return found.dtype, found.shape, value.tobytes(), found.sharding, found.committed


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", list(STORED))
@pytest.mark.parametrize("sharded", [False, True])
async def test_arrays_become_what_orbax_makes_of_them(name: str, sharded: bool, tmp_path: Path) -> None:
    leaf = infos("penstock", tmp_path, [name], is_ocdbt_checkpoint=False)
    for future in await ours.NumpyHandler().serialize([STORED[name]], leaf):
        future.result()

    place: Any = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    if sharded:
        place = on(np.zeros(8), (2, 4), "x").sharding
    for dtype, (shape, strict) in itertools.product(dtypes(), SHAPES):
        args = {"sharding": place, "dtype": dtype, "global_shape": shape, "strict": strict}
        found, wanted = [await outcome(library, tmp_path, name, args) for library in ("penstock", "orbax")]
        assert found == wanted, args
