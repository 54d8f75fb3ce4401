"""numpy arrays, out and in."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.handlers.leaves.round_trips import INFO, difference, plan, restore, same_bits, save, target

from penstock.errors import InvalidLeafError
from penstock.handlers import ArrayHandler, NumpyHandler, ScalarHandler, StringHandler
from penstock.handlers.dtypes import numpy_dtype
from penstock.kernel import Target

HANDLER = NumpyHandler()
DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
    "float64", "complex64", "complex128", "bfloat16", "int2", "int4", "float4_e2m1fn", "float8_e3m4",
    "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu",
]  # fmt: skip


def numbers(shape: tuple[int, ...] = (6, 10), dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def layouts(array: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The same numbers in every kind of memory."""
    wide = np.repeat(array, 2, axis=-1)
    return {
        "c": array,
        "f": np.asfortranarray(array),
        "strided": wide[:, ::2],
        "reversed": array[::-1, ::-1].copy()[::-1, ::-1],
        "transposed": array.T.copy().T,
        "broadcast": np.broadcast_to(array[:1], array.shape),
        "read-only": _read_only(array),
    }


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("piece_bytes", [1, 24, 1 << 20])
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(name: str, piece_bytes: int) -> None:
    array = (numbers(dtype=np.uint8) % 2).astype(numpy_dtype(name))
    saved = save(HANDLER, array, piece_bytes)
    assert (saved.spec.typestr, saved.spec.dtype, saved.spec.itemsize) == ("np.ndarray", name, array.itemsize)
    assert (saved.spec.shape, saved.spec.chunk_shape, saved.spec.write_shape) == ((6, 10), (6, 10), None)
    for like in ((), (array,), (np.ndarray,)):
        back = restore(HANDLER, saved, *like)
        assert type(back) is np.ndarray
        assert same_bits(back, array)


@pytest.mark.parametrize("piece_bytes", [8, 44, 1 << 20])
@pytest.mark.parametrize("kind", layouts(numbers()))
def test_every_layout_is_stored_in_c_order(kind: str, piece_bytes: int) -> None:
    array = layouts(numbers())[kind]
    assert same_bits(save(HANDLER, array, piece_bytes).array(), np.ascontiguousarray(array))


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16", ">u2"])
def test_big_endian_arrays_are_stored_little_endian(dtype: str) -> None:
    array = numbers(dtype=dtype)
    saved = save(HANDLER, array, 20)
    assert same_bits(saved.array(), array.astype(array.dtype.newbyteorder("=")))
    back = restore(HANDLER, saved, array)
    assert back.dtype.isnative
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (1,), (2, 1, 3)], ids=str)
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    array = numbers(shape)
    saved = save(HANDLER, array, 8)
    assert saved.spec.chunk_shape == tuple(max(1, size) for size in shape)
    assert same_bits(restore(HANDLER, saved, array), array)


SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@given(
    array=hnp.arrays(
        st.sampled_from([np.int8, np.float64]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    piece_bytes=st.integers(1, 100),
    order=st.permutations(range(4)),
)
def test_any_array_in_pieces_of_any_size(
    array: np.ndarray[Any, Any], piece_bytes: int, order: list[int]
) -> None:
    array = array.transpose([axis for axis in order if axis < array.ndim])
    assert same_bits(save(HANDLER, array, piece_bytes).array(), array)


def test_what_is_taken_does_not_change_with_the_callers_array() -> None:
    array = numbers()
    expected = array.copy()
    assert same_bits(save(HANDLER, array, 64, lambda: array.fill(-1)).array(), expected)


def test_a_piece_costs_its_bytes() -> None:
    _, plans = plan(HANDLER, numbers(), 80)
    assert [(made.cost, made.nbytes) for made in plans] == [(80, 80)] * 3


@pytest.mark.parametrize("shape", [(3,), (1 << 16,), (5 << 18,)], ids=str)
def test_a_restored_array_is_writable_aligned_and_its_own(shape: tuple[int, ...]) -> None:
    saved = save(HANDLER, numbers(shape, np.int32))
    first, second = restore(HANDLER, saved), restore(HANDLER, saved)
    assert first.flags.writeable
    assert first.flags.aligned
    assert first.ctypes.data % (4096 if first.nbytes >= 1 << 16 else 64) == 0
    assert not np.shares_memory(first, second)
    aim = target(HANDLER, saved)
    assert isinstance(aim, Target)
    assert aim.staging_bytes == 0


class Subclass(np.ndarray[Any, Any]):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([1, "a", None], object), "dtype object cannot be stored; make it a list of leaves"),
        (np.array(["a", "bc"]), "dtype <U2 cannot be stored; save a list of str leaves"),
        (np.array([b"a"]), "save a list of str leaves, or the bytes as uint8"),
        (np.array(["a"], np.dtypes.StringDType()), "save a list of str leaves"),
        (np.array(["2024-01-01"], "M8[D]"), r"save value\.view\(np\.int64\)"),
        (np.zeros(2, [("a", "f4"), ("b", "i4")]), "save its fields as separate leaves"),
        (np.zeros(2, np.longdouble), r"convert it with \.astype\(\)"),
        (np.zeros(2, ml_dtypes.uint4), r"dtype uint4 .*convert it with \.astype\(\)"),
        (np.ma.masked_array([1, 2], [True, False]), r"would lose its mask; save value\.data and value\.mask"),
        (
            np.zeros(3).view(Subclass),
            r"Subclass would come back as a plain np\.ndarray; save np\.asarray\(value\)",
        ),
    ],
    ids=lambda value: getattr(value, "dtype", ""),
)
def test_what_cannot_be_stored_is_refused_with_a_remedy(value: object, words: str) -> None:
    with pytest.raises(InvalidLeafError, match=rf"^\['opt'\]\.mu: .*{words}") as caught:
        HANDLER.describe([value], [INFO], {})
    assert caught.value.key_path == "['opt'].mu"


@pytest.mark.parametrize(
    ("like", "kind", "words"),
    [
        (numbers((10, 6)), "shape", "float32[10,6] in the target, np.ndarray float32[6,10] on disk"),
        (numbers(dtype=np.float64), "dtype", "float64[6,10] in the target, np.ndarray float32[6,10] on disk"),
        (numbers(dtype=">f8"), "dtype", "float64[6,10] in the target"),
    ],
)
def test_a_difference_is_told_and_nothing_is_cast(like: object, kind: str, words: str) -> None:
    found = difference(HANDLER, save(HANDLER, numbers()), like)
    assert found.kind == kind
    assert words in str(found)


def test_other_stored_arrays_restore_into_numpy() -> None:
    array = jnp.arange(6, dtype=jnp.bfloat16)
    back = restore(HANDLER, save(ArrayHandler(), array), np.zeros(6, ml_dtypes.bfloat16))
    assert type(back) is np.ndarray
    assert same_bits(back, array)
    assert restore(HANDLER, save(ScalarHandler(), 7), np.ndarray) == np.array(7)


def test_a_string_is_no_array() -> None:
    for like in (np.ndarray, numbers()):
        assert difference(HANDLER, save(StringHandler(), "x"), like).kind == "type"
