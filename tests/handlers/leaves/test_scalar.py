"""Numbers, out and in."""

from __future__ import annotations

import enum
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.handlers.leaves.round_trips import INFO, difference, plan, restore, save

from penstock.errors import InvalidLeafError
from penstock.handlers import ArrayHandler, NumpyHandler, ScalarHandler, StringHandler

HANDLER = ScalarHandler()
NUMPY = [
    np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.longlong,
    np.float16, np.float32, np.float64, np.complex64, np.complex128,
    ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.int2, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
]  # fmt: skip


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (7, "int64"),
        (-(1 << 63), "int64"),
        (2.5, "float64"),
        (float("-inf"), "float64"),
        (True, "bool"),
        (1 - 2j, "complex128"),
    ],
)
def test_pythons_numbers_come_back_as_they_are(value: Any, dtype: str) -> None:
    saved = save(HANDLER, value)
    assert (saved.spec.typestr, saved.spec.shape, saved.spec.dtype) == ("scalar", (), dtype)
    assert saved.spec.chunk_shape == ()
    for like in ((), (type(value)(0),), (type(value),)):
        back = restore(HANDLER, saved, *like)
        assert (type(back), back) == (type(value), value)


@given(st.floats() | st.integers(-(1 << 63), (1 << 63) - 1) | st.complex_numbers() | st.booleans())
def test_any_number_comes_back_bit_for_bit(value: Any) -> None:
    back = restore(HANDLER, save(HANDLER, value))
    assert type(back) is type(value)
    assert repr(back) == repr(value)


@pytest.mark.parametrize("type_", NUMPY)
def test_numpys_numbers_keep_their_type_when_asked_for(type_: Any) -> None:
    value = type_(1)
    saved = save(HANDLER, value)
    for like in (value, type_):
        back = restore(HANDLER, saved, like)
        assert type(back) is type(value)
        assert back == value
    assert type(restore(HANDLER, saved)) in {bool, int, float, complex}
    assert restore(HANDLER, saved) == value


def test_an_abstract_numpy_type_accepts_its_kind() -> None:
    saved = save(HANDLER, np.float32(2.5))
    for like in (np.floating, np.number, np.generic):
        assert type(restore(HANDLER, saved, like)) is np.float32
    assert difference(HANDLER, saved, np.integer).kind == "dtype"


@pytest.mark.parametrize(
    ("value", "like", "in_like", "on_disk"),
    [
        (2.5, 1, "int", "scalar float64[]"),
        (2, 1.0, "float", "scalar int64[]"),
        (True, int, "int", "scalar bool[]"),
        (1, bool, "bool", "scalar int64[]"),
        (1.0, 1j, "complex", "scalar float64[]"),
        (1.0, np.float32, "numpy.float32", "scalar float64[]"),
        (np.float32(1), np.float64(1), "numpy.float64", "scalar float32[]"),
    ],
)
def test_a_scalar_of_another_kind_is_a_mismatch(
    value: object, like: object, in_like: str, on_disk: str
) -> None:
    found = difference(HANDLER, save(HANDLER, value), like)
    assert (found.kind, found.in_like, found.on_disk) == ("dtype", in_like, on_disk)


def test_python_types_accept_every_width_of_their_kind() -> None:
    assert restore(HANDLER, save(HANDLER, np.uint64((1 << 64) - 1)), int) == (1 << 64) - 1
    assert restore(HANDLER, save(HANDLER, ml_dtypes.bfloat16(1.5)), 0.0) == 1.5
    assert restore(HANDLER, save(HANDLER, ml_dtypes.int4(-3)), int) == -3


def test_stored_0d_arrays_restore_into_numbers_and_others_do_not() -> None:
    assert restore(HANDLER, save(ArrayHandler(), jnp.int32(5)), 0) == 5
    assert restore(HANDLER, save(NumpyHandler(), np.array(2.5)), float) == 2.5
    assert difference(HANDLER, save(NumpyHandler(), np.zeros(1)), 0.0).kind == "shape"
    assert difference(HANDLER, save(StringHandler(), "7"), 7).kind == "type"


def test_a_number_costs_nothing() -> None:
    _, (only,) = plan(HANDLER, 7)
    assert (only.chunk, only.start, only.nbytes, only.cost) == ((), 0, 8, 0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1 << 63, "the int 9223372036854775808 does not fit int64; save it as a str or a uint64 array"),
        (-(1 << 63) - 1, "does not fit int64"),
        pytest.param(1 << 20000, "the int of 20001 bits does not fit int64", id="huge"),
        (Colour.RED, "Colour would come back as a plain number; convert it"),
        (np.datetime64("2024-01-01"), "dtype datetime64"),
        (np.bytes_(b"a"), "a scalar of dtype .S1 cannot be stored"),
        (ml_dtypes.uint4(1), "a scalar of dtype uint4 cannot be stored"),
    ],
)
def test_what_cannot_be_stored_is_refused(value: object, words: str) -> None:
    with pytest.raises(InvalidLeafError, match=rf"^\['opt'\]\.mu: .*{words}"):
        HANDLER.describe([value], [INFO], {})
