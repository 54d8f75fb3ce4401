from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

from penstock.handlers.dtypes import dtype_name, numpy_dtype, storable

NAMES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int2", "int4"),
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_storable_dtype_goes_to_its_name_and_back(name: str) -> None:
    assert storable(name)
    assert dtype_name(numpy_dtype(name)) == name
    assert ts.dtype(name).numpy_dtype == numpy_dtype(name)


@pytest.mark.parametrize("dtype", [ml_dtypes.uint4, ml_dtypes.uint2, ml_dtypes.float8_e4m3])
def test_what_tensorstore_does_not_know_is_not_storable(dtype: Any) -> None:
    name = dtype_name(np.dtype(dtype))

    assert not storable(name)
    with pytest.raises(ValueError, match="No TensorStore data type"):
        ts.dtype(name)


@pytest.mark.parametrize("dtype", ["O", "U3", "S3", "M8[ns]", [("x", "f4")], "V8"])
def test_what_is_no_plain_number_has_a_name_and_is_not_storable(dtype: Any) -> None:
    assert not storable(dtype_name(np.dtype(dtype)))


def test_the_name_tells_nothing_of_the_byte_order() -> None:
    assert dtype_name(np.dtype(">f4")) == dtype_name(np.dtype("<f4")) == "float32"


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no dtype 'float9'; known are bool, .*bfloat16"):
        numpy_dtype("float9")
