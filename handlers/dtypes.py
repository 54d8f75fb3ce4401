"""Element types by name, as zarr v3 and `LeafSpec.dtype` spell them: `float32`, `bfloat16`, `int4`.

On the medium every element is little-endian and takes whole bytes: `int2`, `int4` and
`float4_e2m1fn` take one byte each, as they do in numpy's memory.
"""

from __future__ import annotations

__all__ = ("dtype_name", "numpy_dtype", "storable")

from functools import lru_cache
from typing import Any, Final

import ml_dtypes
import numpy as np

_NUMPY: Final = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)

# TensorStore knows these by name, in zarr v2 as in v3. It has no uint2, no uint4 and no float8_e4m3.
_ML_DTYPES: Final = (
    "bfloat16",
    "int2",
    "int4",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)

_BY_NAME: Final[dict[str, np.dtype[Any]]] = {name: np.dtype(name) for name in _NUMPY} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_DTYPES
}


@lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of `dtype`, whatever its byte order.

    Every dtype has a name; `storable` says whether arrays of it can be stored.
    """
    return dtype.name


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype called `name`, in the byte order of this machine.

    Raises:
        ValueError: If no array of such a type can be stored.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        message = f"no dtype {name!r}; known are {', '.join(_BY_NAME)}"
        raise ValueError(message) from None


def storable(name: str) -> bool:
    """Return whether an array of the dtype called `name` can be stored.

    `uint4`, `uint2` and `float8_e4m3` cannot (TensorStore has no such types), nor can anything that
    is not a plain number: objects, strings, dates, records.

    Source:
        ORBAX_FORMAT.md §1.6, tried with TensorStore 0.1.86.
    """
    return name in _BY_NAME
