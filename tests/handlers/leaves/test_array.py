"""jax.Arrays on their way out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.handlers.leaves.round_trips import INFO, P, host_copy, mesh, plan, restore, same_bits, save, struct

from penstock.errors import DeletedLeafError, InvalidLeafError
from penstock.handlers import ArrayHandler
from penstock.kernel import Leaf

ALIASING = ArrayHandler()
COPYING = ArrayHandler(alias_host=False)
HANDLERS = pytest.mark.parametrize("handler", [ALIASING, COPYING], ids=["aliasing", "copying"])

PACKED = ["int2", "int4", "float4_e2m1fn"]
NARROW = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32",
    "complex64",
    "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu", *PACKED,
]  # fmt: skip
WIDE = ["int64", "uint64", "float64", "complex128"]
SPECS = [P("x", "y"), P("x"), P(None), P(), P(("x", "y")), P(None, "y"), P("y", "x")]


def values(dtype: str, shape: tuple[int, ...] = (8, 16)) -> np.ndarray[Any, Any]:
    bits = np.random.default_rng(7).integers(0, 256, (*shape, 1), np.uint8)
    return (bits[..., 0] % 2).astype(np.uint8).astype(jnp.dtype(dtype))


def sharded(spec: PartitionSpec, dtype: str = "float32", shape: tuple[int, ...] = (8, 16)) -> jax.Array:
    numbers = np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype))
    array: jax.Array = jax.device_put(numbers, NamedSharding(mesh(2, 4), spec))
    return array


@pytest.mark.thinned(3)
@pytest.mark.many_cases
@HANDLERS
@pytest.mark.parametrize("piece_bytes", [1, 48, 1 << 20])
@pytest.mark.parametrize("dtype", NARROW)
def test_every_dtype_comes_back_bit_for_bit(handler: ArrayHandler, dtype: str, piece_bytes: int) -> None:
    array = jnp.asarray(values(dtype))
    saved = save(handler, array, piece_bytes)
    assert (saved.spec.dtype, saved.spec.itemsize) == (dtype, np.asarray(array).itemsize)
    assert saved.spec.shape == saved.spec.chunk_shape == saved.spec.write_shape == (8, 16)
    assert saved.spec.typestr == handler.typestr == "jax.Array"
    back = restore(handler, saved, array)
    assert same_bits(back, array)
    assert back.sharding == array.sharding


@HANDLERS
@pytest.mark.parametrize("dtype", WIDE)
def test_64_bits_come_back_bit_for_bit_even_while_x64_is_off(handler: ArrayHandler, dtype: str) -> None:
    with jax.enable_x64(True):
        array = jnp.asarray(np.array([1, 3, 5], dtype) / np.array(3, dtype), dtype=dtype)
    assert jnp.ones(3).dtype == np.float32
    saved = save(handler, array, 8)
    back = restore(handler, saved, array)
    assert isinstance(back, jax.Array)
    assert same_bits(back, array)
    without_target = restore(handler, saved)
    assert type(without_target) is np.ndarray
    assert same_bits(without_target, array)
    with jax.enable_x64(True):
        assert isinstance(restore(handler, saved), jax.Array)


@pytest.mark.thinned(3)
@pytest.mark.many_cases
@HANDLERS
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("piece_bytes", [4, 40, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
def test_each_distinct_shard_is_one_chunk(
    handler: ArrayHandler, spec: PartitionSpec, piece_bytes: int, dtype: str
) -> None:
    array = sharded(spec, dtype)
    shard_shape = array.sharding.shard_shape(array.shape)
    saved = save(handler, array, piece_bytes)
    assert saved.spec.chunk_shape == saved.spec.write_shape == shard_shape
    assert same_bits(saved.array(), array)
    back = restore(handler, saved, array)
    assert same_bits(back, array)
    assert back.sharding == array.sharding


@HANDLERS
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 1, 3)], ids=str)
def test_odd_shapes(handler: ArrayHandler, shape: tuple[int, ...]) -> None:
    array = jnp.asarray(values("float32", shape))
    saved = save(handler, array, 8)
    assert saved.spec.shape == saved.spec.write_shape == shape
    assert saved.spec.chunk_shape == tuple(max(1, size) for size in shape)
    assert same_bits(restore(handler, saved), array)


def test_an_empty_sharded_array_has_a_chunk_shape_without_zeros() -> None:
    array = jax.device_put(jnp.zeros((0, 8)), NamedSharding(mesh(2, 4), P("x", "y")))
    saved = save(ALIASING, array)
    assert (saved.spec.chunk_shape, saved.spec.write_shape) == ((1, 2), (0, 2))
    assert restore(ALIASING, saved, array).sharding == array.sharding


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_an_array_of_another_layout_is_stored_in_c_order(dtype: str) -> None:
    layout = pytest.importorskip("jax.experimental.layout")
    array = jnp.asarray(values(dtype, (3, 4)))
    turned = jax.device_put(array, layout.Format(layout.Layout(major_to_minor=(1, 0)), array.sharding))
    for handler in (ALIASING, COPYING):
        assert same_bits(save(handler, turned, 16).array(), array)
        assert same_bits(save(handler, turned).array(), array)


def test_on_cpu_devices_pieces_are_views_that_cost_nothing() -> None:
    for array in (jnp.arange(64, dtype=jnp.float32), sharded(P("x", "y"))):
        addresses = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
        _, plans = plan(ALIASING, array)
        assert {made.cost for made in plans} == {0}
        assert {np.frombuffer(made.take(), np.uint8).ctypes.data for made in plans} == addresses


@pytest.mark.parametrize("dtype", PACKED)
def test_what_numpy_has_to_unpack_costs_its_host_bytes(dtype: str) -> None:
    _, plans = plan(ALIASING, jnp.asarray(values(dtype)), 64)
    assert [made.cost for made in plans] == [64, 64]


def test_a_copied_piece_costs_its_bytes_and_shares_no_memory() -> None:
    array = jnp.arange(64, dtype=jnp.float32)
    _, plans = plan(COPYING, array, 128)
    assert [(made.cost, made.nbytes) for made in plans] == [(128, 128)] * 2
    _, (whole,) = plan(COPYING, array)
    assert not np.shares_memory(np.frombuffer(whole.take(), np.float32), np.asarray(array))


@pytest.mark.parametrize("dtype", ["float32", "int4"])
@pytest.mark.parametrize("piece_bytes", [32, 1 << 20])
@pytest.mark.parametrize("spec", [None, P("x", "y"), P()], ids=str)
def test_no_host_copy_stays_with_the_callers_array(
    dtype: str, piece_bytes: int, spec: PartitionSpec | None
) -> None:
    array = jnp.asarray(values(dtype)) if spec is None else sharded(spec, dtype)
    for handler in (ALIASING, COPYING):
        save(handler, array, piece_bytes)
        shards = [shard.data for shard in array.addressable_shards]
        inner = [part.addressable_data(0) for part in [array, *shards]]
        assert [host_copy(part) for part in [array, *shards, *inner]] == [None] * (2 + 2 * len(shards))


@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
@pytest.mark.parametrize("end", ["donate", "delete"])
@HANDLERS
def test_what_is_taken_outlives_donation_and_deletion(
    handler: ArrayHandler, end: str, piece_bytes: int
) -> None:
    array = (jnp.arange(1 << 14, dtype=jnp.float32) + jnp.float32(1)).block_until_ready()
    expected = np.array(array)
    donating = jax.jit(lambda x: x * jnp.float32(-1), donate_argnums=0)

    def happens() -> object:
        if end == "delete":
            array.delete()
        kept = [donating(array)] if end == "donate" else []
        # What might reuse the memory.
        return [
            made.block_until_ready()
            for made in [*kept, *[jnp.full((1 << 14,), at, jnp.float32) for at in range(8)]]
        ]

    assert same_bits(save(handler, array, piece_bytes, happens).array(), expected)
    # jax does not donate memory that somebody looks at: it copies, and the array lives on.
    assert array.is_deleted() == (end == "delete" or handler is COPYING)


def test_the_first_piece_taken_secures_the_whole_shard() -> None:
    array = jnp.arange(64, dtype=jnp.float32)
    expected = np.array(array)
    _, plans = plan(ALIASING, array, 64)
    first = plans[0].take()
    array.delete()
    assert b"".join([first, *[made.take() for made in plans[1:]]]) == expected.tobytes()


@HANDLERS
@pytest.mark.parametrize("spec", [None, P("x", "y")], ids=str)
@pytest.mark.parametrize("piece_bytes", [16, 1 << 20])
def test_an_array_deleted_at_any_step_is_named(
    handler: ArrayHandler, spec: PartitionSpec | None, piece_bytes: int
) -> None:
    def fresh() -> jax.Array:
        return jnp.zeros((8, 16)) if spec is None else sharded(spec)

    def check(act: Callable[[], object]) -> None:
        with pytest.raises(DeletedLeafError, match=r"\['opt'\]\.mu: .*await save\.staged\(\)") as caught:
            act()
        assert caught.value.key_path == "['opt'].mu"

    array = fresh()
    (described,) = handler.describe([array], [INFO], {})
    _, plans = plan(handler, array, piece_bytes)
    array.delete()
    check(lambda: handler.describe([array], [INFO], {}))
    check(lambda: list(handler.pieces(Leaf(0, INFO, array, described, handler), piece_bytes)))
    check(plans[-1].take)


@pytest.mark.parametrize("dtype", ["uint4", "uint2", "float8_e4m3"])
def test_a_dtype_that_cannot_be_stored_is_named_with_a_remedy(dtype: str) -> None:
    with pytest.raises(
        InvalidLeafError, match=rf"^\['opt'\]\.mu: .*dtype {dtype} .*convert it to (uint8|float8)"
    ):
        ALIASING.describe([jnp.zeros((3,), dtype)], [INFO], {})


def test_what_is_not_concrete_is_refused() -> None:
    with pytest.raises(InvalidLeafError, match=r"^\['opt'\]\.mu: the array is abstract"):
        ALIASING.describe([struct((3,), np.float32)], [INFO], {})
    with pytest.raises(InvalidLeafError, match=r"^\['opt'\]\.mu: the array is a tracer: save outside of jit"):
        jax.eval_shape(lambda x: ALIASING.describe([x], [INFO], {}), 1.0)
    with pytest.raises(InvalidLeafError, match=r"a int is no jax\.Array"):
        ALIASING.describe([3], [INFO], {})


def test_a_handler_is_a_value() -> None:
    assert ArrayHandler() == ArrayHandler() != COPYING
    with pytest.raises(dataclasses.FrozenInstanceError):
        ALIASING.alias_host = False  # type: ignore[misc]  # that is what is tested
