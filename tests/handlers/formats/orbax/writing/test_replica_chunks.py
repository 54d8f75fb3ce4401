"""Shards that several devices hold: which of them is copied, which part, and in which order."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock import SaveArgs, SaveFormat
from penstock.errors import DeletedLeafError
from penstock.handlers import ArrayHandler
from penstock.handlers.formats.orbax.storage_choice import fitted
from penstock.handlers.leaves import Box, BoxCopy
from penstock.kernel import Leaf, ParamInfo, PiecePlan

PARALLEL = SaveFormat(replica_parallel=True, replica_parallel_min_bytes=0)


def place(value: Any, mesh: tuple[int, ...], *axes: Any) -> Any:
    devices: Any = np.array(jax.devices())[: np.prod(mesh)].reshape(mesh)
    sharding = NamedSharding(Mesh(devices, ("x", "y")[: len(mesh)]), PartitionSpec(*axes))  # type: ignore[no-untyped-call]  # jax's
    return jax.device_put(value, sharding)


def plans_of(
    value: Any,
    form: SaveFormat,
    args: SaveArgs | None = None,
    piece_bytes: int = 1 << 20,
    *,
    alias: bool = True,
) -> tuple[Leaf, list[PiecePlan]]:
    handler = ArrayHandler(alias_host=alias)
    info = ParamInfo(("a",), (), "['a']")
    spec = fitted(handler.describe([value], [info], {})[0], "['a']", form, args)
    leaf = Leaf(0, info, value, spec, handler)
    return leaf, list(handler.pieces(leaf, piece_bytes))


def put_together(leaf: Leaf, plans: list[PiecePlan]) -> Any:
    """The array that a reader would find, after checking that every byte came once."""
    spec = leaf.spec
    chunks: dict[tuple[int, ...], bytearray] = {}
    for plan in sorted(plans, key=lambda plan: (plan.chunk, plan.start)):
        data = plan.take()
        chunk = chunks.setdefault(plan.chunk, bytearray())
        assert (len(data), len(chunk)) == (plan.nbytes, plan.start)
        chunk += data

    found = np.zeros(spec.shape or (), spec.dtype)
    counts = [size // part for size, part in zip(found.shape, spec.chunk_shape, strict=True)]
    assert sorted(chunks) == list(itertools.product(*map(range, counts)))
    for index, content in chunks.items():
        region = tuple(
            slice(at * part, at * part + part) for at, part in zip(index, spec.chunk_shape, strict=True)
        )
        found[region] = np.frombuffer(bytes(content), spec.dtype).reshape(spec.chunk_shape)

    return found


VALUE = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
SPREAD: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "one device": ((1,), ()),
    "everywhere": ((8,), ()),
    "rows": ((8,), ("x",)),
    "rows and replicas": ((2, 4), ("x",)),
    "columns and replicas": ((2, 4), (None, "y")),
    "both": ((2, 4), ("x", "y")),
    "not divisible": ((1, 7), ()),
}


@pytest.mark.thinned(4)
@pytest.mark.many_cases
@pytest.mark.parametrize("alias", [True, False], ids=["view", "copy"])
@pytest.mark.parametrize("piece_bytes", [1 << 20, 200, 4])
@pytest.mark.parametrize(
    "args", [None, SaveArgs(chunk_byte_size=64), SaveArgs(dtype="float16", shard_axes=(1,))]
)
@pytest.mark.parametrize("form", [SaveFormat(), PARALLEL], ids=["first", "parallel"])
@pytest.mark.parametrize("spread", SPREAD)
def test_every_element_is_taken_once(
    spread: str, form: SaveFormat, args: SaveArgs | None, piece_bytes: int, alias: bool
) -> None:
    mesh, axes = SPREAD[spread]
    leaf, plans = plans_of(place(VALUE, mesh, *axes), form, args, piece_bytes, alias=alias)

    np.testing.assert_array_equal(put_together(leaf, plans), VALUE.astype(leaf.spec.dtype))
    assert all(plan.nbytes <= max(piece_bytes, leaf.spec.itemsize) or not plan.cost for plan in plans)


def test_each_part_comes_from_a_device_of_its_own() -> None:
    """Replicas are equal by contract; here they are not, which tells who was asked."""
    devices = jax.devices()
    shards = [jax.device_put(np.full((16, 2), at, np.float32), device) for at, device in enumerate(devices)]
    sharding = place(VALUE, (8,)).sharding
    value = jax.make_array_from_single_device_arrays((16, 2), sharding, shards)

    leaf, plans = plans_of(value, PARALLEL)
    assert (leaf.spec.replicas.n, leaf.spec.write_shape, leaf.spec.chunk_shape) == (8, (2, 2), (2, 2))
    found = put_together(leaf, plans)
    assert sorted(found[:, 0].tolist()) == sorted([*range(8), *range(8)])
    assert (found[:, 0] == found[:, 1]).all()

    leaf, plans = plans_of(value, SaveFormat())
    assert (put_together(leaf, plans) == put_together(leaf, plans)[0, 0]).all(), "one device"


@pytest.mark.parametrize("alias", [True, False], ids=["view", "copy"])
def test_devices_take_turns_with_pieces_of_their_share(alias: bool) -> None:
    value = place(np.zeros((16, 64), np.uint8), (2, 4), "x")  # four replicas of each half

    leaf, plans = plans_of(value, PARALLEL, piece_bytes=512, alias=alias)

    assert leaf.spec.chunk_shape == (2, 64)
    assert {plan.nbytes for plan in plans} == {64}, "512 bytes are a piece of each of eight devices"
    assert [plan.chunk[0] for plan in plans[:8]] == sorted({plan.chunk[0] for plan in plans})
    assert [plan.start for plan in plans] == [0] * 8 + [64] * 8


def test_what_is_to_be_encoded_is_never_cut() -> None:
    form = SaveFormat(codec="zstd", replica_parallel=True)
    value = place(np.zeros((16, 1 << 20), np.uint8), (8,))

    leaf, plans = plans_of(value, form, piece_bytes=2 << 20)

    assert leaf.spec.codec is not None
    assert {plan.nbytes for plan in plans} == {leaf.spec.chunk_nbytes} == {2 << 20}
    assert len(plans) == 8


def test_what_is_on_the_host_has_nothing_to_begin() -> None:
    for alias in (True, False):
        for form in (SaveFormat(), PARALLEL):
            _, plans = plans_of(place(VALUE, (8,)), form, alias=alias)
            assert all(plan.begin is None for plan in plans)


def test_replicas_are_counted() -> None:
    handler = ArrayHandler()
    counts = {
        spread: handler.describe(
            [place(VALUE, *SPREAD[spread][:1], *SPREAD[spread][1])], [ParamInfo((), (), "")], {}
        )[0].replicas.n
        for spread in SPREAD
    }
    assert counts == {
        "one device": 1,
        "everywhere": 8,
        "rows": 1,
        "rows and replicas": 4,
        "columns and replicas": 2,
        "both": 1,
        "not divisible": 7,
    }
    assert handler.describe([place(np.zeros((0, 8)), (8,))], [ParamInfo((), (), "")], {})[0].replicas.n == 1


def test_a_key_is_divided_as_its_data_are() -> None:
    keys = place(jax.random.split(jax.random.key(3), 16), (8,))
    leaf, plans = plans_of(keys, PARALLEL)
    assert leaf.spec.write_shape == (2, 2)
    np.testing.assert_array_equal(put_together(leaf, plans), jax.random.key_data(keys))


@pytest.mark.parametrize("dtype", ["float32", "int4", "bfloat16"])
@pytest.mark.parametrize("stored", ["", "float16"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_copy_that_was_begun_is_the_one_that_is_taken(dtype: str, stored: str, whole: bool) -> None:
    value = jax.numpy.arange(4 * 6).reshape(4, 6).astype(dtype)
    box = Box((0, 0), (4, 6), 0) if whole else Box((2, 0), (2, 6), 12)
    begun, plain = (BoxCopy(value, value, box, "['a']", stored) for _ in range(2))

    begun.begin()
    assert bytes(begun.take()) == bytes(plain.take())
    assert len(plain.take()) == box.n_elements * (2 if stored else np.asarray(value).itemsize)


def test_what_was_deleted_cannot_be_begun_nor_taken() -> None:
    value = jax.numpy.ones(4)
    value.delete()
    for copy in (
        BoxCopy(value, value, Box((0,), (4,), 0), "['a']"),
        BoxCopy(value, value, Box((1,), (2,), 1), "['a']"),
    ):
        for call in (copy.begin, copy.take):
            with pytest.raises(DeletedLeafError, match=r"\['a'\]"):
                call()


def test_a_copy_is_not_the_arrays_own_memory() -> None:
    value = jax.numpy.zeros(1000)
    for begins in (False, True):
        copy = BoxCopy(value, value, Box((0,), (1000,), 0), "['a']")
        if begins:
            copy.begin()
        assert not np.shares_memory(np.asarray(copy.take()), np.asarray(value).view(np.uint8))
