"""jax.Arrays on their way in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from tests.handlers.leaves.round_trips import (
    ELSEWHERE,
    P,
    Saved,
    mesh,
    restore,
    same_bits,
    save,
    struct,
    target,
)

from penstock.handlers import ArrayHandler, NumpyHandler, ScalarHandler
from penstock.handlers.leaves.sharding import encode
from penstock.kernel import LeafSpec, ReadLeaf, ReadLeaves, StoredRows, Target

HANDLER = ArrayHandler()


def numbers(shape: tuple[int, ...] = (8, 16), dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def saved_as(sharding: Sharding | None, text: str | None = None) -> Saved:
    saved = save(HANDLER, jax.device_put(numbers(), sharding))
    if text is None:
        return saved
    spec = LeafSpec("jax.Array", (8, 16), "float32", 4, saved.spec.chunk_shape, (8, 16), sharding=text)
    return Saved(spec, saved.chunks)


SHARDINGS = [
    NamedSharding(mesh(2, 4), P("x", "y")),
    NamedSharding(mesh(2, 4), P(("x", "y"))),
    NamedSharding(mesh(2, 4), P()),
    NamedSharding(mesh(2, 4, types=AxisType.Explicit), P(None, "x")),
    NamedSharding(mesh(4), P("x")),
    NamedSharding(mesh(2, 2, 2), P(("z", "x"), "y")),
    NamedSharding(mesh(1), P("x")),
    SingleDeviceSharding(jax.devices()[3]),
]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("new", SHARDINGS, ids=str)
@pytest.mark.parametrize("old", SHARDINGS, ids=str)
def test_any_sharding_restores_into_any_other(old: Sharding, new: Sharding) -> None:
    saved = saved_as(old)
    for like in (
        jax.device_put(jnp.zeros((8, 16)), new),
        struct((8, 16), np.float32, sharding=new),
    ):
        back = restore(HANDLER, saved, like)
        assert same_bits(back, numbers())
        assert back.sharding == new
        assert back.committed

    again = restore(HANDLER, saved)
    assert again.sharding == old


def test_regions_are_the_distinct_parts_that_the_devices_hold() -> None:
    saved = saved_as(None)
    for spec, n_regions in ((P("x", "y"), 8), (P("x"), 2), (P("y"), 4), (P(), 1)):
        aim = target(HANDLER, saved, jax.device_put(numbers(), NamedSharding(mesh(2, 4), spec)))
        assert isinstance(aim, Target)
        assert len({region.bounds for region in aim.regions}) == len(aim.regions) == n_regions
        assert sum(region.nbytes for region in aim.regions) == 8 * 16 * 4


@pytest.mark.parametrize("spec", [None, P(), P("x", "y")], ids=str)
def test_on_cpu_devices_the_array_lives_in_its_regions(spec: PartitionSpec | None) -> None:
    sharding = None if spec is None else NamedSharding(mesh(2, 4), spec)
    saved = saved_as(sharding)
    aim = target(HANDLER, saved, jax.device_put(numbers(), sharding))
    assert isinstance(aim, Target)
    assert aim.staging_bytes == 0
    for region in aim.regions:
        saved.fill(region)
    addresses = {np.frombuffer(region.view(), np.uint8).ctypes.data for region in aim.regions}
    (back,) = HANDLER.build(ReadLeaves.of([ReadLeaf(0, saved.stored, HANDLER, aim)]))
    assert {shard.data.unsafe_buffer_pointer() for shard in back.addressable_shards} == addresses


@pytest.mark.parametrize("spec", [None, P(), P("x"), P("x", "y")], ids=str)
def test_a_restored_array_can_be_donated(spec: PartitionSpec | None) -> None:
    saved = saved_as(None if spec is None else NamedSharding(mesh(2, 4), spec))
    donating = jax.jit(lambda x: x * jnp.float32(2), donate_argnums=0)
    back = restore(HANDLER, saved)
    assert same_bits(donating(back), numbers() * 2)
    assert back.is_deleted()
    assert same_bits(restore(HANDLER, saved), numbers())


def test_packed_types_are_staged() -> None:
    array = jnp.ones((8, 4), jnp.int4)
    aim = target(HANDLER, save(HANDLER, array), array)
    assert isinstance(aim, Target)
    assert aim.staging_bytes == 32


def test_an_uncommitted_target_gives_an_uncommitted_array() -> None:
    saved = saved_as(SingleDeviceSharding(jax.devices()[2]))
    like = jnp.zeros((8, 16))
    assert not restore(HANDLER, saved, like).committed
    step = restore(HANDLER, save(HANDLER, like))
    spread = jax.device_put(numbers(), NamedSharding(mesh(2, 4), P("x")))
    assert same_bits(jax.jit(jnp.add)(step, spread), numbers())


def test_a_donated_target_is_still_a_target() -> None:
    like = jax.device_put(jnp.zeros((8, 16)), NamedSharding(mesh(2, 4), P("x")))
    like.delete()
    assert restore(HANDLER, saved_as(None), like).sharding == like.sharding


def test_a_struct_without_devices_gets_the_saved_sharding() -> None:
    sharding = NamedSharding(mesh(2, 4, types=AxisType.Explicit), P("x", "y"))
    saved = saved_as(sharding)
    abstract = jax.sharding.NamedSharding(sharding.mesh.abstract_mesh, P("y"))
    likes: tuple[Any, ...] = (
        struct((8, 16), np.float32),
        struct((8, 16), np.float32, sharding=abstract),
        jax.Array,
        jax.ShapeDtypeStruct,
    )
    for like in likes:
        assert restore(HANDLER, saved, like).sharding == sharding


def test_what_was_spread_over_absent_devices_comes_back_in_numpy_unless_jax_is_named() -> None:
    saved = saved_as(None, ELSEWHERE)
    back = restore(HANDLER, saved)
    assert type(back) is np.ndarray
    assert back.flags.writeable
    assert same_bits(back, numbers())
    for like in (jax.Array, struct((8, 16), np.float32)):
        named = restore(HANDLER, saved, like)
        assert isinstance(named, jax.Array)
        assert named.sharding == SingleDeviceSharding(jax.devices()[0])


@pytest.mark.parametrize(
    "text", ['{"sharding_type": "SingleDeviceSharding", "device_str": "cuda:0"}', "{}", "rubbish", "[]"]
)
def test_an_absent_device_or_an_unknown_sharding_means_the_default_device(text: str) -> None:
    back = restore(HANDLER, saved_as(None, text))
    assert back.sharding == SingleDeviceSharding(jax.devices()[0])
    assert not back.committed


def test_the_default_device_is_respected() -> None:
    saved = saved_as(None, "{}")
    with jax.default_device(jax.devices()[5]):
        assert restore(HANDLER, saved).devices() == {jax.devices()[5]}


def test_numpy_arrays_and_scalars_restore_into_jax_when_asked_for() -> None:
    host = save(NumpyHandler(), numbers())
    like = struct((8, 16), np.float32, sharding=NamedSharding(mesh(2, 4), P("x", "y")))
    assert restore(HANDLER, host, like).sharding == like.sharding
    assert same_bits(restore(HANDLER, host, jax.Array), numbers())
    number = restore(HANDLER, save(ScalarHandler(), np.float32(2.5)), jnp.zeros(()))
    assert (number.shape, number.dtype, float(number)) == ((), np.float32, 2.5)


def test_a_batch_keeps_its_order_whatever_is_in_it() -> None:
    likes: list[Any] = [
        jnp.zeros((8, 16)),
        jax.device_put(jnp.zeros((8, 16)), NamedSharding(mesh(2, 4), P("x"))),
        jax.random.key(9),
        jax.device_put(jnp.zeros((8, 16)), jax.devices()[1]),
        jnp.zeros((8, 16)),
        jax.device_put(jnp.zeros((8, 16)), NamedSharding(mesh(2, 4), P())),
    ]
    leaves: list[ReadLeaf] = []
    for index, like in enumerate(likes):
        value = jax.random.key(index) if index == 2 else jnp.full((8, 16), index, jnp.float32)
        saved = save(HANDLER, value)
        aim = target(HANDLER, saved, like)
        assert isinstance(aim, Target)
        for region in aim.regions:
            saved.fill(region)
        leaves.append(ReadLeaf(index, saved.stored, HANDLER, aim))

    built = HANDLER.build(ReadLeaves.of(leaves))
    assert [value.sharding for value in built] == [like.sharding for like in likes]
    assert [int(value[0, 0]) for index, value in enumerate(built) if index != 2] == [0, 1, 3, 4, 5]
    assert HANDLER.build(ReadLeaves.of([])) == []


SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@pytest.mark.many_cases
@given(SHAPES, st.integers(1, 40), st.booleans(), st.sampled_from(["int4", "int16"]))
def test_any_shape_in_pieces_of_any_size(
    shape: tuple[int, ...], piece_bytes: int, alias: bool, dtype: str
) -> None:
    handler = ArrayHandler(alias_host=alias)
    array = jnp.asarray(numbers(shape, np.int8) % 7, dtype=dtype)
    assert same_bits(restore(handler, save(handler, array, piece_bytes), array), array)


def test_a_saved_sharding_that_does_not_divide_the_array_is_ignored() -> None:
    text = encode(NamedSharding(mesh(2, 4), P(("x", "y"))))
    spec = LeafSpec("jax.Array", (3,), "float32", 4, (3,), sharding=text)
    assert same_bits(restore(HANDLER, Saved(spec, {(0,): bytes(12)})), np.zeros(3, np.float32))


@pytest.mark.parametrize("like", ["arrays", "structs"])
def test_targets_with_equal_shardings_of_their_own_are_one(like: str) -> None:
    """Small arrays of one target are made in one step, whoever made the shardings of the `like`s."""
    saved = save(ArrayHandler(), jnp.zeros(8))
    shardings = [NamedSharding(mesh(8), P("x")), NamedSharding(mesh(8), P("x")), NamedSharding(mesh(8), P())]
    likes: list[Any] = [struct((8,), np.float32, sharding=sharding) for sharding in shardings]
    if like == "arrays":
        likes = [jax.device_put(np.zeros(8, np.float32), sharding) for sharding in shardings]

    rows = StoredRows([saved.stored], [0, 0, 0], [saved.spec] * 3)
    first, second, other = ArrayHandler().targets(rows, likes)
    assert first is second
    assert other is not first
