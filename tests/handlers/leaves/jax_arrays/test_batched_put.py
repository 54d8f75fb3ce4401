"""Small arrays onto devices: the quick way gives what the public one gives, or is not taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.leaves import small_arrays as fast_put
from penstock.handlers.leaves.small_arrays import PUBLIC_VARIABLE, put_publicly, put_small

_jax: Any = jax
P: Any = PartitionSpec

DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16", "int2", "int4"),
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
SHAPES = [(5,), (), (2, 3), (0, 4), (1, 1, 7)]
SHARDING = SingleDeviceSharding(_jax.devices()[0])


def on_mesh(spec: PartitionSpec, *shape: int, backwards: bool = False) -> NamedSharding:
    devices = _jax.devices()[: np.prod(shape)]
    return NamedSharding(Mesh(np.array(devices[:: -1 if backwards else 1]).reshape(shape), ("x", "y")), spec)


SHARDED = {
    "rows": on_mesh(P("x"), 8, 1),
    "rows, last device first": on_mesh(P("x"), 8, 1, backwards=True),
    "columns": on_mesh(P(None, "x"), 4, 2),
    "both": on_mesh(P("y", "x"), 4, 2),
    "both on one axis": on_mesh(P(("y", "x")), 4, 2),
    "replicated": on_mesh(P(), 4, 2),
    "partly replicated": on_mesh(P(None, "y"), 4, 2, backwards=True),
    "on some devices": on_mesh(P("y"), 1, 4),
}


@pytest.fixture(params=[True, False], ids=["x64", "x32"])
def x64(request: pytest.FixtureRequest) -> Iterator[bool]:
    enabled: bool = request.param
    with _jax.enable_x64(enabled):
        yield enabled


def placed(device: int | None) -> Sharding | None:
    return None if device is None else SingleDeviceSharding(_jax.devices()[device])


def views(shape: tuple[int, ...], dtype: str, n: int = 3) -> tuple[np.ndarray[Any, Any], list[Any]]:
    """Views at odd places of one buffer, as in a pack."""
    nbytes = max(1, int(np.prod(shape)) * numpy_dtype(dtype).itemsize)
    buffer = (np.arange(nbytes * n + 1) % 2).astype(np.uint8)
    found = [np.ndarray(shape, numpy_dtype(dtype), buffer.data, 1 + at * nbytes) for at in range(n)]
    return buffer, found


def said_of(array: jax.Array) -> tuple[object, ...]:
    return (
        type(array),
        array.shape,
        array.dtype,
        array.sharding,
        array.committed,
        cast("Any", array).weak_type,
        cast("Any", array).aval,
        array.is_deleted(),
        np.asarray(cast("Any", array)).tobytes(),
    )


@pytest.mark.thinned(3)
@pytest.mark.many_cases
@pytest.mark.parametrize("device", [None, 0, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_array_is_the_same_both_ways(
    dtype: str, shape: tuple[int, ...], device: int | None, x64: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, found = views(shape, dtype)
    expected = [view.tobytes() for view in found]
    quick = put_small(found, placed(device))
    monkeypatch.setenv(PUBLIC_VARIABLE, "1")
    public = put_small(found, placed(device))
    _jax.block_until_ready((quick, public))
    buffer[:] = 0xFF

    assert [said_of(array) for array in quick] == [said_of(array) for array in public]
    if x64 or numpy_dtype(dtype).itemsize < 8 or dtype == "complex64":
        assert [said_of(array)[-1] for array in quick] == expected


@pytest.mark.many_cases
@pytest.mark.parametrize("sharding", SHARDED)
@pytest.mark.parametrize("shape", [(8, 4), (8, 4, 3)], ids=str)
@pytest.mark.parametrize("dtype", ["bool", "int8", "float32", "bfloat16", "float64", "complex64"])
def test_every_shard_is_the_same_both_ways(
    dtype: str, shape: tuple[int, ...], sharding: str, x64: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = np.random.default_rng(0).integers(0, 2, (3, *shape)).astype(numpy_dtype(dtype))
    found, expected = list(numbers.copy()), list(numbers)
    quick = put_small(found, SHARDED[sharding])
    monkeypatch.setenv(PUBLIC_VARIABLE, "1")
    public = put_small(found, SHARDED[sharding])
    _jax.block_until_ready((quick, public))
    for view in found:
        view[:] = 0

    def shards(array: jax.Array) -> list[tuple[object, ...]]:
        return [
            (shard.device, shard.index, shard.replica_id, np.asarray(shard.data).tobytes())
            for shard in array.addressable_shards
        ]

    assert [(said_of(array), shards(array)) for array in quick] == [
        (said_of(array), shards(array)) for array in public
    ]
    for array, numbers_of_it in zip(quick, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(array), numbers_of_it)


def test_the_quick_way_is_taken_here() -> None:
    # Where this fails after an upgrade of jax, all is well but slow: see what `_fast_put` finds.
    for place, committed in [
        (SHARDING, False),
        (SHARDING, True),
        *[(each, True) for each in SHARDED.values()],
    ]:
        assert (
            fast_put._fast_put((8, 4), np.dtype(np.float32), place, committed=committed, x64=False)
            is not None
        )


def test_the_default_device_is_where_uncommitted_arrays_go() -> None:
    _, found = views((5,), "float32")
    with _jax.default_device(_jax.devices()[2]):
        (array, *_) = put_small(found, None)

    assert array.devices() == {_jax.devices()[2]}
    assert not array.committed


def test_arrays_may_be_donated() -> None:
    _, found = views((5,), "float32")
    (array, *_) = put_small(found, None)
    added = _jax.jit(lambda x: x + 1, donate_argnums=0)(array)

    assert np.asarray(added).tolist() == (found[0] + 1).tolist()
    assert array.is_deleted()


def test_a_batch_without_arrays_puts_nothing() -> None:
    assert put_small([], None) == []


def good(view: Any) -> Any:
    (array,) = put_publicly([view], SHARDING)
    return array


def aliasing(view: Any) -> Any:
    array = good(view)

    class Looking:
        """Stands for an array that goes on looking at the caller's memory."""

        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            return np.array(view)

        def __getattr__(self, name: str) -> Any:
            return getattr(array, name)

        __class__: Any = property(lambda _: type(array))  # a disguise

    return Looking()


def raising(_: Any) -> Any:
    raise TypeError("no such argument")


BAD: dict[str, Callable[[Any], Any]] = {
    "another type": np.array,
    "another dtype": lambda view: good(view.view(np.int32)),
    "another shape": lambda view: good(view[:2]),
    "other values": lambda view: good(view + 1),
    "another place": lambda view: _jax.device_put(view.copy(), _jax.devices()[1]),
    "uncommitted": lambda view: _jax.device_put(view.copy()),
    "memory that is not its own": aliasing,
}


def same(put: Callable[[Any], Any]) -> bool:
    probe = fast_put._Probe((5,), np.dtype(np.float32))
    (public,) = put_publicly([probe.array], SHARDING)
    return probe.gives_the_same(put, public)


def test_a_call_that_gives_the_same_is_accepted() -> None:
    assert same(good)


@pytest.mark.parametrize("wrong", BAD)
def test_a_call_that_gives_something_else_is_refused(wrong: str) -> None:
    assert not same(BAD[wrong])


def test_a_call_that_raises_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_put, "_private_put", lambda *_, **__: raising)
    found = fast_put._fast_put.__wrapped__((5,), np.dtype(np.float32), SHARDING, committed=True, x64=True)
    assert found is None


def test_a_jax_without_the_call_is_served_by_the_public_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(fast_put, "import_module", absent)
    found = fast_put._fast_put.__wrapped__((5,), np.dtype(np.float32), SHARDING, committed=True, x64=True)
    assert found is None
