"""A header as safetensors and penstock write it, read without a JSON tree of it.

`json.loads` makes a dict and two lists of each tensor, and holds the interpreter for all of them in one
call. Writers have one form, member for member; a header of any other form, or of which anything is wrong,
is left to the JSON parser, which says what it is.
"""

from __future__ import annotations

__all__ = ("Tensor", "scan")

import json
import math
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.formats.common.json_slices import slices
from penstock.handlers.formats.safetensors.element_types import NAMES

_METADATA: Final = '{"__metadata__":'
_BETWEEN: Final = ']},"'
_NUMBER: Final = r"(?:0|[1-9][0-9]{0,17})"
_ENTRY: Final = re.compile(
    rf'("([^"\\\x00-\x1f]*)":\{{"dtype":"([A-Z0-9_]+)","shape":\[((?:{_NUMBER}(?:,{_NUMBER})*)?)\],'
    rf'"data_offsets":\[({_NUMBER}),({_NUMBER})\]\}})(?:,(?!$)|$)'
)
_MOST_AXES: Final = 32  # more are unusual


@final
class Tensor(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: str  #: by its name here: `bfloat16`
    shape: tuple[int, ...]
    offset: int  #: bytes from the start of the file
    nbytes: int


def scan(
    text: str, start: int, size: int, distinct: Callable[[list[tuple[str, object]]], object]
) -> tuple[tuple[Tensor, ...], object] | None:
    """Read a header.

    Args:
        text: All of it.
        start: Where data begin, bytes from the start of the file.
        size: Of the file, bytes.
        distinct: Makes an object of members that must differ; raises ValueError if they do not.

    Returns:
        The tensors, which tile the data in order, and what `__metadata__` is; None if the form is another
        one.
    """
    text = text.rstrip(" ")
    metadata: object = None
    at = 1
    if text.startswith(_METADATA):
        try:
            metadata, at = json.JSONDecoder(object_pairs_hook=distinct).raw_decode(text, len(_METADATA))
        except (ValueError, RecursionError):
            return None
        if text[at : at + 1] != ",":
            return None
        at += 1

    if text[:1] != "{" or text[-1:] != "}":
        return None

    tensors = _tensors(text, at, start, size)
    if tensors is None or len({tensor.name for tensor in tensors}) != len(tensors):
        return None

    return tuple(tensors), metadata


def _tensors(text: str, at: int, offset: int, size: int) -> list[Tensor] | None:
    known: dict[tuple[str, str], tuple[str, tuple[int, ...], int] | None] = {}
    found: list[Tensor] = []
    end = start = offset
    for part in slices(text, at, len(text) - 1, _BETWEEN, 2):
        entries: list[Any] = _ENTRY.findall(part)
        if sum([len(entry[0]) + 1 for entry in entries]) != len(part) + 1:
            return None

        for _, name, code, shape, first, stop in entries:
            if (code, shape) not in known:
                known[code, shape] = _kind(code, shape)

            kind = known[code, shape]
            begin = start + int(first)
            if kind is None or begin != end or name == "__metadata__":
                return None

            end += kind[2]
            if start + int(stop) != end:
                return None

            found.append(Tensor(name, kind[0], kind[1], begin, kind[2]))

    return found if end == size else None


def _kind(code: str, text: str) -> tuple[str, tuple[int, ...], int] | None:
    """The dtype, shape and bytes of tensors; None if there is anything to be said about them."""
    shape = tuple(map(int, text.split(","))) if text else ()
    if code not in NAMES or len(shape) > _MOST_AXES:
        return None

    itemsize = numpy_dtype(NAMES[code]).itemsize
    if math.prod([n or 1 for n in shape]) * itemsize >= 1 << 63:
        return None

    return NAMES[code], shape, math.prod(shape) * itemsize
