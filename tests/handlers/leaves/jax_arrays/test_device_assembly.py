"""jax.Arrays that are put together on their devices, part by part."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from tests.handlers.leaves.round_trips import P, Saved, mesh, same_bits, save, struct, target

from penstock.handlers import ArrayHandler
from penstock.handlers.leaves.blocks import HostRegion
from penstock.kernel import LeafSpec, ReadLeaf, Target

HANDLER = ArrayHandler(alias_host=False)
ALIASING = ArrayHandler()

DTYPES = [
    *("bool", "int8", "uint8", "int16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "int4", "int2", "float4_e2m1fn"),
]

SHARDINGS: list[Sharding] = [
    NamedSharding(mesh(2, 4), P("x", "y")),
    NamedSharding(mesh(2, 4), P(("x", "y"))),
    NamedSharding(mesh(2, 4), P(None, ("y", "x"))),
    NamedSharding(mesh(2, 4), P("y")),
    NamedSharding(mesh(2, 4), P()),
    NamedSharding(mesh(1), P("x")),
    SingleDeviceSharding(jax.devices()[3]),
]


def numbers(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    bits = np.arange(int(np.prod(shape))).reshape(shape)
    return (bits % 2 if dtype in {"bool", "int2"} else bits % 7).astype(jnp.dtype(dtype))


def parts_of(
    saved: Saved, like: Any, part_bytes: int, *, whole_chunks: bool = False, handler: Any = HANDLER
) -> list[ReadLeaf]:
    aim = target(handler, saved, like)
    assert isinstance(aim, Target)
    parts = handler.parts(saved.stored, aim, part_bytes, whole_chunks=whole_chunks)
    return [ReadLeaf(-1 - at, saved.stored, handler, part) for at, part in enumerate(parts)]


def restored(saved: Saved, parts: list[ReadLeaf], *, seed: int = 0) -> Any:
    """Fill the parts in any order, and look that each is forgotten."""
    random.Random(seed).shuffle(parts)
    for part in parts:
        for region in part.target.regions:
            saved.fill(region)

        HANDLER.place(part)
        assert all("not allocated" in repr(region) for region in part.target.regions)

    return HANDLER.join(parts[0])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(dtype: str) -> None:
    array = jnp.asarray(numbers((12, 5), dtype))
    saved = save(HANDLER, array)

    parts = parts_of(saved, array, 16)
    found = restored(saved, parts)

    assert len(parts) >= 4
    assert max(part.target.staging_bytes for part in parts) <= max(16, array.dtype.itemsize * 5)
    assert same_bits(found, array)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_bit_pattern_of_narrow_floats_comes_back(dtype: str) -> None:
    size = jnp.dtype(dtype).itemsize
    bits = np.arange(256**size, dtype=f"uint{8 * size}").reshape(4, -1)
    array = jnp.asarray(bits.view(jnp.dtype(dtype)))
    saved = save(HANDLER, array)

    found = restored(saved, parts_of(saved, array, bits.nbytes // 4))

    assert np.array_equal(np.asarray(found).view(bits.dtype), bits)
    assert found.dtype == array.dtype


@pytest.mark.parametrize("sharding", [None, NamedSharding(mesh(2), P("x"))], ids=str)
@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.complex128])
def test_64_bits_that_were_asked_for_by_name_stay(dtype: Any, sharding: Sharding | None) -> None:
    with jax.enable_x64(True):
        array = jnp.arange(24, dtype=dtype).reshape(6, 4)
        saved = save(HANDLER, array)

    found = restored(saved, parts_of(saved, struct((6, 4), dtype, sharding=sharding), 64))

    assert found.dtype == dtype
    assert same_bits(found, array)


@pytest.mark.thinned(2)
@pytest.mark.many_cases
@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
@pytest.mark.parametrize("part_bytes", [1, 64, 100, 250])
def test_any_sharding(sharding: Sharding, part_bytes: int) -> None:
    array = jax.device_put(numbers((16, 8)), sharding)
    saved = save(HANDLER, jnp.asarray(numbers((16, 8))))

    parts = parts_of(saved, array, part_bytes)
    found = restored(saved, parts, seed=part_bytes)

    assert max(part.target.staging_bytes for part in parts) <= max(part_bytes, 4 * len(array.devices()))
    assert sum(part.target.staging_bytes for part in parts) == array.nbytes
    assert found.sharding == sharding
    assert found.committed
    assert same_bits(found, array)
    assert all(same_bits(a.data, b.data) for a, b in zip_shards(found, array))


def zip_shards(found: jax.Array, wanted: jax.Array) -> list[tuple[Any, Any]]:
    pairs = list(zip(found.addressable_shards, wanted.addressable_shards, strict=True))
    assert all(a.device == b.device for a, b in pairs)
    return pairs


def test_shards_of_the_same_rows_are_read_together() -> None:
    array = jax.device_put(numbers((16, 8)), NamedSharding(mesh(2, 4), P("x", "y")))
    saved = save(HANDLER, jnp.asarray(numbers((16, 8))))

    parts = parts_of(saved, array, 64)

    for part in parts:
        rows = {region.bounds[0] for region in part.target.regions}
        columns = sorted(region.bounds[1] for region in part.target.regions)
        assert len(rows) == 1
        assert columns == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_an_array_of_the_default_device_stays_uncommitted() -> None:
    array: Any = jnp.asarray(numbers((16, 8)))
    saved = save(HANDLER, array)

    found = restored(saved, parts_of(saved, array, 100))

    assert not found.committed
    assert not found.weak_type
    assert found.sharding == array.sharding
    assert found.aval == array.aval


@pytest.mark.parametrize("sharded", [False, True])
def test_keys_are_wrapped_again(sharded: bool) -> None:
    keys = jax.random.split(jax.random.key(0), 16)
    if sharded:
        keys = jax.device_put(keys, NamedSharding(mesh(4), P("x")))
    saved = save(HANDLER, keys)

    found = restored(saved, parts_of(saved, keys, 32))

    assert found.dtype == keys.dtype
    assert found.sharding == keys.sharding
    assert same_bits(jax.random.key_data(found), jax.random.key_data(keys))


@pytest.mark.parametrize(
    ("rows", "chunk", "part_bytes", "expected"),
    [
        (12, 3, 1, [3, 3, 3, 3]),
        (12, 3, 6 * 16 + 15, [6, 6]),
        (12, 3, 10 * 16, [9, 3]),
        (12, 12, 16, []),
        (12, 5, 16, []),  # chunks that do not end where the array does
    ],
)
def test_an_array_of_whole_chunks_is_cut_between_their_rows(
    rows: int, chunk: int, part_bytes: int, expected: list[int]
) -> None:
    spec = LeafSpec("jax.Array", (rows, 4), "float32", 4, (chunk, 2))
    saved = Saved(spec, {})

    parts = parts_of(saved, struct((rows, 4), np.float32), part_bytes, whole_chunks=True)

    (*bounds,) = [region.bounds for part in parts for region in part.target.regions]
    assert [stop - start for (start, stop), _ in bounds] == expected
    assert [start for (start, _), _ in bounds] == [sum(expected[:at]) for at in range(len(expected))]
    assert all(columns == (0, 4) for _, columns in bounds)


def test_what_keeps_the_memory_that_was_read_into_is_not_cut() -> None:
    array = jnp.asarray(numbers((16, 8)))
    assert parts_of(save(ALIASING, array), array, 64, handler=ALIASING) == []
    assert len(parts_of(save(ALIASING, array), array, 64, handler=HANDLER)) > 1


def test_arrays_of_packed_elements_are_cut_though_the_handler_aliases() -> None:
    array = jnp.asarray(numbers((16, 8), "int4"))
    assert len(parts_of(save(ALIASING, array), array, 64, handler=ALIASING)) == 2


def test_what_numpy_has_to_hold_is_not_cut() -> None:
    saved = save(HANDLER, jnp.asarray(numbers((16, 8))))
    wide = Saved(replace(saved.spec, dtype="float64", itemsize=8), {})
    aim = target(HANDLER, wide)
    assert isinstance(aim, Target)
    assert not aim.staging_bytes
    assert HANDLER.parts(wide.stored, aim, 64, whole_chunks=False) == []


def test_memory_that_devices_do_not_compute_with_is_not_filled_in_parts() -> None:
    array = jnp.asarray(numbers((16, 8)))
    pinned = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    saved = save(HANDLER, array)
    assert parts_of(saved, struct((16, 8), np.float32, sharding=pinned), 64) == []
    device = SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    parts = parts_of(saved, struct((16, 8), np.float32, sharding=device), 64)
    assert restored(saved, parts).sharding == device


@pytest.mark.parametrize("shape", [(), (1,), (0, 3)])
def test_one_element_or_none_is_not_cut(shape: tuple[int, ...]) -> None:
    array = jnp.zeros(shape)
    assert parts_of(save(HANDLER, array), array, 1) == []


def test_an_array_is_updated_where_it_is() -> None:
    array = jnp.asarray(numbers((64, 64)))
    saved = save(HANDLER, array)
    parts = parts_of(saved, array, 1024)
    canvas = parts[0].target.detail.canvas  # type: ignore[attr-defined]  # what is between is private
    places: set[int] = set()
    for part in parts:
        for region in part.target.regions:
            saved.fill(region)
        HANDLER.place(part)
        (shard,) = canvas._shards.values()
        places.add(shard.unsafe_buffer_pointer())

    assert len(parts) == 16
    assert len(places) == 1


@pytest.mark.many_cases
@given(
    st.lists(st.integers(1, 6), max_size=3).map(tuple),
    st.integers(1, 60),
    st.sampled_from(["int4", "int16", "float32"]),
    st.booleans(),
    st.integers(0, 3),
)
def test_any_shape_in_parts_of_any_size(
    shape: tuple[int, ...], part_bytes: int, dtype: str, whole_chunks: bool, seed: int
) -> None:
    array = jnp.asarray(numbers(shape, dtype))
    saved = save(HANDLER, array)
    parts = parts_of(saved, array, part_bytes, whole_chunks=whole_chunks)
    if parts:
        assert same_bits(restored(saved, parts, seed=seed), array)
    else:
        assert whole_chunks or array.size <= max(1, part_bytes // saved.spec.itemsize)


def test_a_region_that_was_let_go_of_has_other_memory_next_time() -> None:
    region = HostRegion(((0, 4),), np.dtype(np.uint8))
    before = region.array()
    region.let_go()
    assert region.array() is not before
