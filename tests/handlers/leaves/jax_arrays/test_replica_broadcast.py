"""Sending one replica to the others, with the virtual devices of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from penstock.errors import SpecError
from penstock.handlers.leaves.single_replica import ReplicaAxis, ReplicaBroadcast, SharedArray, rounds_of

P: Any = PartitionSpec
BITS = np.random.default_rng(0).integers(0, 2**32, (16, 64), np.uint32)
VALUES: Sequence[tuple[Any, Any]] = (
    (BITS.view(np.float32), P("model")),
    (BITS[:4].view(np.uint16).view(jnp.bfloat16), P(None, "model")),
    (BITS[:1].view(np.uint8)[0] % 2 == 0, P()),
    (np.float32(-0.0), P()),
    (BITS[:8].view(np.complex64), P("model")),
    (np.arange(-8, 8, dtype=np.int8).astype(jnp.int4), P("model")),
)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("most_bytes", [1 << 20, 200, 12])
@pytest.mark.parametrize("primary", [0, 1])
def test_every_bit_arrives_at_every_replica(primary: int, most_bytes: int) -> None:
    axis = ReplicaAxis("data", primary)
    shardings = [NamedSharding(mesh(), spec) for _, spec in VALUES]
    held = [np.asarray(value) for value, _ in VALUES]
    arrays = [
        SharedArray(f"[{at}]", value.shape, value.dtype, sharding)
        for at, (value, sharding) in enumerate(zip(held, shardings, strict=True))
    ]
    sources = [
        jax.device_put(value, axis.one_replica(sharding))
        for value, sharding in zip(held, shardings, strict=True)
    ]
    broadcast = ReplicaBroadcast(arrays, sources, axis)
    rounds = list(rounds_of(arrays, most_bytes))
    for each in rounds:
        assert each.nbytes <= most_bytes
        broadcast.perform(each)

    restored = broadcast.all_arrays()
    assert (len(rounds) == 1) is (most_bytes == 1 << 20)
    for number, (value, sharding) in enumerate(zip(held, shardings, strict=True)):
        found: Any = restored[number]
        assert found.sharding == sharding
        for shard in found.addressable_shards:
            assert np.asarray(shard.data).tobytes() == value[shard.index].tobytes()


@pytest.mark.parametrize("primary", [-1, 2])
def test_a_replica_that_there_is_not_is_refused(primary: int) -> None:
    with pytest.raises(SpecError, match="no replica"):
        ReplicaAxis("data", primary).one_replica(NamedSharding(mesh(), P()))


def test_arrays_of_different_meshes_are_sent_apart() -> None:
    other = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    arrays = [
        SharedArray("", (8,), np.dtype(np.int32), NamedSharding(one, P("model")))
        for one in (mesh(), other, mesh())
    ]
    found = [(each.mesh, [number for number, _, _ in each.boxes]) for each in rounds_of(arrays, 1 << 20)]
    assert found == [(mesh(), [0, 2]), (other, [1])]


def test_lengths_of_rounds_are_few() -> None:
    arrays = [SharedArray("", (1 << 14, 3), np.dtype(np.int32), NamedSharding(mesh(), P())) for _ in range(3)]
    assert [each.words for each in rounds_of(arrays, 300_000)] == [1 << 16] * 3
    assert next(each.words for each in rounds_of(arrays[:1], 10)) == 1 << 14


@pytest.mark.parametrize(
    ("sharding", "has_replicas"),
    [
        (NamedSharding(mesh(), P("model")), True),
        (NamedSharding(mesh(), P(None, "model")), True),
        (NamedSharding(mesh(), P()), True),
        (NamedSharding(mesh(), P("data")), False),
        (NamedSharding(mesh(), P(("data", "model"))), False),
        (NamedSharding(Mesh(np.array(jax.devices()[:2]), ("model",)), P("model")), False),
        (NamedSharding(Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model")), P()), False),
        (SingleDeviceSharding(jax.devices()[0]), False),
        (None, False),
    ],
)
def test_an_array_has_replicas_if_it_is_not_cut_along_the_axis(sharding: Any, has_replicas: bool) -> None:
    one = ReplicaAxis("data", 1).one_replica(sharding)
    assert (one is not None) is has_replicas
    if one is not None:
        assert one.device_set == set(jax.devices()[4:])
        assert one.spec == sharding.spec
