"""How shardings divide arrays, compared with what jax itself does."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from penstock.handlers.leaves.shards import shard_grid

_jax: Any = jax
P: Any = PartitionSpec
SHARDINGS: list[tuple[tuple[int, ...], Any]] = [
    ((8,), P("a")),
    ((8,), P(None, "a")),
    ((8,), P()),
    ((2, 4), P("a", "b")),
    ((4, 2), P("b", "a")),
    ((2, 4), P(("a", "b"))),
    ((2, 4), P(("b", "a"))),
    ((2, 4), P("a")),
    ((2, 4), P(None, "b")),
    ((3, 2), P("b")),
]


def named(shape: tuple[int, ...], spec: Any, *, backwards: bool = False) -> Sharding:
    devices = _jax.devices()[: math.prod(shape)]
    mesh: Any = np.array(devices[:: -1 if backwards else 1]).reshape(shape)
    return NamedSharding(Mesh(mesh, ("a", "b")[: len(shape)]), spec)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("mesh", "spec"), SHARDINGS, ids=str)
def test_each_device_gets_the_shard_that_jax_gives_it(
    mesh: tuple[int, ...], spec: Any, backwards: bool
) -> None:
    whole = np.arange(8 * 16 * 3).reshape(8, 16, 3)
    array = _jax.device_put(whole, named(mesh, spec, backwards=backwards))

    grid = shard_grid(array.sharding, array.shape)
    assert grid is not None
    shards = grid.cut(whole)
    assert len(shards) == math.prod(grid.counts)
    assert all(shard.flags.c_contiguous and shard.shape == grid.shape for shard in shards)
    for number, shard in enumerate(array.addressable_shards):
        assert grid.devices[number] == shard.device
        np.testing.assert_array_equal(shards[grid.places[number]], np.asarray(shard.data))
        np.testing.assert_array_equal(array.addressable_data(number), np.asarray(shard.data))

    held = grid.on_devices(whole)
    assert len({shard.ctypes.data for shard in held}) == len(grid.devices)
    for shard, there in zip(held, array.addressable_shards, strict=True):
        np.testing.assert_array_equal(shard, np.asarray(there.data))

    for place, numbers in enumerate(grid.holders):
        there = [array.addressable_shards[number] for number in numbers]
        assert [shard.replica_id for shard in there] == list(range(len(there)))
        starts = tuple((along.start or 0) // n for along, n in zip(there[0].index, grid.shape, strict=True))
        assert grid.indices[place] == starts


def test_shards_are_not_copied_where_rows_are_divided() -> None:
    whole = np.zeros((8, 4))
    grid = shard_grid(named((8,), P("a")), whole.shape)

    assert grid is not None
    assert all(np.shares_memory(shard, whole) for shard in grid.cut(whole))


def test_one_device_holds_all() -> None:
    grid = shard_grid(SingleDeviceSharding(_jax.devices()[3]), ())

    assert grid is not None
    assert (grid.shape, grid.counts, grid.places, grid.holders) == ((), (), (0,), ((0,),))
    assert list(grid.devices) == [_jax.devices()[3]]


def test_a_number_on_all_devices() -> None:
    grid = shard_grid(named((8,), P()), ())

    assert grid is not None
    held = grid.on_devices(np.array(3))
    assert [type(each) for each in held] == [np.ndarray] * 8
    assert [each.shape for each in held] == [()] * 8


def test_an_array_without_elements_has_no_shards() -> None:
    assert shard_grid(named((8,), P("a")), (0, 4)) is None
