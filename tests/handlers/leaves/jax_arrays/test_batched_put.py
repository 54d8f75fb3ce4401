"""Small arrays onto one device: the quick way gives what the public one gives, or is not taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import Sharding, SingleDeviceSharding

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.leaves.jax_arrays import batched_put as fast_put
from penstock.handlers.leaves.jax_arrays.batched_put import PUBLIC_VARIABLE, put_publicly, put_small

_jax: Any = jax

DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16", "int2", "int4"),
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
SHAPES = [(5,), (), (2, 3), (0, 4), (1, 1, 7)]


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


def test_the_quick_way_is_taken_here() -> None:
    # Where this fails after an upgrade of jax, all is well but slow: see what `_fast_put` finds.
    put = fast_put._fast_put((5,), np.dtype(np.float32), (_jax.devices()[0], None, False), x64=False)
    assert put is not None


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


def test_nothing_is_nothing() -> None:
    assert put_small([], None) == []


SHARDING = SingleDeviceSharding(_jax.devices()[0])


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
    "another dtype": lambda view: good(view.astype(np.float16)),
    "another shape": lambda view: good(view[:2]),
    "other values": lambda view: good(view + 1),
    "another place": lambda view: _jax.device_put(view.copy(), _jax.devices()[1]),
    "uncommitted": lambda view: _jax.device_put(view.copy()),
    "memory that is not its own": aliasing,
}


def same(put: Callable[[Any], Any]) -> bool:
    return fast_put._gives_the_same(put, (5,), np.dtype(np.float32), SHARDING)


def test_a_call_that_gives_the_same_is_accepted() -> None:
    assert same(good)


@pytest.mark.parametrize("wrong", BAD)
def test_a_call_that_gives_something_else_is_refused(wrong: str) -> None:
    assert not same(BAD[wrong])


def test_a_call_that_raises_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_put, "_private_put", lambda *_, **__: raising)
    place = (_jax.devices()[0], None, True)
    assert fast_put._fast_put.__wrapped__((5,), np.dtype(np.float32), place, x64=True) is None


def test_a_jax_without_the_call_is_served_by_the_public_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(fast_put, "import_module", absent)
    place = (_jax.devices()[0], None, True)
    assert fast_put._fast_put.__wrapped__((5,), np.dtype(np.float32), place, x64=True) is None
