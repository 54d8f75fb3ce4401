"""The element types of safetensors files, by their names in the format and in penstock.

Source:
    The format's own enumeration, as safetensors 0.8 has it. `F8_E4M3` is the type without infinities,
    which ml_dtypes calls `float8_e4m3fn`. `F4` and the two `F6` pack elements into shared bytes.
"""

from __future__ import annotations

__all__ = ("CODES", "NAMES", "PACKED")

from collections.abc import Mapping
from typing import Final

NAMES: Final[Mapping[str, str]] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""What the file says -> the dtype by name."""

CODES: Final[Mapping[str, str]] = {name: code for code, name in NAMES.items()}
"""The dtype by name -> what the file says."""

PACKED: Final = frozenset({"F4", "F6_E2M3", "F6_E3M2"})
"""Types that exist and that penstock does not read."""
