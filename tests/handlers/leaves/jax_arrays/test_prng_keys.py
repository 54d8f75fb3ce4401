"""Typed PRNG keys, out and in."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from tests.handlers.leaves.round_trips import (
    ELSEWHERE,
    P,
    Saved,
    difference,
    host_copy,
    mesh,
    restore,
    same_bits,
    save,
    struct,
)

from penstock.handlers import ArrayHandler, NumpyHandler
from penstock.kernel import LeafSpec

HANDLER = ArrayHandler()
HANDLERS = pytest.mark.parametrize(
    "handler", [HANDLER, ArrayHandler(alias_host=False)], ids=["aliasing", "copying"]
)


@HANDLERS
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_are_stored_as_their_data(handler: ArrayHandler, impl: str) -> None:
    for keys in (jax.random.key(3, impl=impl), jax.random.split(jax.random.key(3, impl=impl), 8)):
        saved = save(handler, keys, 24)
        data = jax.random.key_data(keys)
        assert (saved.spec.dtype, saved.spec.shape, saved.spec.extended_dtype) == (
            "uint32",
            data.shape,
            impl,
        )
        assert same_bits(saved.array(), data)
        for like in ((), (keys,), (struct(keys.shape, keys.dtype),), (jax.Array,)):
            back = restore(handler, saved, *like)
            assert back.dtype == keys.dtype
            assert same_bits(jax.random.key_data(back), data)
        assert host_copy(data) is None


def test_the_sharding_of_keys_is_that_of_their_data() -> None:
    keys = jax.device_put(jax.random.split(jax.random.key(3), 8), NamedSharding(mesh(2, 4), P("x")))
    saved = save(HANDLER, keys)
    assert saved.spec.chunk_shape == (4, 2)
    assert json.loads(saved.spec.sharding or "")["partition_spec"] == ["x", None]
    assert restore(HANDLER, saved).sharding == keys.sharding
    assert restore(HANDLER, saved, keys).sharding == keys.sharding


def test_keys_that_were_spread_over_absent_devices_stay_keys() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    saved = save(HANDLER, keys)
    spec = LeafSpec(
        "jax.Array", (4, 2), "uint32", 4, (4, 2), (4, 2), sharding=ELSEWHERE, extended_dtype="threefry2x32"
    )
    assert restore(HANDLER, Saved(spec, saved.chunks)).dtype == keys.dtype


def test_raw_data_and_typed_keys_stand_for_each_other_when_asked_for() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    data = jax.random.key_data(keys)
    assert same_bits(restore(HANDLER, save(HANDLER, keys), data), data)
    assert restore(HANDLER, save(HANDLER, data), keys).dtype == keys.dtype
    assert same_bits(jax.random.key_data(restore(HANDLER, save(HANDLER, data), keys)), data)
    assert same_bits(restore(NumpyHandler(), save(HANDLER, keys), np.zeros((4, 2), np.uint32)), data)


def test_keys_of_another_implementation_or_shape_differ() -> None:
    saved = save(HANDLER, jax.random.split(jax.random.key(0), 4))
    other = difference(HANDLER, saved, jax.random.split(jax.random.key(0, impl="rbg"), 4))
    assert (other.kind, other.in_like, other.on_disk) == (
        "dtype",
        "key<rbg>[4]",
        "jax.Array key<threefry2x32>[4]",
    )
    assert difference(HANDLER, saved, jax.random.split(jax.random.key(0), 5)).kind == "shape"
